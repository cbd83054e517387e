"""Measures settings of private training on handwritten digits."""
