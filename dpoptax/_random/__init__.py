"""Random keys, generators, and draws of normal and discrete Gaussian noise."""
