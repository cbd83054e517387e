"""What reproduces the papers: the studies by command, and the report."""
