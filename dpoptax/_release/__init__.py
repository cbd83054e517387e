"""The only release: noise stages and the ledger."""
