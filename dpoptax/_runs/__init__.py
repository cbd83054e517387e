"""Runs of a plan: their secrets, batches and guarantees, and what their releases rest on."""
