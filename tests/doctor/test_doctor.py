"""The command: what it finds and advises, what it writes where, and what it says about bad use."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import optax
import pytest
from tables import cases

import jaxscale
from jaxscale._doctor import cli, compiled, measure
from jaxscale._doctor.announcer import Announcer
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

ROOT = pathlib.Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "doctor.py"
MODELS = '''
import jax
import jax.numpy as jnp

HALF, FULL = jnp.float16, jnp.float32
W = {"w": jnp.array([1.0, 2.0]), "unused": jnp.ones(2), "count": jnp.arange(2)}
X = {"x": jnp.array([1.0, 3.0]), "name": "a batch"}
ROWS = jnp.array([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])

def model(of, params=W, batch=X, reduce=jnp.mean):
    return lambda: ((lambda p, b: reduce(of(p, b).astype(FULL))), params, batch)

def half(scale=1.0, after=1.0, **batch):
    """A loss of x * w in float16, whose product or gradient is too large or too small."""
    def loss_fn(p, b):
        y, by = (b["x"] * p["w"]).astype(HALF), b.get("by", HALF(scale))
        y = y * by * by  # the line
        return jnp.mean(y.astype(FULL)) * after
    return loss_fn, W, X | batch

def fine():
    print("the model prints")
    return half()

overflow = lambda: half(60000.0)
underflow = lambda: half(2.0**-20)
tiny = lambda: half(1.0, 2.0**-28)  # gradients that float16 flushes without a loss scale, and keeps with one
# One of two leaves loses all without a loss scale, and the other nothing.
uneven = lambda: ((lambda p, b: tiny()[0](p, b) + jnp.sum(p["b"])), W | {"b": jnp.ones(2)}, X)
summed = lambda: half(1.0, 2.0**9)  # as a loss over many examples: large gradients, and only a low scale fits
below = lambda: half(1.0, 2.0**20)  # so large that no scale of at least 1 fits
# Small where it enters float16, then larger by `by` squared.
inward = lambda by=2.0**9, after=2.0**-10: half(after=after, x=X["x"] * 2.0**6 / by**2, by=jnp.full(2, by, HALF))
far_inward = lambda: inward(2.0**14, 2.0**-24)
bad_batch = lambda: half(x=jnp.array([1.0, jnp.nan]))
wide = model(lambda p, b: (b["x"] * p["w"]) ** 2)
disconnected = model(lambda p, b: jnp.sum(b["x"]) + 0 * p["w"][0])

# float32 models: one for which autocast is fine, one with a product that float16 cannot hold, and one where it holds the
# product, but only every fourth number near it.
dense = model(lambda p, x: (x @ p["w"]) ** 2 * 2.0**-30, batch=jnp.array([[1.0, 3.0]] * 2))
scores = model(lambda p, x: jnp.log(
    x @ p["w"]  # the product
), batch=jnp.array([[4e4, 4e4]] * 2))
rounded = model(lambda p, x: (x @ p["w"] - 4096) ** 2, {"w": jnp.ones(2)}, jnp.array([[4096, 2.5]] * 2))

# Parameters whose containers look like anything else.
in_a_pair = model(lambda p, x: (x * p[0].astype(HALF)).astype(FULL) + p[1][1], (jnp.ones(2), (jnp.ones(3), FULL(1))), jnp.ones(2, HALF))
confident = model(lambda p, x: -jnp.log(  # the ceiling: the logarithm's derivative of up to 1e6 limits the loss scale
    jax.nn.softmax((x * p["w"]).astype(HALF)) + 1e-6
), batch=jnp.array([[5.0, 0.0]]))
# The gradient of each number is less than float16 holds, but their sum is not.
on_the_way = model(lambda p, x: (x @ p["w"].astype(HALF)).astype(FULL) * 2.0**-30, {"w": jnp.ones(2)}, jnp.full((2**12, 2), 100, HALF), jnp.sum)
# A softmax that flushes nearly all of its numbers to zero, as it should.
sure = model(lambda p, _: p["values"].astype(HALF) *
    jax.nn.softmax(p["logits"].astype(HALF)),  # the softmax
    {"logits": jnp.zeros(1000).at[0].set(18.0), "values": jnp.ones(1000)}, None, jnp.sum)
# What is added to all logits has no gradient but rounding, in float32, too.
cancels = model(lambda p, x: jax.nn.softmax((x * p["w"] + p["b"]).astype(HALF)) * x.astype(HALF),
    {"w": jnp.array([1.0, 2.0, 0.7]), "b": jnp.float32(0.3)}, jnp.array([[0.3, -1.1, 0.9], [1.7, 0.4, -0.6]]), jnp.sum)
# An additive mask in the batch, with infinities on purpose.
masked = model(lambda p, mask: jax.nn.softmax(p["w"].astype(HALF) + mask)[:1], {"w": jnp.ones(3)}, jnp.array([0.0, 0.0, -jnp.inf], HALF))

def divided(p, x):
    y = x.astype(HALF) * p["w"].astype(HALF)
    return y / jnp.sqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-9)  # divides

epsilon = model(divided, batch=jnp.array([[1.0, 2.0], [0.0, 0.0]]))
pair = lambda bad=0.0: ((lambda p, b: (half()[0](p, b), {"name": "x", "ratio": 1 / (1 - bad * b["x"])})), W, X)
bad_pair = lambda: pair(1.0)
best = lambda: ((lambda p, b: (half()[0](p, b), {"best": jnp.array(jnp.inf)})), W, X)

def repeated(first=0.0):  # five equal operations are at fault, and before them one as bad as `first` of them
    def loss_fn(p, b):
        y = (b["x"] * p["w"]).astype(HALF)
        y = y * HALF(2.0**-22) * HALF(2.0**-22)  # the worst
        return first * jnp.mean(y.astype(FULL)) + sum(half(2.0**-22)[0](p, b) for _ in range(5))
    return loss_fn, W, X

mostly_one = lambda: repeated(10.0)
harmless = model(lambda p, b: (b["x"] * p["w"]).astype(HALF) + 1e-9)
NAN = jnp.array(jnp.nan)
given = model(lambda p, b: (b["x"] * p["w"]).astype(HALF) / 70000,
    reduce=lambda y: jnp.mean(y) * NAN)

def ratio(b):  # XLA divides by multiplying with the inverse, which is inf
    return b["x"].astype(HALF) * HALF(2.0**-17) / (jnp.ones(2, HALF) * HALF(2.0**-18))

rewritten = model(lambda p, b: p["w"] * ratio(b).astype(FULL))
inverted = model(lambda p, b: p["w"] * (1 / (1 + ratio(b))).astype(FULL))  # finite again, but 0

def total(p, b):  # float32 adds these numbers to 0, and float16 does not
    total = jax.lax.reduce_sum(b["x"] * 1, axes=(0,))  # the sum
    return (total * 1).astype(FULL) * jnp.sum(p["w"]) + jnp.sum(p["w"])

cancelled = model(total, batch={"x": jnp.array([2048, 1, -2048, -1], HALF)})

def mapped():
    one, everywhere = jax.sharding.Mesh(jax.devices()[:1], ("d",)), jax.sharding.PartitionSpec()
    double = jax.shard_map(lambda w: w.astype(HALF) * 2, mesh=one, in_specs=everywhere, out_specs=everywhere)
    return model(lambda p, b: double(p["w"]).astype(FULL) * b["x"])()

def odd():  # leaves that are functions, or have a dtype but are not arrays
    import flax.linen as nn
    import numpy as np
    odd = {"type": HALF, "numpy": np.float32, "aval": jax.ShapeDtypeStruct((2,), HALF), "module": nn.Dense(2, dtype=HALF), "act": jnp.tanh}
    return (lambda p, b: p["act"](half()[0](p, b).astype(b["layers"]["aval"].dtype))), W | odd, X | {"layers": odd}

@jax.custom_vjp
def scaled(x):
    return x

def scaled_backward(_, cotangent):
    return (cotangent * HALF(60000) * HALF(60000),)

scaled.defvjp(lambda x: (x, None), scaled_backward)
no_scale_fits = model(lambda p, b: jnp.sqrt(p["w"] * 0).astype(HALF) * 1.0, reduce=jnp.sum)  # the loss is finite, but its gradient at 0 is not
'''
# One line of it is wrong, and another in its place is what the advice says.
ADVISED = """
def advised():
    def loss_fn(params, x):
        w = params["w"].astype(HALF)
        {}
        return jnp.mean(y.astype(FULL))
    return loss_fn, {{"w": jnp.array([1.0, 0.5, 2.0])}}, {}
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_PATIENCE", float("inf"))  # no signs of life on a slow machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "doctored.py"
    path.write_text(MODELS)
    yield path
    for name in ("doctored", "f"):
        sys.modules.pop(name, None)


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # they take time


