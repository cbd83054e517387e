"""Random bits and the noise made of them: keys, generators, normal and discrete Gaussian draws."""
