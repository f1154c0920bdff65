"""Where tasks run: shards, placement, liveness, the task list (Turbine IV)."""
