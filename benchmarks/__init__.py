"""What a private step costs, against the non-private step and the other libraries."""
