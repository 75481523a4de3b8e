"""What is carried from one step to the next."""
