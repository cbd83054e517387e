"""Models by name, and their losses."""
