"""Provides random keys, generators, and normal and discrete Gaussian noise."""
