"""Generation of text by beam search, and its scores."""
