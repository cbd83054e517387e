"""Prints prices and counts that pages of the documentation quote."""
