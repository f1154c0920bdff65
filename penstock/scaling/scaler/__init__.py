"""The auto scaler's decisions, in three generations (Turbine V)."""
