"""Differentially private training in JAX."""
