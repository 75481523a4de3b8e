"""A program that imports the package where Flax is not installed: an error says what to install.

`test_package` runs it in a process of its own.
"""

import importlib.util
import pydoc
import sys

import pytest

find_spec = importlib.util.find_spec


def find_no_flax(name, *args):
    return None if name == "flax" else find_spec(name, *args)


importlib.util.find_spec = find_no_flax
sys.modules["flax"] = None

import jaxscale  # noqa: E402

assert not {"flax", "nnx"} & {*jaxscale.__all__, *dir(jaxscale)}
for statement in (
    "jaxscale.flax",
    "from jaxscale import flax",
    "import jaxscale.flax",
    "jaxscale.nnx",
    "import jaxscale.nnx",
):
    module = statement.split()[-1].removeprefix("jaxscale.")
    message = (
        f"`jaxscale.{module}` needs Flax, which is not installed: pip install flax$"
    )
    with pytest.raises(ImportError, match=message):
        exec(statement)
exec("from jaxscale import *")
assert "four functions" in pydoc.render_doc(jaxscale)
