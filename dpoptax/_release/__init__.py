"""The only release: noise, its random bits, and the ledger."""
