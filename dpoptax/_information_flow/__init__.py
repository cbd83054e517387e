"""What of a step's results depends on private data, and whether by noise."""
