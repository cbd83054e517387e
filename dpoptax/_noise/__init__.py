"""Noise stages and the ledger in their state."""
