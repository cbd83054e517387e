"""What a run is made of: its step, its state, its files."""
