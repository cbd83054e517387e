"""Public points at which gradients are taken, and a check that a loop uses them."""
