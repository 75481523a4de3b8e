"""One way to float16 for each method: ``method(task) -> loss_fn(params, batch)``.

Parameters, gradients and losses are float32 for all of them. Each is what its own documentation
has for a model that is written for float32.
"""

import jax
import jax.numpy as jnp
import models

import jaxscale


def float32(task, **layers):
    """The model as it is written."""
    forward = task.forward(**layers)

    def loss_fn(params, batch):
        return models.cross_entropy(forward(params, batch["inputs"]), batch["targets"])

    return loss_fn


def autocast(task):
    return jaxscale.autocast(float32(task))


def jaxamp(task):
    """jaxamp: "Replace `loss_fn(model, minibatch)` with `jaxamp.amp(loss_fn)(...)`"."""
    import jaxamp

    return jaxamp.amp(float32(task))


def jmp(task):
    """jmp: a policy casts parameters and inputs before the model, and what it returns after it."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    forward = task.forward()

    def loss_fn(params, batch):
        params, inputs = policy.cast_to_compute((params, batch["inputs"]))
        logits = policy.cast_to_output(forward(params, inputs))
        return models.cross_entropy(logits, batch["targets"])

    return loss_fn


def mpx(task):
    """MPX: the casts of its `filter_value_and_grad`, and critical operations in full precision.

    Those are to be forced by hand: softmax, for which attention is rewritten as in its README, and
    the loss. Flax' norms are in float32 inside by themselves.
    """
    import mpx

    half = mpx.half_precision_datatype()
    softmax = mpx.force_full_precision(jax.nn.softmax, half)
    forward = task.forward(attention={"attention_fn": models.attention_with(softmax)})
    loss = mpx.force_full_precision(models.cross_entropy, jnp.float32)

    def loss_fn(params, batch):
        params, batch = mpx.cast_to_half_precision((params, batch))
        return loss(forward(params, batch["inputs"]), batch["targets"])

    return loss_fn


def flax_dtype(task, **layers):
    """Flax: `dtype=jnp.float16` in every layer, and a loss in float32."""
    forward = task.forward(dtype=jnp.float16, **layers)

    def loss_fn(params, batch):
        logits = forward(params, batch["inputs"]).astype(jnp.float32)
        return models.cross_entropy(logits, batch["targets"])

    return loss_fn


def flax_dtype_and_softmax(task):
    """The same, and `force_fp32_for_softmax=True` in every attention."""
    return flax_dtype(task, attention={"force_fp32_for_softmax": True})


FLOAT32 = "float32"
FLOAT32_SOFTMAX = "Flax dtype, float32 softmax"
METHODS = {
    FLOAT32: float32,
    "jaxscale.autocast": autocast,
    "jaxamp": jaxamp,
    "jmp": jmp,
    "MPX": mpx,
    "Flax dtype": flax_dtype,
    FLOAT32_SOFTMAX: flax_dtype_and_softmax,
}


def apart(names, kind):
    """Returns those names whose methods differ for this model, by its attention and its loop."""
    needed = {FLOAT32_SOFTMAX: "transformer"}
    return [name for name in names if needed.get(name, "") in kind]
