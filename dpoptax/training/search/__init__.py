"""Many runs: comparisons at one ε, and sweeps with their price."""
