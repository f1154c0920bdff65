"""How much: metrics, the auto scaler, control policies, the doctor, capacity (Turbine V, StreamOps)."""
