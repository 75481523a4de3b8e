"""States: what is carried from one step to the next."""
