"""Where numbers die in a program, operation by operation."""
