"""Bounds the norms of per-example gradients from their factors."""
