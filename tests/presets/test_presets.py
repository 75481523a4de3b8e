"""The presets: the defaults of each library, and what is rejected."""

import inspect
import pathlib
import re

import jax.numpy as jnp
import pytest
from tables import cases

import jaxscale
from jaxscale import presets


def test_pytorchs_scale_starts_at_65536():
    assert presets.torch().init().loss_scale == 65536


# The arguments that a library requires, and the defaults that it documents for the others.
REQUIRED = {
    "tensorflow_contrib": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 1000},
    "jmp": {"loss_scale": 2.0**15},
}
# By name, the exponent of the first scale and these fields.
FIELDS = "growth_factor backoff_factor growth_interval hysteresis min_scale max_scale"
LOW, HIGH = 2.0**-126, jnp.finfo(jnp.float32).max
DEFAULTS = {
    "tensorflow": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "tensorflow_contrib": (15, 2, 0.8, 1000, 2, 1, HIGH),
    "tf_keras": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "keras": (15, 2, 0.5, 2000, 1, LOW, HIGH),
    "torch": (16, 2, 0.5, 2000, 1, LOW, HIGH),
    "flax": (16, 2, 0.5, 2001, 1, LOW, HIGH),
    "jmp": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "apex": (16, 2, 0.5, 2000, 1, LOW, 2.0**24),
    "apex_fp16_utils": (32, 2, 0.5, 1000, 1, 1, HIGH),
    "apex_hysteresis": (16, 2, 0.5, 2000, 1, LOW, HIGH),
    "megatron": (32, 2, 0.5, 1000, 2, 1, HIGH),
    "deepspeed": (32, 2, 0.5, 1000, 1, 1, HIGH),
}


def make(name, **arguments):
    return getattr(presets, name)(**REQUIRED.get(name, {}) | arguments)


def test_the_presets_are_these():
    functions = {
        name
        for name, value in vars(presets).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert functions == set(DEFAULTS)


def test_tests_that_the_docstring_names_are_there():
    named = set(re.findall(r"test_\w+", presets.__doc__))
    files = pathlib.Path(__file__).parent.parent.rglob("test_*.py")
    defined = set(
        re.findall(r"(?<=def )test_\w+", "".join(file.read_text() for file in files))
    )
    assert named
    assert named <= defined


@cases("name", DEFAULTS)
def test_defaults_are_those_of_the_library(name):
    policy = make(name)
    exponent, *defaults = DEFAULTS[name]
    assert policy.init_scale == 2.0**exponent
    assert [getattr(policy, field, None) for field in FIELDS.split()] == defaults
    assert hash(policy) == hash(make(name))


# Arguments that are ignored, or whose policy checks them under its own names.
NOT_NAMED = {
    "apex": ["scale_factor"],
}


@cases("name", DEFAULTS)
def test_names_in_errors_are_those_of_the_library(name):
    parameters = inspect.signature(getattr(presets, name)).parameters
    for argument, parameter in parameters.items():
        is_switch = isinstance(parameter.default, bool)
        if is_switch or argument in NOT_NAMED.get(name, ()):
            continue
        message = rf"^`presets\.{name}\({argument}=.* got -1"
        with pytest.raises(ValueError, match=message):
            make(name, **{argument: -1})


def test_a_scaler_that_is_off_or_fixed_does_not_move():
    assert presets.torch(enabled=False) == jaxscale.NoOpLossScale()
    fixed = jaxscale.FixedLossScale(8)
    assert presets.tf_keras(dynamic=False, initial_scale=8) == fixed
