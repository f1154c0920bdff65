"""Pipelines and computations in memory, for users' tests: see `penstock.testing`."""
