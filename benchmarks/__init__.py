"""Compares private training steps with non-private steps and other libraries."""
