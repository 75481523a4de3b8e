"""What each library does with bad steps: a table whose cells are what these programs saw.

    python tests/benchmarks/behaviors.py [--json FILE]

Each method is the step of :mod:`methods`, in the way of its own documentation, with AdamW. A row is
a small run, and a cell says in words what was left of the parameters, the optimizer and the scale.
Methods whose package is not installed are left out.
"""

import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import report
from jax.sharding import Mesh, PartitionSpec

import jaxscale

OURS = "jaxscale.train_step"
NAMES = {
    methods.BARE: "Optax",
    "optax.apply_if_finite": "`optax.apply_if_finite`",
    "jmp": "jmp",
    "Flax DynamicScale": "Flax `DynamicScale`",
    "MPX": "MPX",
    OURS: "jaxscale",
}
ROW = jnp.array([0.02, -0.02, 0.01, 0.04])  # so that no scale of 2**15 overflows
BAD = jnp.full(4, jnp.nan)
OVERFLOWS = 60
AXIS = "devices"


def loss_fn(params, x, factor):
    """Has gradients of about 1, times a factor that the forward pass does not see."""
    y = jnp.sum(params["w"] * x) ** 2
    return jax.lax.stop_gradient(y) + amplify(y, factor)


@jax.custom_vjp
def amplify(y, factor):
    return 0 * y


def _amplify_bwd(factor, cotangent):
    scaled = cotangent.astype(jnp.float16) * factor
    return scaled.astype(cotangent.dtype), None


amplify.defvjp(lambda y, factor: (0 * y, factor), _amplify_bwd)


def run(method, carry, batches):
    """Returns what a method carries after some batches, each a row and a factor of gradients."""
    step = jax.jit(method.step)
    for x, factor in batches:
        carry, _ = step(carry, x, jnp.float16(factor))
    return carry


def start(method, dtype=jnp.float32):
    return method.init({"w": jnp.ones(4, dtype)})


def words_of(method, before, after):
    """Returns what became of parameters and optimizer."""
    if not all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(method.params(after))
    ):
        return "the parameters are NaN"
    if is_same(method.params(before), method.params(after)):
        if is_same(method.inner(before), method.inner(after)):
            return "nothing changes"
        return "only the optimizer's state changes"
    return "the parameters change"


def is_same(old, new):
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def one_bad_batch(name, method):
    before = run(method, start(method), [(ROW, 1)])
    return words_of(method, before, run(method, before, [(BAD, 1)]))


def many_bad_batches(name, method):
    before = run(method, start(method), [(ROW, 1)])
    after = run(method, before, [(BAD, 1)] * OVERFLOWS)
    words = words_of(method, before, after)
    try:
        jaxscale.check(after[1])
    except jaxscale.LossScaleStuckError:
        return f"{words}; `check` is an error"
    except ValueError:  # no state of ours
        return words
    return words


def scale_at_its_floor(name, method):
    """Gradients that overflow at any scale, with a finite loss; then good ones."""
    low = run(method, start(method), [(ROW, jnp.inf)] * OVERFLOWS * 3)
    after = run(method, low, [(ROW, 1)] * 3)
    moved = np.max(np.abs(method.params(after)["w"] - method.params(low)["w"]))
    if np.isnan(moved):
        return "the parameters are NaN"
    number = float(method.scale(low))
    scale = (
        "the scale stays at its floor" if number >= 1 else f"the scale is {number:.2g}"
    )
    if moved > methods.LEARNING_RATE:  # three steps of Adam move by three times as much
        return f"{scale}, and training goes on"
    return f"{scale}, and nothing is learned any more"


def half_precision_parameter(name, method):
    before = start(method, jnp.float16)
    try:
        return words_of(method, before, run(method, before, [(jnp.zeros(4), 1)]))
    except TypeError:
        return "the step is an error"


def statistics(name, method):
    """A mean of the batch, which the loop carries beside the parameters."""
    if name != OURS:
        # There is no place for it, so it is what the forward pass made of the batch.
        return "they are NaN, unless your loop keeps them"
    tx = jaxscale.loss_scaled(methods.optimizer(False))

    def with_mean(params, mean, x):
        return loss_fn(params, x, jnp.float16(1)), jnp.mean(x)

    step = jax.jit(jaxscale.train_step(with_mean, tx, has_state=True))
    params = {"w": jnp.ones(4)}
    _, _, mean, _ = step(params, tx.init(params), jnp.float32(0), BAD)
    return "they are NaN" if np.isnan(mean) else "they are kept"


def devices_that_differ(name, method):
    """Each device has parameters of its own, as with experts, and one of them overflows."""
    mesh = Mesh(jax.devices(), (AXIS,))
    if name == OURS:
        tx = jaxscale.loss_scaled(methods.optimizer(False), axis_name=AXIS)
        step = jaxscale.train_step(loss_fn, tx)

        def one_step(params, x, factor):
            params, _, _ = step(params, tx.init(params), x, factor[0])
            return params
    else:

        def one_step(params, x, factor):
            carry, _ = method.step(method.init(params), x, factor[0])
            return method.params(carry)

    split = PartitionSpec(AXIS)
    count = jax.device_count()
    factors = jnp.ones(count, jnp.float16).at[0].set(jnp.inf)
    params = {"w": jnp.ones(4 * count)}
    stepped = jax.jit(
        jax.shard_map(
            one_step,
            mesh=mesh,
            in_specs=(split, PartitionSpec(), split),
            out_specs=split,
            check_vma=False,
        )
    )(params, ROW, factors)
    moved = np.any(np.reshape(stepped["w"] != params["w"], (count, 4)), axis=1)
    if not moved.any():
        return "all devices skip"
    if np.isnan(stepped["w"]).any():
        return "its parameters are NaN"
    return "it skips, and the others step"


RUNS = {
    "a batch with a NaN": one_bad_batch,
    f"{OVERFLOWS} such batches in a row": many_bad_batches,
    "batch statistics of such a batch": statistics,
    f"{OVERFLOWS * 3} overflows with a finite loss, then good batches": scale_at_its_floor,
    "a float16 parameter whose gradient is 0": half_precision_parameter,
    "experts on several devices, one of which overflows": devices_that_differ,
}


def find_methods():
    """Returns the methods whose packages are there, by name."""
    found = {}
    for name in NAMES:
        try:
            found[name] = methods.make(name, False, loss_fn)
        except ImportError:
            continue
    # With the number of errors in a row that its documentation takes.
    limited = optax.apply_if_finite(methods.optimizer(False), 5)
    setting = methods.Setting(False, 2000, loss_fn, jax.value_and_grad)
    found["optax.apply_if_finite"] = methods.without_scale(limited, setting)
    return found


def measure():
    """Returns the cells, by row and method."""
    found = find_methods()
    cells = {}
    for row, function in RUNS.items():
        cells[row] = {name: function(name, method) for name, method in found.items()}
    return cells


def markdown(cells):
    names = list(next(iter(cells.values())))
    headings = ["", *(NAMES[name] for name in names)]
    lines = [
        [row, *(by_name[name] for name in names)] for row, by_name in cells.items()
    ]
    return report.markdown(headings, lines)


def main():
    options = report.parser(__doc__).parse_args()
    console, result = report.begin()
    result["rows"] = measure()
    report.write(options.json, result)
    console.print(markdown(result["rows"]))


if __name__ == "__main__":
    main()
