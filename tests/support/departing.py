"""What goes in 0.7.0, for tests that still use it. Everything else sees its warnings as errors."""

import warnings

import pytest

GOES = r".* goes in jaxscale 0\.7\.0\."
# The mark of a test, or of a file of tests, that uses what goes.
uses_what_goes = pytest.mark.filterwarnings(f"ignore:{GOES}:DeprecationWarning")


def quietly(function, *args, **kwargs):
    """Calls a function for a table, which is filled before a mark holds."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return function(*args, **kwargs)
