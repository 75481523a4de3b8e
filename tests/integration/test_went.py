"""The page of what went in 0.5.0: what it says went is gone, and what it says instead runs."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from tables import avals, cases

import jaxscale
from jaxscale import presets

PAGE = pathlib.Path(__file__).parents[2] / ".github" / "site" / "pages" / "went.md"
# What the code in the tables may name.
NAMES = {
    "jaxscale": jaxscale,
    "presets": presets,
    "diagnostics": jaxscale.diagnostics,
    "g": {"w": jnp.ones(3)},
    "params": jnp.ones(3),
    "batch": jnp.ones(3),
    "opt_state": jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)),
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


def find_rows():
    """Returns what went, and what to write instead, of each row of the tables."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) < 2 or not (codes := re.findall("`([^`]+)`", cells[0])):
            continue
        for code in codes:
            rows[code] = re.findall("`([^`]+)`", cells[1])
    return rows


ROWS = find_rows()


@cases("code", ROWS)
def test_what_went_is_gone(code):
    with pytest.raises(GONE) as caught:
        eval(code, dict(NAMES))
    if isinstance(getattr(caught.value, "obj", None), types.ModuleType):
        assert "the page *What went in 0.5.0*" in str(caught.value)


@cases("module", [presets, jaxscale.diagnostics])
def test_a_name_that_never_was_points_to_no_page(module):
    with pytest.raises(AttributeError, match=r"has no attribute 'never'$"):
        _ = module.never
    assert not hasattr(module, "never")


@cases("code", ROWS)
def test_what_to_write_instead_runs(code):
    for instead in ROWS[code]:
        made = eval(instead, dict(NAMES))
        if isinstance(
            made, jaxscale.LossScaleState
        ):  # which a step does not compile again
            assert avals(made) == avals(NAMES["state"])
