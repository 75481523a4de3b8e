"""A backward pass with a switch at each place of the model: see `../README.md`."""