def run(capsys, target, *options):
    status = cli.main(["doctor", str(target), *options])
    written = capsys.readouterr()
    return status, written.out, written.err


def line(words, source=MODELS):
    return next(i for i, text in enumerate(source.splitlines(), 1) if words in text)


LINE = line("# the line")
NO_PICTURE = (
    "jaxscale doctor: The report will have no picture: it needs matplotlib, which is not "
    "installed: pip install matplotlib\n"
)

# name: (options, exit status, what the text says, what it does not)
CASES = {
    "fine": ([], 0, ["Nothing is wrong.", "the largest that does not overflow"], ["Problems"]),
    "overflow": ([], 1, [f"It begins at doctored.py:{LINE}", "y = y * by * by", "Problems found: 1.", "The loss is inf"], ["needs no", "lower"]),
    "underflow": ([], 1, ["Problems found: 1.", "1 of 2 gradients are wrong", ": w is flushed to 0. It begins", f"at doctored.py:{LINE}"], ["nan"]),
    "tiny": ([], 0, ["Nothing is wrong, with a loss scale: it needs one.", "without one 100% of the nonzero"], ["Problems"]),
    "tiny at 1": (["--loss-scale", "1"], 1, ["It needs a loss scale: without one 100%"], ["Nothing"]),
    "uneven at 8": (["--loss-scale", "8"], 1, ["Loss scale 2**3 is too low: there 50.0% of the nonzero gradients become 0 (100% in w)"], ["Nothing"]),
    "tiny at 2**20": (["--loss-scale", str(2**20)], 0, ["Loss scale 2**20 is high enough", "to the last bit"], []),
    "fine at 2**20": (["--loss-scale", str(2**20)], 1, ["inf or NaN is in 1 of 2 gradients, at loss scale 2**20", "Loss scale 2**16 is the largest", "worst first: w."], ["even", "Even"]),
    "summed": (
        [], 0,
        ["This batch needs no loss scale", "is not low for gradients as large as these, up to 768",
         "From 2**15, the default rule skips steps first, 8 in all: write", "(init_scale=2**7))`, or use `retries=10` or"],
        ["low:", "shrink", "costs next to nothing"],
    ),
    "inward": ([], 0, ["repeats the backward pass of this batch once.", "jaxscale.scale_backward(loss_fn, scale=2**6)", "# the line"], ["not enough"]),
    "far_inward": ([], 0, ["twice, which is not enough.", "jaxscale.scale_backward(loss_fn, scale=2**10)"], []),
    "below": (
        [], 1,
        ["! The largest loss scale that does not overflow on this batch is 2**-4: the default rule, which never goes below 1, will skip every step.",
         "a mean and not a sum, or write", "jaxscale.DynamicLossScale(init_scale=2**-4, min_scale=2**-14)"],
        ["Nothing"],
    ),
    "below at 1": (["--loss-scale", "1"], 1, ["Problems found: 1. ", "even without a loss scale", "2**-4 is the largest", "min_scale=2**-14"], ["Nothing"]),
    "on_the_way": ([], 0, ["it needs one", "without one 100% of the nonzero gradients become 0"], ["Problems"]),
    "sure": ([], 0, ["Nothing is wrong.", "Most of the nonzero numbers become 0 at doctored.py", "the softmax", "no harm"], ["Problems"]),
    "cancels": ([], 0, ["Nothing is wrong."], ["Problems"]),
    "masked": ([], 0, ["Nothing is wrong.", "inf or NaN in batch, but none in the loss or the gradients"], ["Problems"]),
    "epsilon": (
        [], 1, ["Problems found: 1.", f"It begins at doctored.py:{line('# divides')}", "`div`, in the forward pass",
                "Its operands are between 0 and 4.", "1e-09 is 0 in float16.", "Compute this line in float32: that was tried"], []
    ),
    "pair": ([], 0, ["Nothing is wrong."], ["Problems"]),
    "bad_pair": ([], 1, ["The loss and the gradients are finite, but aux['ratio'] is not"], ["Nothing"]),
    "repeated": ([], 1, ["w is flushed to 0.", "Most of the numbers become 0 at doctored.py:", f"doctored.py:{LINE}. No single operation accounts for it."], ["It begins"]),
    "mostly_one": ([], 1, [f"It begins at doctored.py:{line('# the worst')}", "With this line and doctored.py:", "in float32, the gradients are still wrong"], ["No single"]),
    "best": ([], 1, ["The loss and the gradients are finite, but aux['best'] is not, and no line explains why."], ["Nothing"]),
    "given": ([], 1, ["The loss is NaN", "it was there before, in a constant or an input", "Look where this number comes from.", "Use a number that float16 holds, or"], ["Nothing"]),
    "harmless": ([], 0, ["Nothing is wrong.", "1e-09 is 0 in float16, at doctored.py", "It does no harm on this batch."], ["Problems"]),
    "rewritten": ([], 1, ["Compiled as one program, the model gives gradients with inf or NaN."], ["It begins"]),
    "inverted": ([], 1, ["w is flushed to 0. No single operation accounts for it."], ["It begins"]),
    "cancelled": ([], 1, [f"It begins at doctored.py:{line('# the sum')}", "`reduce_sum`, in the forward pass, gives other numbers than in float32."], ["Nothing"]),
    "mapped": ([], 0, ["Nothing is wrong.", "The doctor did not look inside shard_map."], ["Problems"]),
    "odd": ([], 0, ["Nothing is wrong.", "1 of 2 leaves, as in float32: unused"], ["Problems"]),
    "disconnected": ([], 1, ["exactly 0 everywhere in 2 of 2 leaves"], ["Nothing"]),
    "wide": ([], 0, ["Nothing is wrong.", "computes in float32. It was examined on one batch without a loss scale.", "float32, and needs no loss scale", "`--autocast float16`"], ["float16"]),
    "dense in float16": (
        ["--autocast", "float16"], 0,
        ["Nothing is wrong in float16, with a loss scale: it needs one.", "without one 100% of the nonzero",
         "float16 and float32, by `jaxscale.autocast`", "The gradients in float16 are those in float32, off by"],
        ["Problems", "changes nothing"],
    ),
    "dense in bfloat16": (["--autocast", "bfloat16"], 0, ["Nothing is wrong in bfloat16.", "bfloat16 and float32, by", "needs no loss"], ["Problems"]),
    "scores in float16": (
        ["--autocast", "float16"], 1,
        [f"It begins at doctored.py:{line('# the product')}", "float16 cannot hold these numbers, but float32 could",
         "or a function of this line, through `jaxscale.full_precision`"],
        ["preferred_element_type", "Nothing"],
    ),
    "rounded in float16": (
        ["--autocast", "float16"], 1,
        ["1 of 1 gradients are wrong at loss scale 2**0", "w is off by 60.0%, compared with float32", f"It begins at doctored.py:{line('2.5]] * 2)')}",
         "as large as 4098, where float16 only holds multiples of 4", "that was tried, and the gradients then are those of float32 to the last bit",
         "The loss is 16 in float16, and as written 6.25."],
        ["Nothing", "become 0"],
    ),
    "wide in float16": (["--autocast", "float16"], 0, ["`jaxscale.autocast` changes nothing"], ["Problems", "off by"]),
    "in_a_pair": ([], 0, ["Nothing is wrong.", "exactly 0 everywhere in 1 of 3 leaves, as in float32: 1/0"], ["Problems"]),
    "confident": (
        [], 0,
        ["Nothing is wrong.", f"What limits it is doctored.py:{line('# the ceiling')}", "overflows there. With that line",
         "fits, as was tried.", "That is low: gradients shrink"],
        ["Problems", "costs next to nothing"],
    ),
    "bad_batch": ([], 1, ["Problems found: 1.", "inf or NaN in batch['x'], before anything is computed", "The loss is NaN"], ["Nothing", "nan"]),
    "no_scale_fits": ([], 1, ["The loss is finite, 0, but", "even without a loss scale"], ["Nothing"]),
    **{
        f"{name} with --quick": (["--quick"], status, [*says, "finite and wrong were not looked for"], ["Nothing is wrong", "report is in"])
        for name, status, says in (
            ("tiny", 0, ["Nothing overflows, with a loss scale: it needs one."]),
            ("confident", 0, ["is 2**9.", f"What limits it is doctored.py:{line('# the ceiling')}", "skips steps first, 6 in all"]),
            ("below", 1, ["Problems found: 1.", "What limits it is doctored.py:"]),
            ("overflow", 1, ["Problems found: 1.", f"It begins at doctored.py:{LINE}", "float16 cannot hold these numbers"]),
            ("bad_pair", 1, ["The loss and the gradients are finite, but aux['ratio'] is not"]),
            ("disconnected", 1, ["exactly 0 everywhere in 2 of 2 leaves"]),
        )
    },
}  # fmt: skip


