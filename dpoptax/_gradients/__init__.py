"""Public points, the clip of each example, and the sum."""
