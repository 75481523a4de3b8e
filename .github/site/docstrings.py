"""Reads the docstrings of the package as the site shows them."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Calls the section `Example:`, which Griffe takes for a remark, by the name that it knows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object after it was read."""
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            lines = ["Examples:" if line == "Example:" else line for line in lines]
            obj.docstring.value = "\n".join(lines)
