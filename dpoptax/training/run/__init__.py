"""Parts of a run: its step, its state, its files."""
