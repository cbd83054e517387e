"""Compares the papers' claims with the numbers of the studies."""
