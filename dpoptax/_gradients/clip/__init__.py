"""Provides clips, norm bounds that include rounding, and sealed clipped sums."""
