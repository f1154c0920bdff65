"""Where it runs: task specs, shards, containers, failover (Turbine IV)."""
