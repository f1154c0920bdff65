"""Errors, clocks, threads and the journal: no policy, no Spark."""
