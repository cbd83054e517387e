"""Measures settings of private training on handwritten digits, with tuning and spreads."""
