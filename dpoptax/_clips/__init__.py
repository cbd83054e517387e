"""Defines clips, and the encodings of those that do not only scale."""
