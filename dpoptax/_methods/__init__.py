"""Transforms that are placed after the noise stage."""
