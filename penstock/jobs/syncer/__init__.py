"""The State Syncer: from expected to running config, by batches and by plans (Turbine III-B)."""
