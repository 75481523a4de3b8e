"""The advice: each model is healthy once what the doctor said is done to the letter."""

import re
import sys

import pytest
from tables import cases

from jaxscale._doctor import cli

pytestmark = pytest.mark.standard_promotion

# One line of each model is wrong, and another in its place is what the advice says.
MODEL = """
import jax
import jax.numpy as jnp

HALF, FULL = jnp.float16, jnp.float32
X = jnp.array([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])
ROWS = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])

@jax.custom_vjp
def scaled(x):
    return x

def scaled_backward(_, cotangent):
    return (cotangent * HALF(60000) * HALF(60000),)

scaled.defvjp(lambda x: (x, None), scaled_backward)

def model():
    def loss_fn(params, x):
        w = params["w"].astype(HALF)
        {line}
        return jnp.mean(y.astype(FULL))
    return loss_fn, {{"w": jnp.array([1.0, 0.5, 2.0])}}, {batch}
"""
WIDE = "Compute this line in float32"

# name: (the batch, the faulty line, what is said, the line that does so)
ADVICE = {
    "mask": (
        "X", "y = jax.nn.softmax(jnp.where(x > 5, x * w, -1e9).astype(HALF)) * w",
        "For a mask, use -1e4 instead of -1e9", "y = jax.nn.softmax(jnp.where(x > 5, x * w, -1e4).astype(HALF)) * w",
    ),
    "an epsilon": (
        "ROWS", "z = x.astype(HALF) * w; y = x * z / (jnp.sum(jnp.abs(z), 1, keepdims=True) + 1e-9)",
        WIDE, "z = (x.astype(HALF) * w).astype(FULL); y = x * z / (jnp.sum(jnp.abs(z), 1, keepdims=True) + 1e-9)",
    ),
    "an arc": (
        "jnp.ones((2, 3))", "y = jnp.arccos(jnp.clip(x.astype(HALF) * w, -1, 1))",
        "Keep the operand away: clip it", "y = jnp.arccos(jnp.clip(x.astype(HALF) * w, -0.999, 0.999))",
    ),
    "a negative variance": (
        "jnp.zeros((2, 3))", "z = x.astype(HALF) - w; y = jnp.sqrt(jnp.sum(z * z, 1) - jnp.sum(z, 1) ** 2 - 1)",
        "An epsilon does not help", "z = x.astype(HALF) - w; y = jnp.sqrt(jnp.mean((z - jnp.mean(z, 1, keepdims=True)) ** 2, 1))",
    ),
    "an exponential": (
        "jnp.array([[90.0, 2.0, 3.0], [1.0, 2.0, -1.0]])", "y = jnp.exp((x.astype(HALF) * w).astype(FULL))",
        "clip the exponent", "y = jnp.exp(jnp.minimum((x.astype(HALF) * w).astype(FULL), 5.0))",
    ),
    "a number of elements": (
        "jnp.ones((1000, 3))", "y = (x.astype(HALF) * w).sum(0) / 70000",
        "70000 is inf in float16.", "y = (x.astype(HALF) * w).sum(0).astype(FULL) / 70000",
    ),
    "positions": ("jnp.arange(5000)[::7, None]", "y = jnp.sin(x.astype(HALF) * w)", WIDE, "y = jnp.sin(x.astype(FULL) * params['w'])"),
    "a rule of one's own": ("X", "y = scaled(x.astype(HALF) * w)", "`scaled_backward`", "y = x * w"),
    "an index": ("jnp.arange(4)", "y = jnp.take(w, x)", "An index is out of range", "y = jnp.take(w, jnp.minimum(x, 2))"),
}  # fmt: skip


@cases("name", ADVICE, fast=["an index"])
def test_what_is_said_helps(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take time
    batch, faulty, said, advised = ADVICE[name]

    def doctor(line):
        (tmp_path / "advised.py").write_text(MODEL.format(line=line, batch=batch))
        status = cli.main(["doctor", "advised.py:model"])
        return status, re.sub(r"\s+", " ", capsys.readouterr().out)

    status, text = doctor(faulty)
    number = MODEL.splitlines().index("        {line}") + 1
    assert status == 1, text
    assert f"begins at advised.py:{number}" in text
    assert said in text
    status, text = doctor(advised)
    assert (status, text[:16]) == (0, "Nothing is wrong"), text
