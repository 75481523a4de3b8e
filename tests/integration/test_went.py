"""The page of what went and what goes: that it is gone or warns, and that what is instead runs."""

import pathlib
import re
import runpy
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from departing import GOES
from flax.training import dynamic_scale
from tables import avals, cases

import jaxscale
from jaxscale import _went, presets

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / ".github" / "site" / "pages" / "went.md").read_text()
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "skip_callback.py"))
PARAMS = jnp.ones(3)
TX = jaxscale.loss_scaled(optax.sgd(0.1))
# What the code in the tables may name.
NAMES = {
    "jaxscale": jaxscale,
    "presets": presets,
    "diagnostics": jaxscale.diagnostics,
    "with_callback": EXAMPLE["with_callback"],
    "g": {"w": jnp.ones(3)},
    "params": PARAMS,
    "batch": jnp.ones(3),
    "tx": TX,
    "opt_state": TX.init(PARAMS),
    "new": PARAMS + 1,
    "old": PARAMS,
    "follow": lambda params, old: optax.incremental_update(params, old, 0.1),
    "optax": optax,
    "jnp": jnp,
    "np": np,
    "jax": jax,
    "loss_fn": lambda params, batch: jnp.sum(params * batch),
    "block": jnp.multiply,
    "h": jnp.ones(3),
    "ws": jnp.ones((2, 3), jnp.float16),
    "saved": {"scale": 1024.0, "_growth_tracker": 7},  # by PyTorch
    "config": {"initial_scale": 1024.0, "dynamic_growth_steps": 50},  # of Keras
    "scaler": dynamic_scale.DynamicScale(scale=jnp.float32(64)),
    "loss_scale": jmp.DynamicLossScale(jnp.float32(64)),
    "policy": jaxscale.DynamicLossScale(),
    "state": jaxscale.DynamicLossScale().init(),
}
GONE = (AttributeError, ImportError, KeyError, TypeError, ValueError)


def find_rows(text):
    """Returns what went, and what to write instead, of each row of the tables."""
    rows = {}
    for line in text.splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) < 2 or not (codes := re.findall("`([^`]+)`", cells[0])):
            continue
        for code in codes:
            rows[code] = re.findall("`([^`]+)`", cells[1])
    return rows


_, GOING, LATEST, *EARLIER = re.split("^## ", PAGE, flags=re.MULTILINE)
GOING = find_rows(GOING)
LATEST = find_rows(LATEST)
WENT = LATEST | find_rows("".join(EARLIER))
ROWS = GOING | WENT


@cases("code", WENT)
def test_what_went_is_gone(code):
    with pytest.raises(GONE) as caught:
        eval(code, dict(NAMES))
    is_name = isinstance(getattr(caught.value, "obj", None), types.ModuleType)
    if is_name or code in LATEST:
        assert "the page *What went, and what goes*" in str(caught.value)


@cases("module", [jaxscale, presets, jaxscale.diagnostics])
def test_a_name_that_never_was_points_to_no_page(module):
    with pytest.raises(AttributeError, match=r"has no attribute 'never'$"):
        _ = module.never
    assert not hasattr(module, "never")


# What is warned of runs in a file of its own, the user's.
@cases("code", GOING)
def test_what_goes_runs_and_warns_at_its_line(code):
    with pytest.warns(DeprecationWarning, match=GOES) as warnings:
        eval(compile(code, "user.py", "eval"), dict(NAMES))
    assert {warning.filename for warning in warnings} == {"user.py"}


def test_the_page_has_everything_that_goes():
    said = set()
    for code in GOING:
        with pytest.warns(DeprecationWarning, match=GOES) as warnings:
            eval(code, dict(NAMES))
        said |= {str(warning.message) for warning in warnings}
    assert "doctor --quick" in PAGE
    said.add(_went.say_goes("quick"))
    assert said == set(map(_went.say_goes, _went._GOES))


@cases("code", ROWS)
def test_what_to_write_instead_runs(code):
    assert ROWS[code]
    for instead in ROWS[code]:
        made = eval(instead, dict(NAMES))
        if isinstance(
            made, jaxscale.LossScaleState
        ):  # which a step does not compile again
            assert avals(made) == avals(NAMES["state"])


# A program, and after each line that is warned of a mark.
PROGRAM = """
import jax, jax.numpy as jnp, optax, jaxscale
from jaxscale import diagnostics
w = {"w": jnp.ones(2)}
def loss_fn(params, batch):
    return jnp.sum(params["w"] * batch)
for _ in range(3):
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    jax.jit(diagnostics.histogram)(w)  # goes
    jaxscale.apply_gradients(tx, w, tx.init(w), w)
    jaxscale.train_step(loss_fn, tx)(w, tx.init(w), jnp.ones(2))
    diagnostics.calibrate(loss_fn, w, [jnp.ones(2)])
    diagnostics.calibrate(loss_fn, w, [jnp.ones(2), jnp.ones(2)])  # goes
    diagnostics.sizes(w)
diagnostics.doctor(loss_fn, w, jnp.ones(2))
"""


@pytest.mark.worlds
def test_each_line_is_warned_of_once_and_no_other(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = re.findall(r"program\.py:(\d+): DeprecationWarning", result.stderr)
    expected = []
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        if line.endswith("# goes"):
            expected.append(number)
    assert sorted(map(int, lines)) == expected
