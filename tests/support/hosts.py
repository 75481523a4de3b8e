"""`scale_backward` over devices, in each form that a program may have.

`test_scale_backward` runs all forms in one process. `python tests/support/hosts.py 4` runs those in
`ACROSS` in four processes, which JAX joins on loopback: each prints what it got. The loss of one
device is so much larger than the others' that it alone overflows at their scale.
"""

import functools
import hashlib
import itertools
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscale

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "multi_host.py"
SMALL = 2.0**-30
LARGE = 2.0**-24
HIGH = 2.0**50  # a scale at which the large loss overflows, and the small ones do not
ROWS = 4  # of each device


def under(mesh, fun):
    """A function that is called where a mesh is in use."""

    def call(*args):
        with jax.set_mesh(mesh):
            return fun(*args)

    return call


def local(dtype, w, x, factors, mean=lambda x: x):
    half = w.astype(dtype)
    hidden = jnp.tanh(x.astype(dtype) @ half)
    centered = hidden - mean(hidden.mean(0))[None]
    outputs = jnp.tanh(centered @ half)
    return jnp.mean(factors[:, None] * outputs.astype(jnp.float32) ** 2)


def called_in_calls(dtype, w, *args):
    """Calls in calls, which do not take the same."""
    inner = jax.jit(functools.partial(LOSSES["summed"], dtype))
    return jax.jit(lambda args, w: inner(w, *args))(args, w)


def own(dtype, w, *args):
    """Each device has parameters, and so a scale, of its own."""
    return local(dtype, jnp.tile(w, (1, 8 // w.shape[1])), *args)


total = functools.partial(jax.lax.psum, axis_name="d")
mean = functools.partial(jax.lax.pmean, axis_name="d")
gathered = functools.partial(jax.lax.all_gather, axis_name="d", axis=1, tiled=True)
LOSSES = {
    "local": local,
    "summed": lambda *args: total(local(*args)),
    "sharded": lambda dtype, w, *args: total(local(dtype, gathered(w), *args)),
    # Devices exchange numbers in the half-precision part, forward and backward.
    "normalized": lambda *args: local(*args, mean),
    "averaged": lambda *args: mean(local(*args, mean)),
    "own": own,
    "called_in_calls": called_in_calls,
}


def inside(loss, mesh, wrap, dtype, **options):
    """The gradients that each device has."""
    grad = jax.grad(wrap(functools.partial(LOSSES[loss], dtype)))
    of_w = P()
    if loss in ("sharded", "own"):
        of_w = P(None, "d")
    mapped = jax.shard_map(
        lambda *args: grad(*args)[None],
        mesh=mesh,
        in_specs=(of_w, P("d"), P("d")),
        out_specs=P("d"),
        **options,
    )
    return jax.jit(mapped)


def around(loss, mesh, wrap, dtype, **options):
    """The loss of all devices; another axis of the mesh may be XLA's."""
    mapped = jax.shard_map(
        functools.partial(LOSSES[loss], dtype),
        mesh=mesh,
        in_specs=(P(), P("d"), P("d")),
        out_specs=P(),
        axis_names={"d"},
        **options,
    )
    return jax.jit(jax.grad(wrap(mapped)))


def by_jit(mesh, wrap, dtype):
    return under(mesh, jax.jit(jax.grad(wrap(functools.partial(local, dtype)))))


def by_pmap(loss, mesh, wrap, dtype):
    grad = jax.grad(wrap(functools.partial(LOSSES[loss], dtype)))
    mapped = jax.pmap(grad, "d", in_axes=(None, 0, 0), devices=list(mesh.devices.flat))

    def divide(x):
        return x.reshape(mesh.size, -1, *x.shape[1:])

    return lambda w, x, factors: mapped(w, divide(x), divide(factors))


FORMS = {"by_jit": by_jit, "by_jit, explicit": by_jit}
for make, names in {
    inside: ("local", "summed", "sharded", "normalized", "averaged", "own"),
    around: ("summed", "averaged", "called_in_calls"),
    by_pmap: ("local", "summed", "normalized"),
}.items():
    for loss in names:
        FORMS[name := f"{make.__name__} {loss}"] = functools.partial(make, loss)
        if make is not by_pmap:
            FORMS[f"{name}, unchecked"] = functools.partial(make, loss, check_vma=False)
# Of these, what the devices of several processes do.
ACROSS = ["by_jit", "around averaged", "inside averaged", "inside averaged, unchecked"]


def mesh_of(form):
    devices = np.array(jax.devices())
    if "around" in form:  # one axis is XLA's
        return Mesh(devices[:4].reshape(2, 2), ("auto", "d"))
    kind = AxisType.Explicit if "explicit" in form else AxisType.Auto
    return Mesh(devices[: 8 if "jit" in form else 2], "d", axis_types=(kind,))


def compared(form, mesh, wrap, dtype=jnp.float16):
    """The error of the gradients of a form, beside those of float32, and a digest of them."""
    rng = np.random.default_rng(0)
    rows = ROWS * mesh.shape["d"]
    numbers = rng.standard_normal((rows, 8))
    x = numbers.astype(np.float32)
    weights = rng.standard_normal((8, 8)) * 0.3
    w = weights.astype(np.float32)
    is_of_first_device = np.arange(rows) < ROWS
    sizes = np.where(is_of_first_device, LARGE, SMALL)
    factors = sizes.astype(np.float32)

    def place(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    args = place(w, P()), place(x, P("d")), place(factors, P("d"))

    def gradients(wrap, dtype):
        grad = FORMS[form](mesh, wrap, dtype)
        # a row for each device, which all processes have gathered
        return process_allgather(grad(*args), tiled=True)

    scaled = gradients(wrap, dtype)
    exact = gradients(lambda fun: fun, jnp.float32)
    if form == "inside averaged":
        assert (scaled == scaled[:1]).all()
    norm = functools.partial(np.linalg.norm, axis=(-2, -1))
    # by device, as one has much larger ones
    errors = norm(scaled - exact) / norm(exact)
    error = np.max(errors)
    digest = hashlib.sha256(scaled.tobytes())
    return error, digest.hexdigest()[:8]


if __name__ == "__main__":
    if "--process-id" not in sys.argv:
        sys.exit(runpy.run_path(str(EXAMPLE))["launch"](int(sys.argv[1])))
    address, number, process = sys.argv[-5::2]
    jax.distributed.initialize(address, int(number), int(process))
    mesh = Mesh(np.array(jax.devices()), "d")
    for name, scale in itertools.product(ACROSS, ("auto", HIGH)):
        wrap = functools.partial(jaxscale.scale_backward, scale=scale)
        error, digest = compared(name, mesh, wrap)
        print(f"form {name} at {scale}: error {error:.5f}, digest {digest}", flush=True)
