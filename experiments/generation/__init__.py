"""Generates texts by beam search and scores them."""