@cases(
    "name",
    CASES,
    fast=["rounded in float16", "uneven at 8", "overflow with --quick", "confident with --quick"],
)
def test_it_says_what_is_wrong_and_where(name, models, no_pictures, capsys):
    options, expected, says, says_not = CASES[name]
    status, out, err = run(capsys, f"doctored:{name.split()[0]}", *options)
    assert (status, err) == (expected, "" if "--quick" in options else NO_PICTURE)
    flowing = re.sub(r"\s+", " ", out)
    for words in says:
        assert words in flowing
    for words in says_not:
        assert words not in flowing.replace("look again with `--autocast float16`", "")
    if "--quick" not in options:
        page = re.sub(r"\s+", " ", pathlib.Path("jaxscale-doctor.html").read_text())
        assert all(f"<code>{code}</code>" in page for code in re.findall("write `(.*?)`", flowing))


# name: (the batch, what is said, the faulty line, what of it is replaced, what by)
ADVICE = {
    "the logarithm of a softmax": (
        "5 * ROWS", "Write `jax.nn.log_softmax(logits)` instead",
        "y = jnp.log(jax.nn.softmax(x.astype(HALF) * w))", "jnp.log(jax.nn.softmax(x.astype(HALF) * w))", "jax.nn.log_softmax(x.astype(HALF) * w)",
    ),
    "the logarithm of a softmax written out": (
        "5 * ROWS", "Write `jax.nn.log_softmax(logits)` instead",
        "z = x.astype(HALF) * w; e = jnp.exp(z - jnp.max(z, 1, keepdims=True)); y = jnp.log(e / jnp.sum(e, 1, keepdims=True))",
        "e = jnp.exp(z - jnp.max(z, 1, keepdims=True)); y = jnp.log(e / jnp.sum(e, 1, keepdims=True))", "y = jax.nn.log_softmax(z)",
    ),
    "the logarithm of a probability that is cast": (
        "5 * ROWS", "Write `jax.nn.log_softmax(logits)` instead",
        "y = jnp.log(jax.nn.softmax((x * w).astype(FULL)).astype(HALF))", "jnp.log(jax.nn.softmax((x * w).astype(FULL)).astype(HALF))", "jax.nn.log_softmax((x * w).astype(HALF))",
    ),
    "the logarithm of a sigmoid": (
        "-5 * jnp.abs(ROWS)", "Write `jax.nn.log_sigmoid(logits)` instead",
        "y = jnp.log(jax.nn.sigmoid(x.astype(HALF) * w))", "jnp.log(jax.nn.sigmoid(x.astype(HALF) * w))", "jax.nn.log_sigmoid(x.astype(HALF) * w)",
    ),
    "a product of probabilities": (
        "jnp.linspace(-1, 1, 150).reshape(50, 3)", "Add up their logarithms instead",
        "p = jax.nn.sigmoid(x.astype(HALF) * w); y = jnp.log(jnp.prod(p, 0))", "jnp.log(jnp.prod(p, 0))", "jnp.sum(jnp.log(p), 0)",
    ),
    "a product in a loop": (
        "jnp.linspace(-1, 1, 150).reshape(50, 3)", "Add up their logarithms instead",
        "p = jax.nn.sigmoid(x.astype(HALF) * w); y = jnp.log(jax.lax.scan(lambda c, q: (c * q, None), jnp.ones(3, HALF), p)[0])",
        "jnp.log(jax.lax.scan(lambda c, q: (c * q, None), jnp.ones(3, HALF), p)[0])", "jax.lax.scan(lambda c, q: (c + q, None), jnp.zeros(3, HALF), jnp.log(p))[0]",
    ),
    "the logarithm of a density": (
        "ROWS", "the logarithm of `exp(x)` is `x`",
        "z = x.astype(HALF) * w; y = jnp.log(jnp.exp(-z * z / 2) / 2.5)", "jnp.log(jnp.exp(-z * z / 2) / 2.5)", "-z * z / 2 - 0.92",
    ),
    "the logarithm of a sum of exponentials": (
        "-10 * jnp.abs(ROWS)", "Write `jax.nn.logsumexp(x)` instead",
        "z = x.astype(HALF) * w - 20; y = jnp.log(jnp.sum(jnp.exp(z), 1))", "jnp.log(jnp.sum(jnp.exp(z), 1))", "jax.nn.logsumexp(z, 1)",
    ),
    "a softmax without its maximum": (
        "6 * ROWS", "Subtract the maximum of each row before the exponential",
        "z = x.astype(HALF) * w; e = jnp.exp(z); y = e / jnp.sum(e, 1, keepdims=True) * x.astype(HALF)", "jnp.exp(z)", "jnp.exp(z - jnp.max(z, 1, keepdims=True))",
    ),
    "a sum over many numbers": (
        "jnp.ones((4000, 3)) * 9", "The loss is a sum over 12,000 numbers. Take a mean instead",
        "y = jnp.sum((x.astype(HALF) * w) ** 2)", "jnp.sum", "jnp.mean",
    ),
    "a sum whose gradients are too large": (
        "jnp.ones((30000, 3)) * 60", "The loss is a sum over 90,000 numbers, at doctored.py:",
        "y = jnp.sum(jnp.square((x.astype(HALF) * w).astype(FULL)))", "jnp.sum", "jnp.mean",
    ),
    "mask": ("ROWS", "For a mask, use -1e4 instead of -1e9", "y = jax.nn.softmax(jnp.where(x > 5, x * w, -1e9).astype(HALF)) * w", "-1e9", "-1e4"),
    "an epsilon": (
        "jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])", "Compute this line in float32",
        "z = x.astype(HALF) * w; y = x * z / (jnp.sum(jnp.abs(z), 1, keepdims=True) + 1e-9)", "x.astype(HALF) * w", "(x.astype(HALF) * w).astype(FULL)",
    ),
    "an arc": ("jnp.ones((2, 3))", "Keep the operand away: clip it", "y = jnp.arccos(jnp.clip(x.astype(HALF) * w, -1, 1))", "-1, 1", "-0.999, 0.999"),
    "a negative variance": (
        "jnp.zeros((2, 3))", "An epsilon does not help", "z = x.astype(HALF) - w; y = jnp.sqrt(jnp.sum(z * z, 1) - jnp.sum(z, 1) ** 2 - 1)",
        "jnp.sum(z * z, 1) - jnp.sum(z, 1) ** 2 - 1", "jnp.mean((z - jnp.mean(z, 1, keepdims=True)) ** 2, 1)",
    ),
    "an exponential": (
        "jnp.array([[90.0, 2.0, 3.0], [1.0, 2.0, -1.0]])", "clip the exponent",
        "y = jnp.exp((x.astype(HALF) * w).astype(FULL))", "(x.astype(HALF) * w).astype(FULL)", "jnp.minimum((x.astype(HALF) * w).astype(FULL), 5.0)",
    ),
    "a number of elements": ("jnp.ones((1000, 3))", "70000 is inf in float16.", "y = (x.astype(HALF) * w).sum(0) / 70000", ".sum(0)", ".sum(0).astype(FULL)"),
    "positions": ("jnp.arange(5000)[::7, None]", "Compute this line in float32", "y = jnp.sin(x.astype(HALF) * w)", "HALF) * w", "FULL) * params['w']"),
    "a rule of one's own": ("ROWS", "`mul`, in the backward pass, makes inf or NaN", "y = scaled(x.astype(HALF) * w)", "scaled(x.astype(HALF) * w)", "x * w"),
    "an index": ("jnp.arange(4)", "An index is out of range", "y = jnp.take(w, x)", "x)", "jnp.minimum(x, 2))"),
}  # fmt: skip


