"""Provides noise stages, and the ledger in their state."""
