"""The command `python -m jaxscale doctor`."""
