"""How far a reader walks to follow one default step: what of the package is entered while tracing.

`python tests/support/walk.py` prints how many functions in how many files, and their calls; with
`--list` it also names each function, and with `--json` it prints the counts alone.
"""

import collections
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import jaxscale

ROOT = pathlib.Path(jaxscale.__file__).parent
# These are read where they are written.
INLINE = {"<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"}


def loss_fn(params, x):
    y = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def count_calls(fun, *args):
    """Counts the calls of each function of the package, by file and name, as `fun` is traced."""
    calls = collections.Counter()

    def see(frame, event, _):
        code = frame.f_code
        file = pathlib.Path(code.co_filename)
        is_ours = event == "call" and file.is_relative_to(ROOT)
        if is_ours and code.co_name not in INLINE:
            calls[str(file.relative_to(ROOT)), code.co_qualname] += 1

    jax.clear_caches()  # what was traced before would not be entered
    sys.setprofile(see)
    try:
        jax.make_jaxpr(fun)(*args)
    finally:
        sys.setprofile(None)
    return calls


def walk():
    """The calls of a `train_step` and of an `update`."""
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    x = jnp.ones((2, 4))
    tx = jaxscale.loss_scaled(optax.adamw(1e-3))
    opt_state = tx.init(params)
    train_step = jaxscale.train_step(loss_fn, tx)
    jax.make_jaxpr(train_step)(params, opt_state, x)  # imports what is loaded late
    return {
        "train_step": count_calls(train_step, params, opt_state, x),
        "update": count_calls(tx.update, params, opt_state, params),
    }


def main():
    counts = {}
    for name, calls in walk().items():
        files = sorted({file for file, _ in calls})
        counts[name] = [len(calls), len(files), calls.total()]
        if "--json" in sys.argv:
            continue
        print(
            f"{name}: {len(calls)} functions, {len(files)} files, {calls.total()} calls"
        )
        for file in files if "--list" in sys.argv else []:
            of_file = [
                f"{fun} x{n}" for (place, fun), n in calls.items() if place == file
            ]
            print(f"  {file}: {', '.join(of_file)}")
    if "--json" in sys.argv:
        print(json.dumps(counts))


if __name__ == "__main__":
    main()
