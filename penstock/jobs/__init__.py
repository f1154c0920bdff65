"""What runs: layered configs, the job store, the State Syncer (Turbine III)."""
