"""Processes that JAX joins on loopback: each prints what `scale_backward` gave it, in each form.

    python tests/support/hosts.py 4

The loss of one process is so much larger than the others' that it alone overflows at their scale.
"""

import functools
import hashlib
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxscale

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "multi_host.py"
P = PartitionSpec
SMALL, LARGE = 2.0**-30, 2.0**-24
HIGH = 2.0**50  # a scale at which the large loss overflows, and the small ones do not
ROWS = 4  # of each process
rng = np.random.default_rng(0)
W = (rng.standard_normal((8, 8)) * 0.3).astype(np.float32)


def loss_fn(dtype, mean, w, x, factors):
    """A mean over the rows, which exchange numbers in half precision by a mean of all devices."""
    y = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
    y = jnp.tanh((y - mean(y.mean(0))) @ w.astype(dtype))
    return jnp.mean(factors[:, None] * y.astype(jnp.float32) ** 2)


def forms(mesh, scale):
    """The gradient by `w` of the mean of all devices: `shard_map` around the loss or outside."""
    half_fn, specs = functools.partial(loss_fn, jnp.float16), (P(), P("d"), P("d"))
    of_all = functools.partial(jax.lax.pmean, axis_name="d")
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())

    def mean(*args):
        return of_all(half_fn(of_all, *args))

    def grad(fun, *args):
        return jax.grad(jaxscale.scale_backward(fun, scale))(*args)

    return {
        "jit": functools.partial(grad, functools.partial(half_fn, lambda x: x)),
        "around": functools.partial(grad, mapped(mean)),
        "inside": mapped(functools.partial(grad, mean)),
        "unchecked": mapped(lambda *args: of_all(grad(mean, *args)), check_vma=False),
    }


def main(address, number, process):
    jax.distributed.initialize(address, number, process)
    mesh = Mesh(np.array(jax.devices()), "d")
    x = rng.standard_normal((number * ROWS, 8)).astype(np.float32)
    factors = np.full(len(x), SMALL, np.float32)
    factors[:ROWS] = LARGE
    exact = jax.grad(functools.partial(loss_fn, jnp.float32, lambda x: x))(W, x, factors)
    split = NamedSharding(mesh, P("d"))
    given = [
        jax.make_array_from_process_local_data(NamedSharding(mesh, P()), W),
        *(
            jax.make_array_from_process_local_data(split, np.split(whole, number)[process])
            for whole in (x, factors)
        ),
    ]
    for scale_name, scale in {"auto": "auto", "high": HIGH}.items():
        for name, form in forms(mesh, scale).items():
            found = np.asarray(jax.jit(form, out_shardings=NamedSharding(mesh, P()))(*given))
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            digest = hashlib.sha256(found.tobytes()).hexdigest()[:8]
            print(f"form {name} at {scale_name}: error {error:.5f}, digest {digest}", flush=True)


if __name__ == "__main__":
    if "--process-id" in sys.argv:
        address, number, process = sys.argv[-5::2]
        main(address, int(number), int(process))
    else:
        sys.exit(runpy.run_path(str(EXAMPLE))["launch"](int(sys.argv[1])))
