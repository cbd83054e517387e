"""Privacy events, and prices that dp_accounting lacks."""
