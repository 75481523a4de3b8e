"""Lost numbers in a jaxpr, operation by operation: see `../README.md`."""
