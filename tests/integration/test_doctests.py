"""The examples in docstrings run, in the environment that users have."""

import doctest
import importlib
import pkgutil

import pytest

import jaxscale

pytestmark = pytest.mark.standard_promotion

MODULES = [
    "jaxscale",
    *(found.name for found in pkgutil.walk_packages(jaxscale.__path__, "jaxscale.")),
]


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_run(module):
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0
