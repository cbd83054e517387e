"""Clip geometries, the bounds that they rest on, and the sum under its seal."""
