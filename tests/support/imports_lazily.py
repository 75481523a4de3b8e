"""A program that imports the package: parts of it are imported when they are used.

`test_package` runs it in a process of its own.
"""

import sys

import optax  # noqa: F401

loaded_before = set(sys.modules)

import jaxscale  # noqa: E402

loaded = set(sys.modules)
packages = {name.split(".")[0] for name in loaded - loaded_before}
foreign = packages - {"jaxscale", "jax"} - set(sys.stdlib_module_names)
assert not foreign, foreign
assert "flax" not in loaded
# what rewrites programs
for name in ("_autocast", "_backward", "_boundary", "_jaxprs"):
    assert f"jaxscale.{name}" not in loaded, name
assert "autocast" in dir(jaxscale)
assert callable(jaxscale.autocast)
assert "jaxscale._jaxprs" in sys.modules
for name in ("diagnostics", "flax", "nnx", "presets"):
    module = f"jaxscale.{name}"
    assert name in dir(jaxscale), name
    assert module not in loaded, module
    assert getattr(jaxscale, name) is sys.modules[module], module
