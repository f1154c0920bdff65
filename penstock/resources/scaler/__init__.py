"""The auto scaler's decisions: reactive, proactive and preactive (Turbine V, StreamOps 5.1)."""
