"""Metrics of jobs by the minute: aggregated, stored for 14 days, read."""
