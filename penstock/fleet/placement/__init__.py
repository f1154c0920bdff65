"""Which container each shard goes to (Turbine IV-B)."""
