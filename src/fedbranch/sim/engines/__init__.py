"""Engines: what trains and measures the clients of a simulation."""