@cases("name", ADVICE, fast=["an index", "the logarithm of a softmax"])
def test_what_is_said_helps(name, models, no_pictures, capsys):
    batch, said, faulty, *replaced = ADVICE[name]

    def doctor(advised):
        models.write_text(MODELS + ADVISED.format(advised, batch))
        status, out, _ = run(capsys, f"{models.name}:advised")
        return status, re.sub(r"\s+", " ", out)

    status, text = doctor(faulty)
    number = len(MODELS.splitlines()) + ADVISED.splitlines().index("        {}") + 1
    assert status == 1, text
    at = [f"begins at doctored.py:{number}", f"at doctored.py:{number}. Take a mean instead"]
    if name == "a rule of one's own":  # the line of the rule, not of its call
        at = [f"begins at doctored.py:{line('(cotangent * HALF(60000)')}"]
    assert any(words in text for words in at), text
    assert said in text
    assert "1e-3" not in text  # most probabilities are far below it
    status, text = doctor(faulty.replace(*replaced))
    assert (status, text[:16]) == (0, "Nothing is wrong"), text


@cases("unit", range(-4, 25), fast=[9])
def test_training_skips_what_is_said(unit, models, capsys):
    """In whatever unit a loss is: it has gradients of another size, and the same digits."""
    with open("doctored.py", "a") as file:
        file.write(f"\ndef in_units(): return half(1.0, 2.0**{unit})")
    status, out, err = run(capsys, "doctored:in_units", "--json", "--quick")
    assert out, err
    results = json.loads(out)
    start, largest = results["start"], 16 - unit
    assert results["calibration"]["init_scale"] == 2.0**largest
    assert (status, start["skipped"]) == ((0, max(15 - largest, 0)) if largest >= 0 else (1, None))
    assert "That is low" not in out
    loss_fn, params, batch = load("doctored:in_units")[1:4]
    for tx, retries, skipped in (
        (jaxscale.loss_scaled(optax.sgd(0.0)), 0, start["skipped"]),
        (jaxscale.loss_scaled(optax.sgd(0.0)), start["retries"], 0),
        (eval(start["code"], {"jaxscale": jaxscale, "optimizer": optax.sgd(0.0)}), 0, 0),
    ):
        if retries is not None:
            step = jax.jit(
                jaxscale.train_step(lambda p, b=batch: loss_fn(p, b), tx, retries=retries)
            )
            opt_state = tx.init(params)
            for _ in range(20):
                _, opt_state, _ = step(params, opt_state)
            assert opt_state.total_notfinite == (20 if skipped is None else skipped)


