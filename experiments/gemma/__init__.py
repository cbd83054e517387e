"""Fine-tunes Gemma 3 270M on real text with tunix, from weights on the package index."""
