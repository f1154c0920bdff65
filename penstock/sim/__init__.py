"""Simulation of the real control plane in virtual time."""
