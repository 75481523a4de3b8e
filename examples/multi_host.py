"""Float16 training on many hosts: every host runs this same program.

On a cluster that JAX knows (Slurm, Kubernetes, Open MPI, Cloud TPU) the processes find each other:
`srun python multi_host.py --checkpoints /shared/run`. On one computer, `--local 2` starts two.
Batches and weights are split over all devices, and the training step needs no extra code for that.
If one device sees a NaN, all devices skip the step. If the gradients of one device overflow, all
repeat the backward pass at a lower scale. A restarted run continues from the last checkpoint.
"""

import argparse
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jaxscale

LAYER_SIZES = [64, 256, 10]
BATCH_PER_DEVICE = 32
NUM_TEST = 360
LOG_EVERY = 10

# The scale starts high and grows early, so that even a short run meets overflows.
loss_scale = jaxscale.DynamicLossScale(init_scale=2.0**20, growth_interval=10)
tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)


def init(key):
    """Returns the training state: float32 weights and biases, and the optimizer state."""
    init_weight = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(LAYER_SIZES) - 1)
    params = []
    for layer_key, (inputs, outputs) in zip(keys, pairwise(LAYER_SIZES), strict=True):
        weight = init_weight(layer_key, (inputs, outputs))
        params.append((weight, jnp.zeros(outputs)))
    return params, tx.init(params)


def predict(params, images):
    """Returns float32 logits, computed in float16."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    activations = images.astype(jnp.float16)
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    weight, bias = params[-1]
    return (activations @ weight + bias).astype(jnp.float32)


def loss_fn(params, images, labels):
    """Returns the mean cross-entropy over the batches of all hosts, in float32."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def local_batch(images, labels, step):
    """Returns the rows of this process: the same ones if the step is run again."""
    rng = np.random.default_rng([step, jax.process_index()])
    rows = rng.integers(len(images), size=BATCH_PER_DEVICE * jax.local_device_count())
    return images[rows], labels[rows]


def make_avals(whole, split):
    """Returns the shapes, dtypes and shardings of the training state.

    Arrays are split by rows where the devices share them evenly. Others are whole on each device.
    """

    def place(leaf):
        is_even = leaf.ndim > 0 and leaf.shape[0] % split.mesh.size == 0
        sharding = split if is_even else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init, jax.random.key(0)))


def open_checkpoints(path):
    """Returns what saves to a folder, or `None` without one."""
    if not path:
        return None
    if "://" not in path:
        path = os.path.abspath(path)
    return ocp.CheckpointManager(path)


def describe(old, new):
    """Says what happened between two looks at the metrics."""
    repeated = new["total_retries"] - old["total_retries"]
    skipped = new["total_notfinite"] - old["total_notfinite"]
    scales = f"scale {old['loss_scale']:.0f} -> {new['loss_scale']:.0f}"
    return f"repeated {repeated}, skipped {skipped}, {scales}"


def digest(state):
    """Returns a few letters that are the same for equal states."""
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:8]


def main(num_steps=100, checkpoints=None, save_every=20, nan=None, kill=None) -> float:
    """Trains up to a step and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    process = jax.process_index()

    mesh = Mesh(jax.devices(), "data")  # all devices of all processes
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    avals = make_avals(whole, split)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, avals)
    train_step = jax.jit(
        jaxscale.train_step(loss_fn, tx, retries=10),
        out_shardings=(*shardings, whole),
        donate_argnums=(0, 1),
    )

    manager = open_checkpoints(checkpoints)
    last_step = None
    if manager:
        last_step = manager.latest_step()
    if manager and last_step:
        state = manager.restore(last_step, args=ocp.args.StandardRestore(avals))
    else:
        last_step = 0
        state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    if process == 0:
        hosts = f"{jax.process_count()} processes, {mesh.size} devices"
        print(f"{hosts}, from step {last_step}")

    metrics = jax.device_get(jaxscale.metrics(state))
    for step in range(last_step + 1, num_steps + 1):
        batch = local_batch(images[:num_train], labels[:num_train], step)
        if nan == [step, process]:
            batch[0][0, 0] = np.nan
        if kill == [step, process]:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = [jax.make_array_from_process_local_data(split, rows) for rows in batch]
        *state, loss = train_step(*state, *batch)
        if manager and step % save_every == 0:
            manager.save(step, args=ocp.args.StandardSave(state))
        if step % LOG_EVERY == 0:
            # On all hosts, so that all of them stop on an error.
            jaxscale.check(state, tx=tx)
            old_metrics = metrics
            metrics = jax.device_get(jaxscale.metrics(state))
            if process == 0:
                news = describe(old_metrics, metrics)
                print(f"step {step}: loss {loss:.4f}, {news}", flush=True)
    if manager:
        manager.close()  # waits until the last checkpoint is written

    # A whole copy on every host. The digests show that the copies are equal.
    state = jax.jit(lambda state: state, out_shardings=whole)(state)
    logits = np.asarray(jax.jit(predict)(state[0], images[num_train:]))
    guesses = logits.argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    line = "process {}: repeated {total_retries}, skipped {total_notfinite}, scale {loss_scale:.0f}"
    line = line.format(process, **jaxscale.metrics(state))
    print(f"{line}, digest of the state {digest(state)}", flush=True)
    if process == 0:
        print(f"multi_host: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


def launch(number):
    """Runs this command in several processes on this computer and returns an exit code.

    Like the launcher of a cluster, it stops all processes if one fails: the others would wait for
    it for ever.
    """
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"  # a free port
    command = [sys.executable, *sys.argv]
    command += ["--coordinator", address, "--num-processes", str(number)]
    # A signal ends Python at once. An exit lets `finally` run first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))
    processes = [
        subprocess.Popen([*command, "--process-id", str(i)]) for i in range(number)
    ]
    try:
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        return f"A process failed, so all were stopped. Exit codes: {codes}"
    return 0


def make_parser():
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="train up to this step")
    add(
        "--checkpoints",
        help="folder that all hosts write to; training continues from what is there",
    )
    add(
        "--save-every",
        type=int,
        default=20,
        help="steps from one checkpoint to the next",
    )
    add("--local", type=int, metavar="N", help="start N processes on this computer")
    add("--coordinator", help="if JAX finds no cluster: HOST:PORT of process 0")
    add(
        "--num-processes",
        type=int,
        help="if JAX finds no cluster: the number of processes",
    )
    add(
        "--process-id", type=int, help="if JAX finds no cluster: the number of this one"
    )
    add(
        "--nan",
        type=int,
        nargs=2,
        metavar=("STEP", "PROCESS"),
        help="a fault to watch: a process gets a NaN in its batch",
    )
    add(
        "--kill",
        type=int,
        nargs=2,
        metavar=("STEP", "PROCESS"),
        help="a fault to watch: a process is killed before it",
    )
    return parser


if __name__ == "__main__":
    parser = make_parser()
    args = parser.parse_args()
    if args.local and args.process_id is None:
        sys.exit(launch(args.local))
    try:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id
        )
    except ValueError as error:
        parser.error(f"{error} JAX finds no cluster here: try --local 2")
    main(args.steps, args.checkpoints, args.save_every, args.nan, args.kill)
