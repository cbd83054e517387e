"""Bounds of norms and sums that include rounding, and sums that keep within them."""
