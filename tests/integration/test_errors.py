"""Bad input: an error names the call, the argument, the value and the way out."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state
from forged import forged
from tables import POLICIES, cases

import jaxscale
from jaxscale import diagnostics, presets

DYNAMIC, SGD, W = jaxscale.DynamicLossScale, optax.sgd(0.1), jnp.ones(2)
STATE, NOOP = DYNAMIC().init(), jaxscale.NoOpLossScale().init()
TX, WINDOW = jaxscale.loss_scaled(SGD), jaxscale.multi_steps(SGD, 2)
OPT_STATE = TX.init(W)
SAM = optax.contrib.sam(SGD, SGD, opaque_mode=True)
OTHERS = SGD, optax.adam(0.1), optax.lbfgs(), SAM
SKIPPING, ADAM, LBFGS, SAM = map(jaxscale.skip_nonfinite, OTHERS)
CHANGING = optax.GradientTransformation(lambda p: (), lambda u, s, p: (u, (1,)))
CHANGING = jaxscale.loss_scaled(CHANGING)
NAMED = jaxscale.loss_scaled(SGD, axis_name="d")
CLIPPED, ADAPTIVE = jaxscale.loss_scaled(SGD, max_norm=1.0), jaxscale.loss_scaled(SGD, "adaptive")
PAIR = {"w": W, "b": W}
LINEN, NNX = jaxscale.flax.train_step, jaxscale.nnx.train_step


def never_traced(*args):
    raise AssertionError(args)


def without_return(params):
    jax.tree.map(jnp.sum, nnx.state(params) if isinstance(params, nnx.Module) else params)


def two(w, x):
    return jnp.sum(w * x)


class OwnTrainState(jaxscale.flax.TrainState):
    stats: Any
    ema: Any


def flax_state(tx=TX):
    fields = {"stats": {"mean": W, "count": jnp.array(3)}, "ema": W}
    return OwnTrainState.create(apply_fn=None, params={"w": W}, tx=tx, **fields)


def apply(**fields):
    return flax_state().apply_gradients(grads={"w": W}, **fields)


def returned(fields, **options):
    step = LINEN(lambda p, f: (jnp.sum(p["w"]), fields), has_state=True, **options)
    return step(flax_state())


def nnx_pair(tx=TX, size=2):
    model = nnx.Linear(2, size, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def half_loss(w):
    return jnp.sum(w.astype(jnp.float16).astype(jnp.float32))


BARE = optax.adam(0.1)
MOMENTS = jaxscale.loss_scaled(BARE)
PAIRED = jaxscale.multi_steps(MOMENTS, 2)

CASES = {
    "growth is 1": (lambda: DYNAMIC(growth_factor=1), ValueError, r"growth_factor=.*above 1.*1\.0.*2\.0"),
    "growth is text": (lambda: DYNAMIC(growth_factor="2"), TypeError, r"growth_factor.*'2'.*str"),
    "backoff is 1": (lambda: DYNAMIC(backoff_factor=1), ValueError, r"backoff_factor.*1\.0.*0\.5"),
    "backoff is 0": (lambda: DYNAMIC(backoff_factor=0), ValueError, r"backoff_factor.*0\.0"),
    "backoff is NaN": (lambda: DYNAMIC(backoff_factor=np.nan), ValueError, r"backoff_factor.*nan"),
    "interval is 0": (lambda: DYNAMIC(growth_interval=0), ValueError, r"growth_interval.*at least 1.*0"),
    "interval is a float": (lambda: DYNAMIC(growth_interval=1e6), TypeError, r"growth_interval.*1000000\.0.*int"),
    "interval is a bool": (lambda: DYNAMIC(growth_interval=True), ValueError, r"growth_interval.*True"),
    "interval is too large": (lambda: DYNAMIC(growth_interval=2**31), ValueError, r"growth_interval.*int32"),
    "hysteresis is 0": (lambda: DYNAMIC(hysteresis=0), ValueError, r"hysteresis.*0"),
    "bounds unordered": (lambda: DYNAMIC(min_scale=8, max_scale=4), ValueError, r"min_scale <= init_scale <= max_scale.*8\.0.*4\.0"),
    "init below min": (lambda: DYNAMIC(init_scale=0.5), ValueError, r"min_scale <= init_scale.*0\.5"),
    "max beyond float32": (lambda: DYNAMIC(max_scale=1e39), ValueError, r"max_scale.*normal range.*1e\+39"),
    "min is 0": (lambda: DYNAMIC(min_scale=0), ValueError, r"min_scale.*normal range.*0\.0"),
    "init is an array": (lambda: DYNAMIC(init_scale=jnp.ones(())), TypeError, r"init_scale.*Array"),
    "fixed below 1": (lambda: jaxscale.FixedLossScale(0.5), ValueError, r"loss_scale=.*at least 1.*0\.5"),
    "fixed bool": (lambda: jaxscale.FixedLossScale(True), ValueError, r"loss_scale=.*True"),
    "spec bool": (lambda: jaxscale.as_loss_scale(True), TypeError, r"True.*None.*number.*\"dynamic\".*LossScale"),
    "spec numpy bool": (lambda: jaxscale.as_loss_scale(np.bool_(True)), TypeError, r"True"),
    "spec text": (lambda: jaxscale.as_loss_scale("static"), ValueError, r"'static'.*\"dynamic\""),
    "spec array": (lambda: jaxscale.as_loss_scale(jnp.ones(())), TypeError, r"Array.*number"),
    "spec class": (lambda: jaxscale.as_loss_scale(DYNAMIC), TypeError, r"mean `DynamicLossScale\(\)`"),
    "unknown key": (lambda: DYNAMIC.from_config({"init": 8}), TypeError, r"DynamicLossScale.*'init'"),
    "base class": (lambda: jaxscale.LossScale.from_config({}), TypeError, r"abstract class LossScale"),
    "gradients for the largest": (lambda: DYNAMIC().adjust(STATE, True, {"w": W}), TypeError, r"`DynamicLossScale\.adjust\(largest=.*scalar, .*got dict.*`update"),
    "verdict is no bool": (lambda: DYNAMIC().adjust(STATE, 1.0), TypeError, r"adjust\(grads_finite.*float.*all_finite"),
    "verdict is no scalar": (lambda: DYNAMIC().adjust(STATE, jnp.array([True])), TypeError, r"bool\[1\]"),
    "predicate is an int": (lambda: jaxscale.tree_where(1, W, W), TypeError, r"tree_where\(pred.*int"),
    "other structure": (lambda: jaxscale.tree_where(True, {"a": 1, "b": 2}, {"a": 1, "c": 2}), ValueError, r"first: \['b'\].*second: \['c'\]"),
    "other shape": (lambda: jaxscale.tree_where(True, {"a": W}, {"a": jnp.ones(3)}), ValueError, r"shapes.*\['a'\].*\(2,\).*\(3,\)"),
    "other dtype": (lambda: jaxscale.tree_where(True, W, W.astype(jnp.float16)), TypeError, r"dtypes.*float32.*float16"),
    "a number that is not an integer": (lambda: jaxscale.tree_where(True, {"x": [1.5]}, {"x": [jnp.int32(3)]}), TypeError, r"tree_where.*\['x'\]\[0\] is 1\.5.*int32.*does not hold.*Pass"),
    "a number that would wrap": (lambda: jaxscale.tree_where(True, jnp.uint8(3), -1), TypeError, r"tree_where.*the root is -1.*uint8"),
    "a weak float for an integer": (lambda: jaxscale.tree_where(True, jnp.asarray(2.0), jnp.int32(3)), TypeError, r"dtypes.*the root.*float32.*int32"),
    "other type": (lambda: jaxscale.tree_where(True, {"d": jnp.float16}, {"d": jnp.float32}), TypeError, r"not arrays.*\['d'\].*float16.*float32"),
    "no scale": (lambda: jaxscale.value_and_grad(jnp.sum, optax.adam(0.1).init(W)), ValueError, r"value_and_grad.*exactly one.*none in ScaleByAdamState at \[0\].*loss_scaled"),
    "no scale at all": (lambda: jaxscale.grad(jnp.sum, None), ValueError, r"grad.*none in the NoneType"),
    "empty tree": (lambda: jaxscale.grad(jnp.sum, ()), ValueError, r"an empty tree"),
    "a policy": (lambda: jaxscale.grad(jnp.sum, DYNAMIC()), ValueError, r"none in the DynamicLossScale.*`init`"),
    "swapped": (lambda: jaxscale.value_and_grad(STATE, jnp.sum), ValueError, r"function to differentiate comes first"),
    "check of nothing": (lambda: jaxscale.check(STATE), ValueError, r"check.*LossScaledState.*none"),
    "check under jit": (lambda: jax.jit(lambda s: jaxscale.check(s))(OPT_STATE), TypeError, r"check.*jit.*metrics"),
    "metrics of a bare optimizer of NNX": (lambda: jaxscale.metrics(nnx.state(nnx.Optimizer(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param))), ValueError, r"metrics.*none in .*at \['opt_state'\].*Wrap the optimizer"),
    "check of optax's state": (lambda: jaxscale.check(optax.adam(0.1).init(W)), ValueError, r"check.*none in ScaleByAdamState at \[0\].*loss_scaled"),
    "gradients alone": (lambda: jaxscale.value_and_grad(jnp.sum, STATE, transform=jax.grad)(W), TypeError, r"value_and_grad\(transform=.*\(loss, grads\).*got gradients alone.*Pass `jax.value_and_grad`"),
    "gradients of a pair alone": (lambda: jaxscale.value_and_grad(lambda w: jnp.sum(w[0] * w[1][0] * w[1][1]), STATE, transform=jax.grad)((W, (W, W))), TypeError, r"value_and_grad\(transform=.*got gradients alone"),
    "gradients alone, at a scale of 1": (lambda: jaxscale.value_and_grad(jnp.sum, NOOP, transform=jax.grad)(W), TypeError, r"value_and_grad\(transform=.*got gradients alone"),
    "gradients with the loss": (lambda: jaxscale.grad(jnp.sum, STATE, transform=jax.value_and_grad)(W), TypeError, r"`grad\(transform=.*got the loss as well.*Pass `jax.grad`, or call `jaxscale.value_and_grad`"),
    "another transform": (lambda: jaxscale.grad(jnp.sum, STATE, transform=lambda f, has_aux: lambda w: W)(W), TypeError, r"`grad\(transform=.*differentiate as `jax.grad`.*got ArrayImpl"),
    "traced gradients alone": (lambda: diagnostics.trace(jnp.sum, STATE, transform=jax.grad)(W), TypeError, r"trace\(transform=.*got gradients alone"),
    "loss is no scalar": (lambda: jaxscale.grad(lambda w: w, STATE)(W), TypeError, r"grad\(fun\).*float32\[2\].*mean"),
    "loss is an integer": (lambda: jaxscale.value_and_grad(lambda w: jnp.int32(1), STATE)(W), TypeError, r"int32\[\]"),
    "loss is a pair": (lambda: jaxscale.grad(lambda w: (jnp.sum(w), w), STATE)(W), TypeError, r"tuple.*has_aux=True"),
    "loss is missing": (lambda: jaxscale.grad(lambda w: None, STATE)(W), TypeError, r"NoneType"),
    "aux is missing": (lambda: jaxscale.grad(jnp.sum, STATE, has_aux=True)(W), TypeError, r"has_aux=True.*pair"),
    "inner is a number": (lambda: jaxscale.loss_scaled(0.1), TypeError, r"inner.*0\.1.*optax\.adam"),
    "a state without a scale under a fixed one": (lambda: jaxscale.loss_scaled(SGD, 8).update(W, SKIPPING.init(W), W), TypeError, r"another optimizer: its scaling is a UnitLossScaleState.*FixedLossScale"),
    "a population without vmap": (lambda: TX.update({"w": jnp.ones((4, 2))}, jax.vmap(lambda _: OPT_STATE)(jnp.arange(4)), {"w": W}), ValueError, r"update\(state=.*shape \(4,\): call it under `jax.vmap`"),
    "a text as the loss": (lambda: TX.update({"w": W}, OPT_STATE, value="1.0"), TypeError, r"value=.*one number, got '1.0'"),
    "a type as a verdict": (lambda: jaxscale.tree_where(np.bool_, W, W), TypeError, r"tree_where\(pred=.*scalar bool, got type"),
    "arguments swapped": (lambda: jaxscale.apply_gradients(TX, W, {"w": W}, OPT_STATE), TypeError, r"apply_gradients\(opt_state=.*got dict.*order of arguments is \(tx, grads, opt_state, par"),
    "arguments of update swapped": (lambda: TX.update(W, {"w": W}, OPT_STATE), TypeError, r"state=.*LossScaledState.*dict.*\(grads, opt_state, params\)"),
    "keep is a tree": (lambda: jaxscale.apply_gradients(TX, W, OPT_STATE, W, keep={"new": W}), TypeError, r"apply_gradients\(keep=.*a pair \(new, old\), got dict"),
    "keep of two shapes": (lambda: jaxscale.apply_gradients(TX, W, OPT_STATE, W, keep=(W, W[0])), ValueError, r"apply_gradients\(keep=\.\.\.\)` needs leaves of equal shapes"),
    "step: arguments swapped": (lambda: jaxscale.train_step(TX, jnp.sum), TypeError, r"train_step\(loss_fn\).*a function that returns the loss, got GradientTransf"),
    "step: optimizer is not called": (lambda: jaxscale.train_step(jnp.sum, optax.adamw), TypeError, r"train_step\(tx, .*got <function adamw.*as in `optax\.adamw\(1e-3\)`"),
    "step: retries below 0": (lambda: jaxscale.train_step(jnp.sum, TX, retries=-1), ValueError, r"train_step\(retries=.*at least 0, got -1"),
    "step: retries of a bare optimizer": (lambda: jaxscale.train_step(jnp.sum, SGD, retries=1), ValueError, r"train_step\(retries=1\).*needs a loss scale.*another optimizer.*loss_scaled\(tx\)"),
    "step: retries at a fixed scale": (lambda: jaxscale.train_step(jnp.sum, jaxscale.loss_scaled(SGD, 8), retries=1), ValueError, r"train_step\(retries=1\).*can be lowered, got one with a FixedLossScale"),
    "step: has_state is a number": (lambda: jaxscale.train_step(jnp.sum, TX, has_state=1), ValueError, r"train_step\(has_state=.*False, True, got 1"),
    "step: argnums": (lambda: jaxscale.train_step(jnp.sum, TX, argnums=(0, 1)), ValueError, r"train_step\(argnums=\(0, 1\)\).*first argument.*one tree"),
    "step: a TrainState": (lambda: jaxscale.train_step(never_traced, TX)({"w": W}, flax_state()), TypeError, r"train_step\(\.\.\.\)\(opt_state=.*TrainState.*Pass its `opt_state`"),
    "step: arguments of the step swapped": (lambda: jaxscale.train_step(never_traced, TX)(OPT_STATE, W), TypeError, r"train_step\(\.\.\.\)\(opt_state=.*Array.*order of arguments is \(params, opt_state, \."),
    "step: the state of another optimizer": (lambda: jaxscale.train_step(never_traced, TX)(W, jaxscale.loss_scaled(optax.adam(0.1)).init(W)), ValueError, r"train_step\(\.\.\.\)\(opt_state=.*another optimizer.*`init` of this"),
    "step: the state of other parameters": (lambda: jaxscale.train_step(never_traced, ADAM)({"w": W}, ADAM.init({"w": W, "b": W})), ValueError, r"train_step\(\.\.\.\)\(opt_state=.*of other parameters"),
    "step: the state of parameters of another shape": (lambda: jaxscale.train_step(never_traced, ADAM)({"w": W}, ADAM.init({"w": jnp.ones(3)})), ValueError, r"train_step\(\.\.\.\)\(opt_state=.*of other parameters.*\(2,\) at \[0\]\.mu\['w'\], got .*\(3,\)\. Pass"),
    "step: no batch": (lambda: jaxscale.train_step(two, TX)(W, OPT_STATE), TypeError, r"train_step\(loss_fn\)`: `loss_fn` takes \(w, x\): missing a required argument: 'x'\. The step called it with \(an array\): what is trained, and whatever else the step was given\."),
    "step: no has_state": (lambda: jaxscale.train_step(two, TX)(W, OPT_STATE, {"mean": W}, W), TypeError, r"takes \(w, x\): too many positional.*with \(an array, dict, an array\).*Pass has_state=True"),
    "step: has_state that is too much": (lambda: jaxscale.train_step(two, TX, has_state=True)(W, OPT_STATE, W, W), TypeError, r"train_step\(loss_fn\).*too many positional.*what is trained, the state, and whatever.*given\."),
    "step: another keyword": (lambda: jaxscale.train_step(two, TX)(W, OPT_STATE, W, key=W), TypeError, r"takes \(w, x\): got an unexpected keyword argument 'key'.*\(an array, an array, key=\.\.\.\)"),
    "step: no batch, in autocast": (lambda: jaxscale.train_step(jaxscale.autocast(two), TX)(W, OPT_STATE), TypeError, r"train_step\(loss_fn\)`: `loss_fn` takes \(w, x\): missing a required argument: 'x'"),
    "step: no batch, compiled": (lambda: jaxscale.train_step(eqx.filter_jit(jax.jit(two)), TX)(W, OPT_STATE), TypeError, r"train_step\(loss_fn\)`: `loss_fn` takes \(w, x\): missing a required argument: 'x'"),
    "step: an optimizer with a line search": (lambda: jaxscale.train_step(jnp.sum, LBFGS)(W, LBFGS.init(W)), TypeError, r"`tx\.update` needs.*'grad' and 'value_fn'.*`train_step` gives it the loss.*write the loop.*apply_gradients"),
    "step: an optimizer with gradients of its own": (lambda: jaxscale.train_step(jnp.sum, SAM)(W, SAM.init(W)), ValueError, r"`tx\.update` needs.*grad_fn must be provided.*write the loop"),
    "step: the state of another policy": (lambda: jaxscale.train_step(never_traced, SKIPPING)(W, OPT_STATE), TypeError, r"train_step\(\.\.\.\)\(opt_state=.*another optimizer.*LossScaleState.*NoOpLossScale"),
    "step: a wrapped state of a bare optimizer": (lambda: jaxscale.train_step(never_traced, SGD)(W, OPT_STATE), TypeError, r"train_step\(\.\.\.\)\(opt_state=.*`tx` is a bare optimizer.*inner_state"),
    "step: no state": (lambda: jaxscale.train_step(never_traced, TX, has_state=True)(W, OPT_STATE), TypeError, r"train_step\(has_state=True\).*\(params, opt_state, state, \.\.\.\)"),
    "step: state that is not returned": (lambda: jaxscale.train_step(lambda w, s: jnp.sum(w), TX, has_state=True)(W, OPT_STATE, W), TypeError, r"train_step\(loss_fn, has_state=True\).*must return \(loss, state\), got an array"),
    "step: an output that is not asked for": (lambda: jaxscale.train_step(lambda w: (jnp.sum(w), {"w": w}), TX)(W, OPT_STATE), TypeError, r"train_step\(loss_fn\).*must return a loss, got \(an array, dict\).*has_aux.*has_state"),
    "step: state and output in a row": (lambda: jaxscale.train_step(lambda w, s: (jnp.sum(w), s, w), TX, has_state=True, has_aux=True)(W, OPT_STATE, W), TypeError, r"has_state=True, has_aux=True.*return \(loss, \(state, aux\)\), got \(an array, an array"),
    "step: a state that changes its shape": (lambda: jaxscale.train_step(lambda w, s: (jnp.sum(w), w[:1]), TX, has_state=True)(W, OPT_STATE, W), ValueError, r"train_step\(has_state=True\)` needs leaves of equal shapes.*\(1,\) and \(2,\)"),
    "hook: no function": (lambda: jaxscale.train_step(jnp.sum, TX, on_grads="data"), TypeError, r"train_step\(on_grads=\.\.\.\)` must be a function.*got str"),
    "hook: no state": (lambda: jaxscale.train_step(jnp.sum, TX, after=never_traced), ValueError, r"train_step\(after=\.\.\.\)` needs has_state=True"),
    "hook: nothing returned": (lambda: jaxscale.train_step(jnp.sum, TX, on_grads=lambda g: None)(W, OPT_STATE), ValueError, r"train_step\(on_grads=.*gradients like those that it got, .*returned PyTreeDef\(None\).*all"),
    "hook: a norm in the place of the gradients": (lambda: jaxscale.train_step(jnp.sum, TX, on_grads=jnp.linalg.norm)(W, OPT_STATE), ValueError, r"train_step\(on_grads=.*at the root it got the shape \(2,\).*returned \(\)"),
    "hook: gradients in half precision": (lambda: jaxscale.train_step(jnp.sum, TX, on_grads=lambda g: g.astype("float16"))(W, OPT_STATE), TypeError, r"train_step\(on_grads=.*got float32 and returned float16.*Cast"),
    "hook: another structure after": (lambda: jaxscale.train_step(lambda w, s: (jnp.sum(w), s), TX, has_state=True, after=lambda p, s: (s, p))(W, OPT_STATE, W), ValueError, r"train_step\(after=\.\.\.\)` needs two trees of one structure"),
    "step: an argument of the optimizer": (lambda: jaxscale.train_step(jnp.sum, TX, axis_name="batch"), TypeError, r"train_step\(\.\.\.\).*`value_and_grad`.*'axis_name'.*go to `jaxscale\.loss_scaled`"),
    "step: a TrainState for parameters": (lambda: jaxscale.train_step(never_traced, TX)(flax_state(), W), TypeError, r"train_step\(\.\.\.\)\(params, .*TrainState.*Use `jaxscale\.flax\.train_step`"),
    "step: an Equinox module": (lambda: jaxscale.train_step(never_traced, TX)({"w": W, "f": jnp.sin}, OPT_STATE), TypeError, r"train_step\(\.\.\.\)\(params, .*not arrays, such as.*transform=eqx\.filter_value_and_grad"),
    "step: an output that is missing": (lambda: jaxscale.train_step(jnp.sum, TX, has_aux=True)(W, OPT_STATE), TypeError, r"train_step\(loss_fn, has_aux=True\).*\(loss, aux\), got an array\. Return it so, or leave"),
    "step: an NNX module": (lambda: jaxscale.train_step(never_traced, TX)(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), OPT_STATE), TypeError, r"train_step\(\.\.\.\)\(params, .*BatchNorm.*Use `jaxscale\.nnx\.train_step`"),
    "step: a loss with a shape": (lambda: jaxscale.train_step(lambda w: w, TX)(W, OPT_STATE), TypeError, r"train_step\(loss_fn\)`: `loss_fn` must return a floating scalar, got float32\[2\]"),
    "step: a transform without the loss": (lambda: jaxscale.train_step(jnp.sum, TX, transform=jax.grad)(W, OPT_STATE), TypeError, r"train_step\(transform=.*gradients alone\. Pass `jax\.value_and_grad`"),
    "value with aux": (lambda: TX.update(W, OPT_STATE, W, value=(W[0], W)), TypeError, r"value=.*one number.*\(\(\), \(2,\)\).*has_aux"),
    "wrapped twice": (lambda: jaxscale.loss_scaled(TX), TypeError, r"loss_scaled\(inner\).*DynamicLossScale.*wrap once"),
    "wrapped deeper": (lambda: jaxscale.loss_scaled(optax.chain(SKIPPING)).init(W), ValueError, r"LossScaledState.*at \[0\].*wrap once"),
    "a step that changes the structure of its state": (lambda: CHANGING.update(W, CHANGING.init(W), W), ValueError, r"inner\.update"),
    "a compiled step that changes the structure": (lambda: jax.jit(CHANGING.update)(W, CHANGING.init(W), W), ValueError, r"inner\.update"),
    "state of another scale, with a window": (lambda: jaxscale.multi_steps(TX, 2).update(W, WINDOW.init(W), W), TypeError, r"update\(state=.*UnitLossScaleState.*DynamicLossScale is a LossScaleState"),
    "state of optax": (lambda: jaxscale.loss_scaled(optax.adam(0.1)).update(W, optax.adam(0.1).init(W), W), TypeError, r"update\(state=.*got tuple.*`tx\.init\(params\)\._replace\(inner_state=state\)`"),
    "wrapped state of a bare optimizer": (lambda: jaxscale.apply_gradients(SGD, W, OPT_STATE, W), TypeError, r"apply_gradients\(opt_state=.*is a `LossScaledState`.*bare.*Pass.*loss_scaled.*inner_state"),
    "optimizer is not called": (lambda: jaxscale.apply_gradients(optax.adamw, W, optax.adamw(0.1).init(W), W), TypeError, r"apply_gradients\(tx.*got <function adamw.*as in `optax\.adamw\(1e-3\)`"),
    "value is a function": (lambda: TX.update(W, OPT_STATE, W, value=jnp.mean), TypeError, r"value=.*got the function mean\. Pass what it returned"),
    "a gradient is None": (lambda: WINDOW.update({"a": W, "b": None}, WINDOW.init({"a": W, "b": W})), ValueError, r"multi_steps.*updates=.*got None at b\. Call `init`.*or pass zeros"),
    "no window": (lambda: jaxscale.multi_steps(SGD, 0), ValueError, r"multi_steps\(every_k_schedule=.*at least 1.*0"),
    "half a window": (lambda: jaxscale.multi_steps(SGD, 2.5), TypeError, r"every_k_schedule=.*2\.5"),
    "drop what": (lambda: jaxscale.multi_steps(SGD, 2, drop="batch"), ValueError, r"drop=.*'micro_batch', 'window'.*'batch'"),
    "count what": (lambda: jaxscale.multi_steps(SGD, 2, growth_unit="step"), ValueError, r"growth_unit=.*'optimizer_step', 'micro_batch'.*'step'"),
    "accumulate a number": (lambda: jaxscale.multi_steps(0.1, 2), TypeError, r"multi_steps\(inner\).*0\.1.*optax\.adam"),
    "two windows": (lambda: jaxscale.multi_steps(WINDOW, 2), TypeError, r"multi_steps\(inner\).*window already"),
    "a state without a window": (lambda: jaxscale.multi_steps(TX, 2).update(W, OPT_STATE, W), TypeError, r"multi_steps.*state=.*init"),
    "unknown field": (lambda: apply(batch_stat=1), ValueError, r"batch_stat.*extra_args"),
    "unknown always": (lambda: apply(always_replace=["rng"]), ValueError, r"always_replace.*rng"),
    "one name for several": (lambda: apply(always_replace="rng"), TypeError, r"always_replace=.*'rng'.*Pass a tuple.*\('rng',\)"),
    "no names": (lambda: apply(always_replace=[3]), TypeError, r"always_replace=.*\[3\].*Pass a tuple"),
    "no verdict": (lambda: jaxscale.flax.TrainState.create(apply_fn=None, params=W, tx=SGD), ValueError, r"TrainState.create\(tx=.*LossScaledState.*loss_scaled"),
    "a field of another structure": (lambda: apply(stats={"mean": W}), ValueError, r"TrainState.apply_gradients\(stats=\.\.\.\)"),
    "a field of another shape": (lambda: apply(stats={"mean": jnp.ones(3), "count": jnp.array(0)}), ValueError, r"TrainState.apply_gradients\(stats=\.\.\.\)"),
    "a field of another dtype": (lambda: apply(stats={"mean": W.astype("float16"), "count": jnp.array(0)}), TypeError, r"TrainState.apply_gradients\(stats=\.\.\.\)"),
    "linen: an optimizer of other parameters": (lambda: LINEN(never_traced)(flax_state(ADAM).replace(params={"w": jnp.ones(5)}), W), ValueError, r"flax\.train_step\(\.\.\.\)\(state\.opt_state=.*other parameters.*\(5,\) at .*got .*\(2"),
    "linen: a hook that returns a field": (lambda: LINEN(lambda p: jnp.sum(p["w"]), after=lambda state: state.stats)(flax_state()), TypeError, r"flax\.train_step\(after=\.\.\.\)`.*`TrainState` that it got.*got dict.*state\.replace"),
    "linen: a hook that changes a shape": (lambda: LINEN(lambda p: jnp.sum(p["w"]), after=lambda state: state.replace(stats=W))(flax_state()), ValueError, r"flax\.train_step\(after=\.\.\.\)` needs two trees.*\['stats'\]"),
    "linen: Flax's own": (lambda: LINEN(never_traced)(train_state.TrainState.create(apply_fn=None, params=W, tx=TX), W), TypeError, r"flax\.train_step.*`jaxscale\.flax\.TrainState`, got TrainState.*Flax's own"),
    "linen: a state of an optimizer": (lambda: LINEN(never_traced)(OPT_STATE, W), TypeError, r"flax\.train_step.*got LossScaledState"),
    "linen: an unknown field": (lambda: returned({"batch_stats": 1}), ValueError, r"flax\.train_step\(loss_fn, has_state=True\).*got batch_stats among.*: ema, stats\."),
    "linen: a collection instead of its field": (lambda: returned(W), TypeError, r"flax\.train_step\(loss_fn, has_state=True\).*a dict from the names.*Array.*stats"),
    "linen: a field of another dtype": (lambda: returned({"stats": {"mean": W, "count": jnp.array(4.0)}}), TypeError, r"flax\.train_step\(stats=.*equal dtypes.*count"),
    "linen: a field that is always replaced and not returned": (lambda: returned({}, always_replace=("ema",)), ValueError, r"flax\.train_step\(always_replace=\.\.\.\)` got ema among.*`loss_fn` must return"),
    "linen: fields to replace, and no state": (lambda: LINEN(never_traced, always_replace=("key",)), ValueError, r"flax\.train_step\(always_replace=\('key',\)\)` needs has_state=True"),
    "linen: no fields": (lambda: LINEN(lambda p, f: jnp.sum(p["w"]), has_state=True)(flax_state()), TypeError, r"flax\.train_step\(loss_fn, has_state=True\).*\(loss, state\), got an array"),
    "linen: retries without a scale": (lambda: LINEN(never_traced, retries=1)(flax_state(SKIPPING), W), ValueError, r"flax\.train_step\(retries=1\).*loss scale that can be lowered.*NoOpLossScale"),
    "nnx: a hook that returns the model": (lambda: NNX(lambda model, x: jnp.sum(model(x)), after=lambda model: model)(*nnx_pair(), W), TypeError, r"nnx\.train_step\(after=\.\.\.\)` changes the model in place.*return None, got Linear"),
    "nnx: a hook that adds a variable": (lambda: NNX(lambda model, x: jnp.sum(model(x)), after=lambda model: setattr(model, "extra", nnx.BatchStat(W)))(*nnx_pair(), W), ValueError, r"nnx\.train_step\(after=\.\.\.\)` must keep the variables.*added or removed extra\. Make"),
    "nnx: the transformation": (lambda: NNX(never_traced)(nnx_pair()[0], TX, W), TypeError, r"must be an `nnx\.Optimizer`.*GradientTransformation.*wrt="),
    "nnx: swapped": (lambda: NNX(never_traced)(*nnx_pair()[::-1], W), TypeError, r"nnx\.train_step\(\.\.\.\)\(model, optimizer.*got Linear"),
    "nnx: an auxiliary output": (lambda: NNX(lambda m, x: (jnp.sum(m(x)), x))(*nnx_pair(), W), TypeError, r"nnx\.train_step\(loss_fn\).*got \(an array, an array\)\. Pass has_aux=True.* the loss\."),
    "nnx: compiled by JAX": (lambda: jax.jit(NNX(never_traced))(*nnx_pair(), W), TypeError, r"nnx\.train_step.*`nnx\.jit\(step\)` for `jax\.jit"),
    "nnx: the step for plain functions": (lambda: jaxscale.train_step(never_traced, TX, transform=nnx.value_and_grad), TypeError, r"train_step\(transform=.*Use `jaxscale\.nnx\.train_step`"),
    "nnx: an optimizer of another model": (lambda: NNX(never_traced)(nnx_pair(ADAM)[0], nnx_pair(ADAM, 5)[1], W), ValueError, r"`nnx\.train_step\(\.\.\.\)\(optimizer=.*of another optimizer or of other parameters"),
    "nnx: what is not trained": (lambda: NNX(never_traced, argnums=1)(*nnx_pair(), W), ValueError, r"nnx\.train_step\(argnums=1\).*wrt=<class 'flax.*Param'>.*tx, wrt=nnx\.LoRAParam"),
    "nnx: no batch": (lambda: NNX(lambda model, x: jnp.sum(model(x)))(*nnx_pair()), TypeError, r"nnx\.train_step\(loss_fn\)`: `loss_fn` takes \(model, x\): missing.*with \(Linear\)"),
    "check of fewer than no steps": (lambda: jaxscale.check(OPT_STATE, max_consecutive=-1), ValueError, r"`check\(max_consecutive=\.\.\.\)` must be an integer, at least 0, got -1"),
    "check of half a step": (lambda: jaxscale.check(OPT_STATE, max_consecutive=0.5), TypeError, r"`check\(max_consecutive=.*got 0\.5"),
    "an axis under jit": (lambda: jax.jit(NAMED.update)(W, OPT_STATE, W), NameError, r"`axis_name='d'`.*`shard_map` or `pmap`.*none of that name\. Under `jit` alone leave it out"),
    "two axes under jit": (lambda: jax.jit(jaxscale.loss_scaled(SGD, axis_name=("d", "e"), max_norm=1.0).update)(W, CLIPPED.init(W), W), NameError, r"`axis_name=\('d', 'e'\)`.*Under `jit` alone leave it out"),
    "an axis of a largest gradient under jit": (lambda: jax.jit(jaxscale.loss_scaled(SGD, "adaptive", axis_name="d").update)(W, ADAPTIVE.init(W), W), NameError, r"`axis_name='d'`.*leave it out"),
    "an axis for all_finite": (lambda: jaxscale.all_finite(W, axis_name="d"), NameError, r"`axis_name='d'`.*leave it out"),
    "a loss without return": (lambda: jaxscale.value_and_grad(without_return, STATE)(W), TypeError, r"`value_and_grad\(fun\)`.*floating scalar, got NoneType\. Does `fun` end without `return loss`"),
    "step: a loss without return": (lambda: jaxscale.train_step(without_return, TX)(W, OPT_STATE), TypeError, r"`train_step\(loss_fn\)`.*got NoneType\. Does `loss_fn` end without `return loss`"),
    "nnx: a loss without return": (lambda: NNX(without_return)(*nnx_pair()), TypeError, r"`nnx\.train_step\(loss_fn\)`.*got NoneType\. Does `loss_fn` end without `return loss`"),
    "linen: a loss without return": (lambda: LINEN(without_return)(flax_state()), TypeError, r"`flax\.train_step\(loss_fn\)`.*got NoneType\. Does `loss_fn` end without `return loss`"),
    "step: a count as the loss": (lambda: jaxscale.train_step(lambda w: jnp.sum(w > 0), TX)(W, OPT_STATE), TypeError, r"`train_step\(loss_fn\)`.*got int32\[\]\. .*no gradient\. Return a loss.*not a count"),
    "step: a Python integer as the loss": (lambda: jaxscale.train_step(lambda w: 3, TX)(W, OPT_STATE), TypeError, r"`train_step\(loss_fn\)`.*got int\[\]\. .*no gradient\. Return a loss"),
    "gradients under other keys": (lambda: jaxscale.apply_gradients(TX, {"w": W, "c": W}, TX.init(PAIR), PAIR), ValueError, r"`apply_gradients\(grads=\.\.\.\)` must have the structure.*gradients: c; .*parameters: b\. Pass"),
    "gradients of a part": (lambda: jaxscale.apply_gradients(TX, {"w": W}, TX.init(PAIR), PAIR), ValueError, r"`apply_gradients\(grads=.*gradients: none; .*parameters: b\. .*None or zeros"),
    "gradients of a part of a bare optimizer": (lambda: jaxscale.apply_gradients(SGD, {"w": W}, SGD.init(PAIR), PAIR), ValueError, r"`apply_gradients\(grads=.*only among the parameters: b\."),
    "a gradient of another shape": (lambda: jaxscale.apply_gradients(TX, {"w": jnp.ones(3), "b": W}, TX.init(PAIR), PAIR), ValueError, r"`apply_gradients\(grads=\.\.\.\)`: the gradient at w has the shape \(3,\), and its parameter \(2,\)\. Pass"),
    "a scalar gradient": (lambda: jaxscale.apply_gradients(TX, jnp.ones(()), OPT_STATE, W), ValueError, r"`apply_gradients\(grads=.*at the root has the shape \(\), and its parameter \(2,\).*nothing is broadcast"),
    "a scalar gradient, with moments": (lambda: jaxscale.apply_gradients(ADAM, jnp.ones(()), ADAM.init(W), W), ValueError, r"has the shape \(\), and its parameter \(2,\)"),
    "a scalar gradient of a bare optimizer": (lambda: jaxscale.apply_gradients(SGD, jnp.ones(()), SGD.init(W), W), ValueError, r"`apply_gradients\(grads=.*has the shape \(\), and its parameter \(2,\)"),
    "a scalar gradient for update": (lambda: TX.update(jnp.ones(()), OPT_STATE, W), ValueError, r"`loss_scaled\(\.\.\.\)\.update\(updates=\.\.\.\)`.*has the shape \(\), and its parameter \(2,\)"),
    "a scalar gradient in a TrainState": (lambda: flax_state().apply_gradients(grads={"w": jnp.ones(())}), ValueError, r"`TrainState\.apply_gradients\(grads=\.\.\.\)`: the gradient at w has the shape \(\)"),
    "other keys in a TrainState": (lambda: flax_state().apply_gradients(grads={"v": W}), ValueError, r"`TrainState\.apply_gradients\(grads=\.\.\.\)` must have the structure.*gradients: v; .*parameters: w\."),
    "gradients by example of a number": (lambda: jaxscale.apply_gradients(TX, W, TX.init(W[0]), W[0]), ValueError, r"update of shape \(2,\) for the parameter at the root, which has \(\).*by example"),
    "a rule for spikes as the loss scale": (lambda: jaxscale.loss_scaled(SGD, jaxscale.SpikeRule()), TypeError, r"`loss_scaled\(loss_scale=\.\.\.\)` got SpikeRule\(.*pass it as `spikes=`"),
    "a preset for spikes as the loss scale": (lambda: jaxscale.loss_scaled(SGD, presets.olmo()), TypeError, r"`loss_scaled\(loss_scale=.*pass it as `spikes=`"),
    "a preset that was not called": (lambda: jaxscale.loss_scaled(SGD, presets.torch), TypeError, r"`loss_scaled\(loss_scale=\.\.\.\)` got <function torch.*call it, as in `torch\(\)`"),
    "a class of policies": (lambda: jaxscale.loss_scaled(SGD, DYNAMIC), TypeError, r"`loss_scaled\(loss_scale=.*mean `DynamicLossScale\(\)`"),
    "a flag as a norm": (lambda: jaxscale.loss_scaled(SGD, max_norm=True), ValueError, r"`loss_scaled\(max_norm=\.\.\.\)` must be a finite number, got True\. .*such as 1\.0, or None"),
    "linen: the optimizer beside the loss": (lambda: LINEN(never_traced, TX), TypeError, r"`flax\.train_step\(loss_fn\)` takes the loss alone, got a GradientTransformationExtraArgs.*TrainState\.create\(.*tx=tx\)"),
    "nnx: the optimizer beside the loss": (lambda: NNX(never_traced, nnx_pair()[1]), TypeError, r"`nnx\.train_step\(loss_fn\)` takes the loss alone, got an Optimizer.*`loss = step\(model, optimizer, \.\.\.\)`"),
    "a state of ours for PyTorch's": (lambda: presets.from_torch(OPT_STATE), TypeError, r"`presets\.from_torch\(state_dict\)` must be a dict, got LossScaledState\. Pass.*state_dict\(\).*from_state_dict"),
    "a state of ours for Keras'": (lambda: presets.from_keras(OPT_STATE), TypeError, r"`presets\.from_keras\(config\)` must be a dict, got LossScaledState\. Pass what `get_config"),
    "a state of ours for TensorFlow's": (lambda: presets.from_tensorflow(OPT_STATE), TypeError, r"`presets\.from_tensorflow\(config\)` must be a dict, got LossScaledState"),
    "a state of ours for Flax'": (lambda: presets.from_flax(OPT_STATE), TypeError, r"`presets\.from_flax` got a LossScaledState, which has no growth_factor.*Pass the scaler"),
    "a complex loss": (lambda: TX.update(W, OPT_STATE, W, value=1 + 1j), TypeError, r"value=.*one number, got a complex one, \(1\+1j\)\. .*loss\.real"),
    "a complex array as the loss": (lambda: jax.jit(TX.update)(W, OPT_STATE, W, value=jnp.array(1j)), TypeError, r"value=.*got a complex one.*loss\.real"),
    "an optimizer as a target": (lambda: jaxscale.from_state_dict(TX, jaxscale.to_state_dict(OPT_STATE)), TypeError, r"`from_state_dict\(target\)` must be a state, got the optimizer itself.*`tx\.init\(params\)`"),
    "an optimizer to save": (lambda: jaxscale.to_state_dict(TX), TypeError, r"`to_state_dict\(tree\)` must be a state, got the optimizer itself"),
    "a version that is an array": (lambda: jaxscale.from_state_dict(OPT_STATE, jaxscale.to_state_dict(OPT_STATE) | {"version": np.ones(3)}), ValueError, r"`from_state_dict\(state_dict\)` must have a version from 1 to 1, got array\(\[1\., 1\., 1\.\]\)"),
    "a version of text": (lambda: jaxscale.from_state_dict(OPT_STATE, jaxscale.to_state_dict(OPT_STATE) | {"version": "1"}), ValueError, r"must have a version from 1 to 1, got '1'"),
    "a version that is not a whole number": (lambda: jaxscale.from_state_dict(OPT_STATE, jaxscale.to_state_dict(OPT_STATE) | {"version": 1.5}), ValueError, r"must have a version from 1 to 1, got 1\.5"),
    "scale_backward of a loss in half precision": (lambda: jax.grad(jaxscale.scale_backward(lambda w: jnp.sum(w.astype(jnp.float16))))(W), TypeError, r"`scale_backward\(fun\)`: the output is float16.*Return it `\.astype\(jnp\.float32\)`\.(\n|$)"),
    "scale_backward of a model in half precision": (lambda: jax.grad(lambda w: jnp.sum(jaxscale.scale_backward(lambda w: w.astype(jnp.float16))(w)))(W), TypeError, r"Return it `\.astype\(jnp\.float32\)`, or let `fun` include the loss\.(\n|$)"),
    "on_skip is no function": (lambda: jaxscale.loss_scaled(SGD, on_skip=True), TypeError, r"`loss_scaled\(on_skip=\.\.\.\)` must be a function.*got True.*`on_skip=print`"),
    "on_skip where nothing is skipped": (lambda: jaxscale.loss_scaled(SGD, None, skip_nonfinite=False, on_skip=print), ValueError, r"skip_nonfinite=False\)` with `on_skip`"),
    "nnx: retries without a scale": (lambda: NNX(never_traced, retries=2)(*nnx_pair(SGD), W), ValueError, r"nnx\.train_step\(retries=2\).*loss scale.*loss_scaled\(tx\)"),
    "update: other keys": (lambda: MOMENTS.update({"w": W, "c": W}, MOMENTS.init(PAIR), PAIR), ValueError, r"`loss_scaled\(\.\.\.\)\.update\(updates=\.\.\.\)` must have the structure.*gradients: c; .*parameters: b\. Pass"),
    "update: a part": (lambda: MOMENTS.update({"w": W}, MOMENTS.init(PAIR), PAIR), ValueError, r"update\(updates=.*gradients: none; .*parameters: b\. .*None or zeros"),
    "update: another shape": (lambda: MOMENTS.update({"w": jnp.ones(3), "b": W}, MOMENTS.init(PAIR), PAIR), ValueError, r"update\(updates=\.\.\.\)`: the gradient at w has the shape \(3,\), and its parameter \(2,\)\. Pass"),
    "update: other keys in a window": (lambda: PAIRED.update({"w": W, "c": W}, PAIRED.init(PAIR), PAIR), ValueError, r"update\(updates=.*gradients: c; .*parameters: b\."),
    "update: a list for a tuple": (lambda: MOMENTS.update([W, W], MOMENTS.init((W, W)), (W, W)), ValueError, r"update\(updates=.*structure of the parameters, a tuple, got a list\. Pass"),
    "update: a list in place of a tuple further in": (lambda: MOMENTS.update({"w": [W]}, MOMENTS.init({"w": (W,)}), {"w": (W,)}), ValueError, r"update\(updates=.*That of the gradients is .*, and that of the parameters .*Pass"),
    "update: other keys, without parameters": (lambda: MOMENTS.update({"w": W, "c": W}, MOMENTS.init(PAIR)), ValueError, r"update\(state=\.\.\.\)` is the state .*of other parameters.*'c'.*got.*'b'.*Pass the gradients with respect to the parameters that `init` was given"),
    "update: another shape, without parameters": (lambda: MOMENTS.update(jnp.ones(3), MOMENTS.init(W)), ValueError, r"update\(state=\.\.\.\)`.*an array of shape \(3,\) at .*, got one of shape \(2,\)\. Pass the gradients"),
    "update: the state of other parameters": (lambda: MOMENTS.update(PAIR, MOMENTS.init({"w": W}), PAIR), ValueError, r"update\(state=\.\.\.\)` is the state of another optimizer or of other parameters.*'b'.*Pass the state that `init`"),
    "the state of other parameters": (lambda: jaxscale.apply_gradients(MOMENTS, PAIR, MOMENTS.init({"w": W}), PAIR), ValueError, r"`apply_gradients\(opt_state=\.\.\.\)` is the state of another optimizer or of other parameters"),
    "the state of other shapes, bare": (lambda: jaxscale.apply_gradients(BARE, jnp.ones(3), BARE.init(W), jnp.ones(3)), ValueError, r"`apply_gradients\(opt_state=\.\.\.\)`.*shape \(3,\) at .*mu, got one of shape \(2,\)"),
    "no gradients": (lambda: jaxscale.apply_gradients(MOMENTS, None, MOMENTS.init(W), W), ValueError, r"`apply_gradients\(grads=\.\.\.\)` must have the structure of the parameters, an array, got a NoneType"),
    "scale_backward: an axis under jit": (lambda: jax.jit(jax.grad(jaxscale.scale_backward(half_loss, axis_name="d")))(W), NameError, r"`scale_backward\(axis_name='d'\)`.*`shard_map` or `pmap`.*none of that name\. Under `jit` alone leave it out"),
    "scale_backward: an axis under jit, no retries": (lambda: jax.jit(jax.grad(jaxscale.scale_backward(half_loss, 8.0, retries=0, axis_name=("d",))))(W), NameError, r"`scale_backward\(axis_name='d'\)`.*leave it out"),
}  # fmt: skip


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*bare optimizer:UserWarning")
@cases("case", CASES)
def test_bad_input(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


OWN = POLICIES | {"tolerance": presets.fairseq(), "logmax": presets.openseq2seq_logmax()}


@cases("policy", OWN, fast=["dynamic", "adaptive"])
def test_a_policy_says_what_its_state_is(policy):
    policy, other, grads, true = OWN[policy], OWN["tolerance"].init(), {"w": W}, jnp.array(True)
    state, kind, name = policy.init(), type(policy).__name__, "LossScaleState"
    if not isinstance(state, jaxscale.LossScaleState) and kind != "NoOpLossScale":
        other, name = OWN["dynamic"].init(), type(state).__name__
    expected = rf"state=.*must be a `{name}`, got"
    taken_over = r"from_state_dict\(policy\.init\(\), jaxscale\.to_state_dict\(state\)\)"
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    alone = rf"`{kind}\.\w+\(state=.*has shape \(4,\): call it under `jax\.vmap`"
    with_scaling = r"got \w+\. Pass `opt_state\.scaling`, or call `tx\.update`"
    swapped = rf"`{kind}\.update\(state=.*, got dict\. The order .* is \(state, grads\)"
    for call, args, message in [
        (policy.update, (OPT_STATE, grads), rf"{kind}\.update.*{with_scaling}"),
        (policy.adjust, (flax_state(), true), rf"{kind}\.adjust.*{with_scaling}"),
        (policy.update, (grads, state), swapped),
        (policy.update, (grads, OPT_STATE), swapped),
        (policy.update, (other, grads), rf"{expected} {type(other).__name__}.*"),
        (policy.adjust, (None, true), rf"{expected} NoneType.*`init`.*{taken_over}"),
        (policy.update, (members, grads), alone),
        (jax.jit(policy.adjust), (members, true), alone),
    ]:
        with pytest.raises(ValueError if message == alone else TypeError, match=message):
            call(*args)
    several, _ = jax.vmap(policy.update, (0, None))(members, grads)
    assert jax.tree.structure(several) == jax.tree.structure(state)


def test_a_type_error_of_the_loss_itself_is_left_alone():
    def with_data(fun):
        return functools.wraps(fun)(lambda *args, **kwargs: fun(*args, W, **kwargs))

    # Called wrongly, but by the user.
    inner, raising = lambda w: two(w), with_data(lambda w, x: len(w, x))
    for loss_fn in (inner, jaxscale.autocast(inner), jax.jit(inner), raising):
        with pytest.raises(TypeError, match=r"^two\(\) missing 1|^len\(\) takes exactly one"):
            jaxscale.train_step(loss_fn, TX)(W, OPT_STATE)
    assert jaxscale.train_step(with_data(two), TX)(W, OPT_STATE)[1].step_applied


@pytest.mark.standard_promotion
def test_gradients_that_an_optimizer_takes_otherwise_are_left_to_it():
    # By example, with an axis in front; and of the fast parameters of two sets.
    private = jaxscale.loss_scaled(optax.contrib.differentially_private_aggregate(1.0, 0.0, 0))
    grads = {"w": jnp.ones((4, 2)), "b": jnp.ones((4, 2))}
    params, _ = jaxscale.apply_gradients(private, grads, private.init(PAIR), PAIR)
    assert params["w"].shape == (2,)
    lookahead = jaxscale.loss_scaled(optax.lookahead(SGD, sync_period=2, slow_step_size=0.5))
    both = optax.LookaheadParams.init_synced(PAIR)
    after, state = jaxscale.apply_gradients(lookahead, PAIR, lookahead.init(both), both)
    assert state.step_applied
    np.testing.assert_allclose(after.fast["w"], W - 0.1)

    # What fails inside of such an optimizer is not said to be the structure.
    def fail(*args):
        raise ValueError("no step today")

    failing = jaxscale.loss_scaled(optax.GradientTransformation(lambda params: (), fail))
    with pytest.raises(ValueError, match="no step today"):
        jaxscale.apply_gradients(failing, PAIR, failing.init(both), both)


def test_a_version_as_a_file_of_arrays_holds_it_is_read():
    saved = jaxscale.to_state_dict(OPT_STATE) | {"version": np.array(1)}
    assert jaxscale.from_state_dict(OPT_STATE, saved).total_steps == 0


PROGRAM = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((2, 2)))
BOTH = {
    "autocast": (jaxscale.autocast, "`jaxscale\\.full_precision`"),
    "scale_backward": (jaxscale.scale_backward, "outside of the function"),
}
# Operations in forms that JAX has not given them yet.
STRANGE = {
    "autocast: a product without dimensions": ("dot_general", {}, "KeyError: 'dimension_numbers'"),
    "autocast: a product of no dimensions": ("dot_general", {"dimension_numbers": None}, "TypeError: .*"),
    "autocast: a sum of one array": ("add", {}, "ValueError: .*"),
    "scale_backward: a product without dimensions": ("dot_general", {}, "KeyError: 'dimension_numbers'"),
    "scale_backward: a call that is placed nowhere": ("jit", {"jaxpr": PROGRAM, "in_shardings": None}, "TypeError: .*"),
    "scale_backward: a checkpoint without options": ("remat2", {"jaxpr": PROGRAM.jaxpr}, "UnknownFormError: remat2"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`autocast`:UserWarning")
@cases("case", STRANGE)
def test_an_operation_that_cannot_be_transformed_is_named_with_its_line(case):
    name, params, reason = STRANGE[case]
    transform = case.partition(":")[0]
    wrap, way_out = BOTH[transform]
    strange = forged(name, params, jnp.tanh)
    loss = wrap(lambda w: jnp.sum(jax.jit(lambda w: strange(w @ w))(w)))
    with pytest.raises(TypeError) as raised:
        jax.make_jaxpr(lambda w: jax.vjp(loss, w)[0])(jnp.ones((2, 2)))
    line = f"{strange.__code__.co_filename}:{strange.__code__.co_firstlineno} (in `<lambda>`)"
    expected = (
        rf"`{transform}\(fun\)` cannot transform the operation `{name}` at {re.escape(line)}, .*"
        rf"\({reason}\)\. .*{way_out}.*JAX {jax.__version__}\."
    )
    assert re.fullmatch(expected, str(raised.value)), str(raised.value)


@cases("transform", BOTH)
@pytest.mark.parametrize("error", [KeyError("key"), IndexError(), ValueError("no"), TypeError()])
def test_an_error_of_a_rule_of_the_user_is_left_alone(error, transform):
    def fail(*_):
        raise error

    product = jax.custom_jvp(lambda w: w @ w)
    product.defjvp(fail)
    loss = BOTH[transform][0](lambda w: jnp.sum(jax.jit(product)(w.astype(jnp.float16))) * 1.0)
    with pytest.raises(type(error)) as raised:
        jax.grad(lambda w: loss(w).astype(jnp.float32))(jnp.ones((2, 2)))
    assert raised.value is error
