"""The kernel: no policy, no Spark."""
