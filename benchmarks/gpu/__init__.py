"""Tests correctness and measures steps on one GPU, within a time limit."""
