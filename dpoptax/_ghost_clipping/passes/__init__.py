"""Runs a read loss once and collects the factors of its per-example gradients."""
