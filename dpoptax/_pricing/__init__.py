"""Privacy events, and the prices of them that dp_accounting lacks."""
