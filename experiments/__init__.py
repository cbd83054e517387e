"""Recomputes the papers' results. Not part of the installed package."""
