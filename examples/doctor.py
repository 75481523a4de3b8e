"""A transformer that trains in float32 but not in float16, and how to find out why.

Sequences are padded, and a mask of -1e9 keeps attention off the padding, as in many models.
Each of these commands prints a summary and writes a report, `jaxscale-doctor.html`:

    python -m jaxscale doctor examples/doctor.py:broken
    python -m jaxscale doctor examples/doctor.py:fixed
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxscale

WIDTH, HEADS, BATCH_SIZE = 32, 4, 64
SHAPES = {"embed": (8, WIDTH), "position": (8, WIDTH), "qkv": (WIDTH, 3 * WIDTH)}
SHAPES |= {
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 64),
    "down": (64, WIDTH),
    "head": (WIDTH, 10),
}


def attention(params, x, is_token, mask_value):
    """Returns what each row of a pattern learns from the others."""
    q, k, v = jnp.split(
        (x @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    is_pair = is_token[:, None, :, None] & is_token[:, None, None, :]
    scores += jnp.where(is_pair, 0.0, mask_value).astype(scores.dtype)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["out"]


def loss_fn(params, batch, mask_value):
    """Returns the cross-entropy of patterns read row by row, in float16 up to the logits."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    x = batch["rows"].astype(jnp.float16) @ params["embed"] + params["position"]
    x = x + attention(params, x, batch["is_token"], mask_value)
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    tokens = jnp.where(batch["is_token"][..., None], x, 0).sum(axis=1)
    logits = (tokens @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"]
    ).mean()


def make_params():
    """Returns float32 parameters."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=n) / n[0] ** 0.5 for name, n in SHAPES.items()}
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params.items()}


def make_batch(seed=0):
    """Returns noisy patterns as sequences of rows, with up to three rows missing at the end."""
    patterns = np.random.default_rng(0).random((10, 8, 8))  # one for each label
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, BATCH_SIZE)
    is_token = np.arange(8) < rng.integers(5, 9, (BATCH_SIZE, 1))
    rows = (
        patterns[labels] + rng.normal(scale=0.3, size=(BATCH_SIZE, 8, 8))
    ) * is_token[..., None]
    return {"rows": rows.astype(np.float32), "is_token": is_token, "labels": labels}


def broken():
    """Returns a loss function, parameters and a batch for the doctor."""
    return functools.partial(loss_fn, mask_value=-1e9), make_params(), make_batch()


def fixed():
    """Returns the same as `broken`, but with a mask value that float16 can hold."""
    return functools.partial(loss_fn, mask_value=-1e4), make_params(), make_batch()


def main(num_steps: int = 300) -> float:
    """Trains both for a number of steps and returns the last loss of the fixed one."""
    tx, loss = jaxscale.loss_scaled(optax.adam(3e-3), track_leaves=True), jnp.inf
    for make in (broken, fixed):
        loss_fn, params, _ = make()
        train_step = jax.jit(jaxscale.train_step(loss_fn, tx))
        opt_state = tx.init(params)
        for step in range(num_steps):
            params, opt_state, loss = train_step(params, opt_state, make_batch(step))
        line = "{}: loss {:.3f}, skipped {total_notfinite} of {total_steps}, scale {loss_scale:.0f}"
        print(line.format(make.__name__, loss, **jaxscale.metrics(opt_state)))
        try:
            jaxscale.check(opt_state, tx=tx)
        except jaxscale.LossScaleStuckError as error:
            print(f"LossScaleStuckError: {error}")
    return float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)
