"""Privacy events and their prices, for `accounting`, `sampling` and `matrix`."""
