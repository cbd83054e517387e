"""Computes the sum of clipped per-example gradients without forming each of them."""
