"""Where numbers get lost in a program, operation by operation: see `../README.md`."""