# What programs that read the JSON rely on. A field may be added; else the version changes.
FIELDS = """
version found verdict findings target autocast is_quick is_auto loss loss_as_written dtypes
backward_rules loss_scale shown_scale calibration start repeats scale_backward_raised largest
is_limited ceiling relief comparison trace is_finite_in_float32 float32 wrong culprit remedy
unshifted loss_sums zero leaves histogram shares layers suggestion
"""


def test_json_goes_to_standard_output_alone_or_to_a_file(models, no_pictures, capsys):
    status, out, err = run(capsys, "doctored:fine", "--json", "--json-file", "results.json")
    assert status == 0
    results = json.loads(out)
    assert results == json.loads(pathlib.Path("results.json").read_text())
    assert "the model prints" in err
    assert "Nothing is wrong." in err
    start = {"skipped": 0, "retries": 0, "code": "jaxscale.loss_scaled(optimizer)"}
    told = {"version": 2, "found": False, "verdict": "Nothing is wrong.", "loss": 3.5}
    told |= {"dtypes": ["float16", "float32"], "start": start, "wrong": [], "remedy": None}
    assert results | told | {"zero": ["unused"]} == results
    assert results["calibration"]["init_scale"] == results["loss_scale"]
    assert {row["path"]: row["size"] for row in results["leaves"]["rows"]} == {"w": 2, "unused": 2}
    assert sum(results["histogram"]["counts"].values()) == 2
    assert results["trace"]["nonfinite"] == []
    assert results["comparison"]["error"] == 0
    assert results["float32"]["error"] < 1e-3
    assert results["ceiling"]["line"]
    assert list(results) == FIELDS.split()


