"""The command line: `jaxscale doctor module:function`, or the same as `python -m jaxscale`."""

import os
import sys

from ._doctor import cli

_EXCESS = "--xla_allow_excess_precision"


def main() -> int:
    """Returns the exit status of the command in `sys.argv`; without one it prints the help."""
    # Before JAX makes its first array. Otherwise XLA on CPU may keep float32 between two
    # operations in half precision, and what overflows on an accelerator would not here.
    flags = os.environ.get("XLA_FLAGS", "")
    if _EXCESS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_EXCESS}=false"
    return cli.main(sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
