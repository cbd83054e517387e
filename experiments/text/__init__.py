"""Classifies texts privately with a published sentence encoder."""
