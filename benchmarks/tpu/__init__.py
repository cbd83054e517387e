"""Compares private and plain training steps as compiled for a TPU."""
