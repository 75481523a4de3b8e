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

WIDTH = 32
HEADS = 4
BATCH_SIZE = 64
SHAPES = {
    "embed": (8, WIDTH),
    "position": (8, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 64),
    "down": (64, WIDTH),
    "head": (WIDTH, 10),
}


def attention(params, x, is_token, mask_value):
    """Returns what each row of a pattern learns from the others."""
    batch_size, length, _ = x.shape
    qkv = (x @ params["qkv"]).reshape(batch_size, length, HEADS, -1)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    is_pair = is_token[:, None, :, None] & is_token[:, None, None, :]
    scores += jnp.where(is_pair, 0.0, mask_value).astype(scores.dtype)
    weights = jax.nn.softmax(scores)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return attended.reshape(x.shape) @ params["out"]


def loss_fn(params, batch, mask_value):
    """Returns the cross-entropy of patterns read row by row, in float16 up to the logits."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    rows = batch["rows"].astype(jnp.float16)
    is_token = batch["is_token"]
    x = rows @ params["embed"] + params["position"]
    x = x + attention(params, x, is_token, mask_value)
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    pooled = jnp.where(is_token[..., None], x, 0).sum(axis=1)
    logits = (pooled @ params["head"]).astype(jnp.float32)
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_params():
    """Returns float32 parameters."""
    rng = np.random.default_rng(0)
    params = {}
    for name, shape in SHAPES.items():
        leaf = rng.normal(size=shape) / shape[0] ** 0.5
        params[name] = jnp.asarray(leaf, jnp.float32)
    return params


def make_batch(seed=0):
    """Returns noisy patterns as sequences of rows, with up to three rows missing at the end."""
    patterns = np.random.default_rng(0).random((10, 8, 8))  # one for each label
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, BATCH_SIZE)
    is_token = np.arange(8) < rng.integers(5, 9, (BATCH_SIZE, 1))
    noise = rng.normal(scale=0.3, size=(BATCH_SIZE, 8, 8))
    rows = (patterns[labels] + noise) * is_token[..., None]
    return {"rows": rows.astype(np.float32), "is_token": is_token, "labels": labels}


def broken():
    """Returns a loss function, parameters and a batch for the doctor."""
    return functools.partial(loss_fn, mask_value=-1e9), make_params(), make_batch()


def fixed():
    """Returns the same as `broken`, but with a mask value that float16 can hold."""
    return functools.partial(loss_fn, mask_value=-1e4), make_params(), make_batch()


def main(num_steps: int = 300) -> float:
    """Trains both for a number of steps and returns the last loss of the fixed one."""
    tx = jaxscale.loss_scaled(optax.adam(3e-3), track_leaves=True)
    loss = jnp.inf
    for make in (broken, fixed):
        loss_fn, params, _ = make()
        train_step = jax.jit(jaxscale.train_step(loss_fn, tx))
        opt_state = tx.init(params)
        for step in range(num_steps):
            params, opt_state, loss = train_step(params, opt_state, make_batch(step))
        metrics = jaxscale.metrics(opt_state)
        skipped = f"skipped {metrics['total_notfinite']} of {metrics['total_steps']}"
        print(
            f"{make.__name__}: loss {loss:.3f}, {skipped}, scale {metrics['loss_scale']:.0f}"
        )
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
