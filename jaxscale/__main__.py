"""`python -m jaxscale doctor package.module:function`."""

import os
import sys

from ._doctor.cli import main

_EXCESS = "--xla_allow_excess_precision"

if __name__ == "__main__":
    # Before JAX makes its first array. Else XLA on CPU may keep float32 between two operations
    # in half precision, and what overflows elsewhere would not here.
    flags = os.environ.get("XLA_FLAGS", "")
    if _EXCESS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_EXCESS}=false"
    sys.exit(main(sys.argv[1:]))
