"""Rewrites the program of a clipped sum where XLA would mix examples or be slow."""