@pytest.mark.slow
def test_the_example_and_its_fix(models, capsys):
    status, out, _ = run(capsys, f"{EXAMPLE}:broken")
    assert status == 1
    flowing = re.sub(r"\s+", " ", out)
    assert f"doctor.py:{line('mask_value).', EXAMPLE.read_text())}." in flowing
    assert "inf or NaN is in 6 of 7 gradients, even without a loss scale" in flowing
    assert "worst first: down, embed" in flowing
    assert "float16 cannot hold these numbers, but float32 could" in flowing
    assert "-1e4 instead of -1e9" in flowing
    status, out, _ = run(capsys, f"{EXAMPLE}:fixed")
    assert (status, "Nothing is wrong." in out) == (0, True), out


BAD_USE = {
    # name: (target, a file to write, what is said)
    "no colon": ("doctored", None, "The target must be module:function or path/to/file.py:function, got"),
    "no file": ("nowhere.py:f", None, "The file nowhere.py does not exist."),
    "no module": ("nowhere.at.all:f", None, "There is no module nowhere"),
    "no function": ("doctored:typo", None, "no function `typo` in doctored; it has model, half, fine"),
    "a value": ("doctored:W", None, "`W` in doctored is not a function, but `dict`"),
    "does not parse": ("f.py:f", "def f(:", "f.py does not import: SyntaxError"),
    "does not import": ("f.py:f", "import nowhere", "f.py does not import: ModuleNotFoundError"),
    "exits": ("f.py:f", "raise SystemExit(3)", "f.py does not import: SystemExit: 3"),
    "needs arguments": ("f.py:f", "def f(x): pass", "callable without arguments"),
    "returns one value": ("f.py:f", "def f(): return 3", "`f()` returned `int`. It must return (loss"),
    "returns a pair": ("f.py:f", "def f(): return 3, 4", "`f()` returned 2 values. It must return"),
    "no loss": ("f.py:f", "def f(): return None, 1.0, 2", "returned `NoneType` instead of a loss function"),
    "empty tree": ("f.py:f", "def f(): return len, {}, 2", "without any floating array: an empty tree"),
    "integers": ("f.py:f", "import numpy as np\ndef f(): return len, {'n': np.arange(3)}, 2", "without any floating array: int64[3]."),
    "the loss fails": ("f.py:f", "def f(): return (lambda p, b: p[b]), {'w': 1.0}, 'v'", "failed: KeyError: 'v'"),
    "a loss for each example": (
        "f.py:f", "import jax.numpy as jnp\ndef f(): return (lambda p, b: p * jnp.ones(3)), 1.0, 2",
        "must return one floating number, or a pair that begins with one, got float32[3]",
    ),
    "a loss and two others": ("f.py:f", "def f(): return (lambda p, b: (p, b, b)), 1.0, 2", "got `tuple`. Reduce it"),
    "a pair without a loss": ("f.py:f", "def f(): return (lambda p, b: (b, p)), 1.0, 2", "got `tuple`. Reduce it"),
    "fails only when it is run": (
        "f.py:f",
        "import jax, jax.numpy as jnp\ndef f():\n    def look(p): raise ZeroDivisionError('now')\n"
        "    return (lambda p, b: (jax.debug.callback(look, p), p * 1.0)[1]), 1.0, 2",
        "f.py:f failed when it was run on its batch: ",
    ),
    "an integer loss": ("f.py:f", "import jax.numpy as jnp\ndef f(): return (lambda p, b: jnp.int32(1)), 1.0, 2", "got int32[]"),
    "no derivative": (
        "f.py:f",
        "import jax, jax.numpy as jnp\ndef f():\n    return (lambda p, b: jax.lax.while_loop("
        "lambda c: c < 9, lambda c: c * 2, p)), 1.0, 2",
        "cannot be differentiated: ValueError",
    ),
    "a scale that is not a power of two": ("doctored:fine --loss-scale 1000", None, "power of two, at least 1"),
    "a scale below 1": ("doctored:fine --loss-scale 0.5", None, "got '0.5'"),
    "a scale in words": ("doctored:fine --loss-scale dynamic", None, "1, or \"auto\", got 'dynamic'"),
    "a folder that is not there": ("doctored:wide --output no/where.html", None, "Cannot write no/where"),
}  # fmt: skip


