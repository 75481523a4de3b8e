"""Classes that look at their children stand wherever trees do, as those of gpjax and brax do.

Their constructors refuse what is not an array of the shape that they know: `None`, numbers, flags.
"""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics, scale_backward
from jaxscale._doctor import cli

HALF = jnp.float16


class Checked:
    """Two arrays of known shapes."""

    def __init__(self, w, b):
        for leaf, shape in ((w, (3, 4)), (b, (4,))):
            if not isinstance(leaf, jax.Array | np.ndarray) or leaf.shape != shape:
                raise TypeError(f"not an array of shape {shape}: {leaf}")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"not floating: {leaf.dtype}")
        self.w, self.b = w, b


def flatten_with_keys(node):
    return tuple(
        (jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in "wb"
    ), None


def register(cls, with_keys=flatten_with_keys):
    jax.tree_util.register_pytree_with_keys(
        cls,
        with_keys,
        lambda _, children: cls(*children),
        lambda node: ((node.w, node.b), None),
    )
    return cls


register(Checked)


@register
class Batch(Checked):
    pass


def without_names(node):
    raise RuntimeError("this class does not name its children")


class Unnamed(Checked):
    pass


register(Unnamed, without_names)

PARAMS = Checked(jnp.full((3, 4), 0.5), jnp.zeros(4))
BATCH = Batch(jnp.ones((3, 4)), jnp.ones(4))


def model(p, x):
    product = (x.w.astype(HALF) @ p.w.T.astype(HALF)).astype(jnp.float32)
    return Batch(product @ x.w, p.b * x.b)


def loss(p, x):
    y = model(p, x)
    return jnp.mean(y.w) + jnp.mean(y.b)


def loss_of_output(wrap):
    return lambda p, x: jnp.mean(wrap(model)(p, x).w)


def both(p, state, x):
    return loss(p, x), (Checked(state.w + 1, state.b), model(p, x))


def trained(tx, compiled=True, fun=loss, state=(), **options):
    """Two steps, what is said of them, and the optimizer's state saved and restored."""
    step = jaxscale.train_step(fun, tx, has_state=bool(state), **options)
    step = jax.jit(step) if compiled else step
    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        params, opt_state, *rest = step(params, opt_state, *state, BATCH)
        state = rest[:1] if state else ()
    assert isinstance(params, Checked)
    assert not any(map(jnp.array_equal, *map(jax.tree.leaves, (params, PARAMS))))
    jaxscale.check((params, opt_state))
    jaxscale.metrics(opt_state)
    restored = jaxscale.from_state_dict(
        tx.init(PARAMS), jaxscale.to_state_dict(opt_state)
    )
    assert_same_bits(*map(jax.tree.leaves, (restored, opt_state)))


def updated(tx, compiled):
    grads = jax.grad(loss)(PARAMS, BATCH)

    def run(opt_state):
        updates, opt_state = tx.update(grads, opt_state, PARAMS)
        params = optax.apply_updates(PARAMS, updates)
        return jaxscale.apply_gradients(
            tx, grads, opt_state, params, keep=(BATCH, BATCH)
        )

    params, _, kept = (jax.jit(run) if compiled else run)(tx.init(PARAMS))
    assert isinstance(params, Checked)
    assert isinstance(kept, Batch)


def counted(grads):
    rows = diagnostics.table(diagnostics.leaf_counts({"layer": grads})).rows
    assert {row.path for row in rows} == {"layer/w", "layer/b"}
    histograms = diagnostics.leaf_histograms({"layer": grads})
    assert "layer/w" in str(diagnostics.underflow(histograms))


@register
class Counting(Checked):
    """Has a counter, which has no gradient, in the place of a bias."""

    def __init__(self, w, b):
        if not (hasattr(b, "dtype") and b.dtype == jnp.int32):
            raise TypeError(f"not a counter: {b}")
        super().__init__(w, np.zeros(4, np.float32))
        self.b = b


def checked():
    return loss, PARAMS, BATCH


def counting():
    return (
        lambda p, x: loss(Checked(p.w, x.b), x),
        Counting(PARAMS.w, jnp.int32(3)),
        BATCH,
    )


def examined(name):
    """What the doctor says of a loss, which names its leaves and has tried `scale_backward`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        status = cli.main(["doctor", f"{__name__}:{name}", "--json"])
    results = json.loads(said.getvalue())
    assert status == 0
    compared = {leaf["path"] for leaf in results["comparison"]["leaves"]}
    assert compared == ({"w", "b"} if name == "checked" else {"w"})
    assert results["scale_backward_raised"] == ""


def scaled(**options):
    return jaxscale.loss_scaled(optax.adam(0.1), **options)


def in_both_orders():
    for fun in (
        scale_backward(jaxscale.autocast(loss)),
        jaxscale.autocast(scale_backward(loss)),
    ):
        jax.grad(fun)(PARAMS, BATCH)


def selected():
    unscaled = jaxscale.unscale(SCALING, jaxscale.scale(SCALING, PARAMS))
    return jaxscale.tree_where(jaxscale.all_finite(PARAMS), PARAMS, unscaled)


ALL_OPTIONS = {"track_leaves": True, "check_updates": True, "max_norm": 1.0}
STATE = {"fun": both, "has_aux": True, "state": (PARAMS,)}
SCALING = jaxscale.DynamicLossScale().init()
ENTRIES = {
    "doctor": lambda: examined("checked"),
    "doctor, a counter beside": lambda: examined("counting"),
    "scale_backward": lambda: jax.grad(scale_backward(loss))(PARAMS, BATCH),
    "scale_backward, output": lambda: jax.grad(loss_of_output(scale_backward))(
        PARAMS, BATCH
    ),
    "both orders": in_both_orders,
    "autocast, output": lambda: jax.grad(loss_of_output(jaxscale.autocast))(
        PARAMS, BATCH
    ),
    "value_and_grad": lambda: jaxscale.value_and_grad(loss, SCALING)(PARAMS, BATCH),
    "selection": selected,
    "step": lambda: trained(scaled()),
    "step, eager": lambda: trained(scaled(), compiled=False),
    "step, state and aux": lambda: trained(scaled(), **STATE),
    "step, retries": lambda: trained(scaled(), retries=1, **STATE),
    "step, retries, eager": lambda: trained(
        scaled(), compiled=False, retries=1, **STATE
    ),
    "step, on_grads": lambda: trained(
        scaled(), on_grads=lambda g: Checked(2 * g.w, g.b)
    ),
    "step, after": lambda: trained(
        scaled(), after=lambda p, s: Checked(s.w, p.b), **STATE
    ),
    "step, all options": lambda: trained(
        scaled(spikes=jaxscale.SpikeRule(), **ALL_OPTIONS)
    ),
    "step, adaptive": lambda: trained(
        jaxscale.loss_scaled(optax.adam(0.1), "adaptive")
    ),
    "step, multi_steps": lambda: trained(jaxscale.multi_steps(optax.adam(0.1), 2)),
    "step, skip_nonfinite": lambda: trained(jaxscale.skip_nonfinite(optax.adam(0.1))),
    "update": lambda: updated(scaled(track_leaves=True), True),
    "update, eager": lambda: updated(scaled(), False),
    "update, multi_steps": lambda: updated(
        jaxscale.multi_steps(optax.adam(0.1), 1), True
    ),
    "trace": lambda: diagnostics.trace(loss, SCALING)(PARAMS, BATCH),
    "counts": lambda: counted(jax.grad(loss)(PARAMS, BATCH)),
}
FAST = [
    "both orders",
    "scale_backward, output",
    "step, all options",
    "step, retries, eager",
]


@pytest.mark.standard_promotion  # of Optax's Adam
@cases(
    "name",
    ENTRIES,
    fast=[*FAST, "step, state and aux", "update", "counts", "selection"],
)
def test_a_class_that_looks_at_its_children_works(name):
    ENTRIES[name]()


def test_names_for_messages_stop_no_run():
    def grad(cls, w):
        return jax.grad(lambda w: scale_backward(loss)(cls(w, PARAMS.b), BATCH))(w)

    assert_same_bits([grad(Unnamed, PARAMS.w)], [grad(Checked, PARAMS.w)])
    with pytest.raises(TypeError, match=r"input args, leaf 0, which is float16"):
        grad(Unnamed, PARAMS.w.astype(HALF))
