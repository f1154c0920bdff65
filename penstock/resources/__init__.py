"""How much it gets: metrics and the auto scaler (Turbine V)."""