@cases("name", BAD_USE, fast=["no function", "exits", "a loss for each example"])
def test_bad_use_is_told_in_a_sentence(name, models, capsys):
    target, source, says = BAD_USE[name]
    if source is not None:
        pathlib.Path("f.py").write_text(source)
    status, out, err = run(capsys, *target.split())
    assert (status, out) == (2, "")
    assert err.startswith("jaxscale doctor: ")
    assert err.count("\n") == 1
    assert says in err


def test_signs_of_life_go_to_standard_error(models, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_PATIENCE", -1.0)
    status, out, err = run(capsys, "doctored:masked", "--quick")
    assert status == 0
    lines = err.splitlines()
    assert all(re.fullmatch(r" *\d+ s: [a-z].*", line) for line in lines)
    said = [line.split(": ")[1] for line in lines]
    assert said[0] == "loading the target"
    assert "looking for what limits the loss scale" in said
    assert "loading" not in out


@cases("patience", [0.05, 60.0])
def test_what_takes_long_is_told_again_with_how_far_it_is(capsys, patience):
    told, is_long = threading.Event(), patience < 1
    with Announcer(patience) as progress:
        progress("dreaming", lambda: told.set() or "half way")
        assert told.wait(60 if is_long else 0.3) == is_long
    said = capsys.readouterr().err.splitlines()
    assert bool(said) == is_long
    assert all(re.fullmatch(r" *\d+ s: dreaming(, half way)?", line) for line in said)
    assert progress.pause_between >= 2 * patience or not is_long  # less and less often


class Terminal(io.StringIO):
    """What a terminal would be sent, and the lines that then stand on it."""

    def isatty(self):
        return True

    def lines(self):
        return [re.split(r"\r\x1b\[K", line)[-1] for line in self.getvalue().split("\n")]


def test_a_terminal_shows_one_line_of_progress_and_none_at_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    with Announcer(-1.0) as progress:
        for words in ("one", "a line that is far longer than the terminal is wide"):
            progress(words)
            (shown,) = terminal.lines()
            assert re.fullmatch(r" *\d+ s: .*", shown)
            assert len(shown) < 30
        progress.clear()
        print("a warning", file=terminal)
        progress("more")
    assert terminal.lines() == ["a warning", ""]


@cases("columns", [44, 60, 88, 1000], fast=[44])
def test_the_text_fits_the_terminal(columns, models, no_pictures, capsys, monkeypatch):
    """Only what one may want to copy, such as a path or a line of code, is not broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    source = models.read_text().replace("  # the line", f"  # the line{' and more' * 30}")
    models.write_text(source)
    _, out, _ = run(capsys, "doctored:overflow", "--quick")
    long = [text for text in out.splitlines() if len(text) > min(columns, 100)]
    assert not [text for text in long if len(text.split()) > 1]
    assert max(map(len, out.splitlines())) > min(columns, 100) - 25


def test_ctrl_c_ends_it_with_one_line(models, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "examine", interrupted)
    status, out, err = run(capsys, "doctored:wide", "--quick")
    assert (status, out, err) == (130, "", "jaxscale doctor: interrupted.\n")


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxscale {jaxscale.__version__}\n"


@cases("error", [IndexError("first line\nsecond"), TypeError("no"), NotImplementedError()])
def test_what_scale_backward_raises_is_told_and_all_else_too(
    error, models, no_pictures, capsys, monkeypatch
):
    def scale_backward(fun):
        def raising(*args):
            raise error

        return raising

    monkeypatch.setattr(compiled, "scale_backward", scale_backward)
    status, out, _ = run(capsys, "doctored:tiny", "--json-file", "results.json")
    flowing = re.sub(r"\s+", " ", out)
    assert status == 0
    said = ": ".join(filter(None, [type(error).__name__, str(error).split("\n")[0]]))
    assert f"- `jaxscale.scale_backward` was tried on this loss, and raised {said}" in flowing
    assert "Nothing is wrong, with a loss scale: it needs one." in flowing
    results = json.loads(pathlib.Path("results.json").read_text())
    assert results["scale_backward_raised"].startswith(said)
    assert results["repeats"] is None


def test_what_autocast_raises_is_told_in_a_sentence(models, capsys, monkeypatch):
    def autocast(fun, dtype):
        def raising(*args):
            raise ValueError("it cannot")

        return raising

    monkeypatch.setattr(measure, "autocast", autocast)
    status, out, err = run(capsys, "doctored:wide", "--autocast", "float16", "--quick")
    assert (status, out) == (2, "")
    assert err.startswith(
        "jaxscale doctor: `jaxscale.autocast` raised on the loss of doctored:wide"
    )
    assert "ValueError: it cannot" in err


def test_a_traceback_if_asked_for(models, capsys):
    pathlib.Path("f.py").write_text("def f():\n    return 1 / 0")
    status, out, err = run(capsys, "f.py:f", "--traceback")
    assert (status, out) == (2, "")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("jaxscale doctor: `f()` failed: ZeroDivisionError")


def test_what_cannot_be_written_does_not_hide_the_results(models, capsys):
    status, out, err = run(capsys, "doctored:wide", "--quick", "--json-file", ".")
    assert (status, out[:8]) == (2, "Nothing ")
    assert "'.'" in err


@pytest.mark.slow
def test_from_a_shell(tmp_path):
    def shell(*words, **env):
        command, env = [sys.executable, "-m", "jaxscale", "doctor", *words], os.environ | env
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    (tmp_path / "f.py").write_text(
        "import numpy as np\ndef f(): return (lambda p, b: p.sum()), np.ones(3, np.float32), None"
    )
    absent = shell("f.py:f", JAX_PLATFORMS="cuda")
    for bad in (absent, shell("nowhere:f")):
        assert (bad.returncode, bad.stdout) == (2, "")
        assert "Traceback" not in bad.stderr
    assert "JAX has no device to run on: cuda is not there." in absent.stderr
    told = shell("--help")
    assert (told.returncode, "Exit status: 0 if" in told.stdout) == (0, True)
