"""Texts: tokens, sentences, generation."""
