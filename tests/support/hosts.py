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
SMALL, LARGE = 2.0**-30, 2.0**-24
HIGH = 2.0**50  # a scale at which the large loss overflows, and the small ones do not
ROWS = 4  # of each device


def under(mesh, fun):
    """A function that is called where a mesh is in use."""

    def call(*args):
        with (
            jax.set_mesh(mesh)
            if hasattr(jax, "set_mesh")
            else jax.sharding.use_mesh(mesh)
        ):
            return fun(*args)

    return call


def local(dtype, w, x, factors, mean=lambda x: x):
    y = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
    y = jnp.tanh((y - mean(y.mean(0))[None]) @ w.astype(dtype))
    return jnp.mean(factors[:, None] * y.astype(jnp.float32) ** 2)


def called_in_calls(dtype, w, *args):
    """Calls in calls, which do not take the same."""
    inner = jax.jit(functools.partial(LOSSES["summed"], dtype))
    return jax.jit(lambda args, w: inner(w, *args))(args, w)


total, mean = (
    functools.partial(of, axis_name="d") for of in (jax.lax.psum, jax.lax.pmean)
)
gathered = functools.partial(jax.lax.all_gather, axis_name="d", axis=1, tiled=True)
LOSSES = {
    "local": local,
    "summed": lambda *args: total(local(*args)),
    "sharded": lambda dtype, w, *args: total(local(dtype, gathered(w), *args)),
    # Devices exchange numbers in the half-precision part, forward and backward.
    "normalized": lambda *args: local(*args, mean),
    "averaged": lambda *args: mean(local(*args, mean)),
    # Each device has parameters, and so a scale, of its own.
    "own": lambda dtype, w, *args: local(
        dtype, jnp.tile(w, (1, 8 // w.shape[1])), *args
    ),
    "called_in_calls": called_in_calls,
}


def inside(loss, mesh, wrap, dtype, **options):
    """The gradients that each device has."""
    grad = jax.grad(wrap(functools.partial(LOSSES[loss], dtype)))
    of_w = P(None, "d") if loss in ("sharded", "own") else P()
    options |= {"in_specs": (of_w, P("d"), P("d")), "out_specs": P("d")}
    return jax.jit(jax.shard_map(lambda *args: grad(*args)[None], mesh=mesh, **options))


def around(loss, mesh, wrap, dtype, **options):
    """The loss of all devices; another axis of the mesh may be XLA's."""
    options |= {
        "in_specs": (P(), P("d"), P("d")),
        "out_specs": P(),
        "axis_names": {"d"},
    }
    mapped = jax.shard_map(functools.partial(LOSSES[loss], dtype), mesh=mesh, **options)
    return jax.jit(jax.grad(wrap(mapped)))


def by_jit(mesh, wrap, dtype):
    return under(mesh, jax.jit(jax.grad(wrap(functools.partial(local, dtype)))))


def by_pmap(loss, mesh, wrap, dtype):
    grad = jax.grad(wrap(functools.partial(LOSSES[loss], dtype)))
    mapped = jax.pmap(grad, "d", in_axes=(None, 0, 0), devices=list(mesh.devices.flat))
    return lambda w, *args: mapped(
        w, *(x.reshape(mesh.size, -1, *x.shape[1:]) for x in args)
    )


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


def compared(form, mesh, scale, **options):
    """The error of the gradients of a form, beside those of float32, and a digest of them."""
    rng, rows = np.random.default_rng(0), ROWS * mesh.shape["d"]
    x = rng.standard_normal((rows, 8)).astype(np.float32)
    w = (rng.standard_normal((8, 8)) * 0.3).astype(np.float32)
    factors = np.where(np.arange(rows) < ROWS, LARGE, SMALL).astype(np.float32)
    args = [
        jax.make_array_from_callback(
            each.shape, NamedSharding(mesh, spec), each.__getitem__
        )
        for each, spec in ((w, P()), (x, P("d")), (factors, P("d")))
    ]
    wrap = functools.partial(jaxscale.scale_backward, scale=scale, **options)
    found, exact = (
        process_allgather(FORMS[form](mesh, *how)(*args), tiled=True)
        for how in ((wrap, jnp.float16), (lambda fun: fun, jnp.float32))
    )
    # a row for each device, which all processes have gathered
    if form == "inside averaged":
        assert (found == found[:1]).all()
    norm = functools.partial(np.linalg.norm, axis=(-2, -1))
    # by device, as one has much larger ones
    error = np.max(norm(found - exact) / norm(exact))
    return error, hashlib.sha256(found.tobytes()).hexdigest()[:8]


if __name__ == "__main__":
    if "--process-id" not in sys.argv:
        sys.exit(runpy.run_path(str(EXAMPLE))["launch"](int(sys.argv[1])))
    address, number, process = sys.argv[-5::2]
    jax.distributed.initialize(address, int(number), int(process))
    mesh = Mesh(np.array(jax.devices()), "d")
    for name, scale in itertools.product(ACROSS, ("auto", HIGH)):
        error, digest = compared(name, mesh, scale)
        print(f"form {name} at {scale}: error {error:.5f}, digest {digest}", flush=True)
