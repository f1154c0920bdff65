"""Control policies: detect, diagnose, resolve; run in rounds, one decision applied (StreamOps)."""
