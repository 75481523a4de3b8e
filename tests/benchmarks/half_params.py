"""What half-precision parameters cost, and where their training ends.

    python tests/benchmarks/half_params.py [--machines CPU H100 "TPU v5e"] [--only NAME ...]
                                           [--steps 4000] [--seeds 4] [--json FILE]

First the bytes for each parameter in the step of AdamW, compiled and not run: those of its
arguments, those that it moves, and those that it needs in between. Then the final losses of three
small tasks, from several starts at once. Weights are read in float32 everywhere, so that only their
storage differs. ``by hand`` is what people write today: a float32 copy in the loop, and optax.
"""

import functools
import time
from typing import NamedTuple

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import report
import targets
from jax.sharding import SingleDeviceSharding

import jaxscale

WIDTH = 1024
LAYERS = 4


def both(wrapper):
    return lambda tx: wrapper(jaxscale.compact_state(tx))


class Method(NamedTuple):
    dtype: str  # of the parameters
    wrap: object  # from an optimizer to one for them
    by_hand: bool = False  # whether the loop holds float32 copies


METHODS = {
    "optax, float32": Method("float32", optax.with_extra_args_support),
    "optax, bfloat16": Method("bfloat16", optax.with_extra_args_support),
    "by hand": Method("bfloat16", optax.with_extra_args_support, by_hand=True),
    "skip_nonfinite, float32": Method("float32", jaxscale.skip_nonfinite),
    "skip_nonfinite, bfloat16": Method("bfloat16", jaxscale.skip_nonfinite),
    "remainder": Method("bfloat16", jaxscale.master_weights),
    "copy": Method(
        "bfloat16", functools.partial(jaxscale.master_weights, storage="float32")
    ),
    "stochastic": Method("bfloat16", jaxscale.stochastic_rounding),
    "remainder + compact": Method("bfloat16", both(jaxscale.master_weights)),
    "stochastic + compact": Method("bfloat16", both(jaxscale.stochastic_rounding)),
}


class Carry(NamedTuple):
    params: object  # as the model reads them
    masters: object  # float32 copies, if the loop holds them
    state: object


def init(method, tx, params):
    params = jax.tree.map(lambda p: p.astype(method.dtype), params)
    if not method.by_hand:
        return Carry(params, None, tx.init(params))
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return Carry(params, masters, tx.init(masters))


def step(method, tx, carry, grads):
    """One step with a method, from gradients."""
    if not method.by_hand:
        params, state = jaxscale.apply_gradients(tx, grads, carry.state, carry.params)
        return Carry(params, None, state)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, state = tx.update(grads, carry.state, carry.masters)
    masters = optax.apply_updates(carry.masters, updates)
    params = jax.tree.map(lambda m: m.astype(method.dtype), masters)
    return Carry(params, masters, state)


# Bytes.


def measure(name, device):
    """The figures of one compiled step."""
    method = METHODS[name]
    tx = method.wrap(optax.adamw(1e-3))
    params = {f"w{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}
    carry = jax.eval_shape(functools.partial(init, method, tx), params)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, method.dtype), params)

    def on_device(aval):
        sharding = SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    arguments = jax.tree.map(on_device, (carry, grads))
    compiled = jax.jit(functools.partial(step, method, tx), donate_argnums=0)
    lowered = compiled.lower(*arguments)
    started = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - started
    memory = program.memory_analysis()
    number = LAYERS * WIDTH**2
    return {
        "arguments": memory.argument_size_in_bytes / number,
        "moved": hlo.cost(program.as_text()).bytes / number,
        "temporary": memory.temp_size_in_bytes / number,
        "compile seconds": seconds,
    }


SHAPES = {"CPU": "1", "H100": "1"}


def table_of_bytes(machine, names):
    device = targets.devices(machine, SHAPES.get(machine, "1x1"))[0]
    return {name: measure(name, device) for name in names}


# Final losses.


def dense(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


class Task(NamedTuple):
    """A small thing to learn.

    Attributes:
      init: makes parameters of a key.
      loss: of float32 parameters and a batch.
      batch: makes a batch of a key.
      rate: the learning rate that AdamW starts with.
    """

    init: object
    loss: object
    batch: object
    rate: float


def teacher_task():
    """A two-layer network learns what another one says, with noise."""
    first, second = jax.random.split(jax.random.key(100))
    teacher = {"a": dense(first, 32, 64), "b": dense(second, 64, 8)}

    def apply(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    def batch(key):
        of_x, of_noise = jax.random.split(key)
        x = jax.random.normal(of_x, (128, 32))
        noise = jax.random.normal(of_noise, (128, 8))
        return x, apply(teacher, x) + 0.1 * noise

    def start(key):
        first, second = jax.random.split(key)
        return {"a": dense(first, 32, 128), "b": dense(second, 128, 8)}

    def loss(params, batch):
        x, y = batch
        return jnp.mean((apply(params, x) - y) ** 2)

    return Task(start, loss, batch, 1e-3)


def autoencoder_task():
    """Twelve numbers for sixty-four that depend on sixteen."""
    mixing = dense(jax.random.key(200), 16, 64) * 2

    def start(key):
        keys = jax.random.split(key, 4)
        shapes = {"a": (64, 96), "b": (96, 12), "c": (12, 96), "d": (96, 64)}
        return {
            name: dense(own, *shape)
            for own, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(params, x):
        code = jax.nn.gelu(x @ params["a"]) @ params["b"]
        y = jax.nn.gelu(code @ params["c"]) @ params["d"]
        return jnp.mean((x - y) ** 2)

    def batch(key):
        return jnp.tanh(jax.random.normal(key, (128, 16)) @ mixing)

    return Task(start, loss, batch, 1e-3)


def text_task():
    """Two letters tell the odds of the next one."""
    letters = 12
    odds = jax.random.normal(jax.random.key(300), (letters, letters, letters))

    def start(key):
        keys = jax.random.split(key, 3)
        return {
            "letters": dense(keys[0], letters, 48),
            "a": dense(keys[1], 96, 192),
            "b": dense(keys[2], 192, letters),
        }

    def loss(params, batch):
        pairs, targets_ = batch
        x = params["letters"][pairs].reshape(len(pairs), -1)
        logits = jax.nn.gelu(x @ params["a"]) @ params["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets_)
        return jnp.mean(losses)

    def batch(key):
        of_pairs, of_targets = jax.random.split(key)
        pairs = jax.random.randint(of_pairs, (256, 2), 0, letters)
        logits = 2 * odds[pairs[:, 0], pairs[:, 1]]
        return pairs, jax.random.categorical(of_targets, logits)

    return Task(start, loss, batch, 1e-3)


TASKS = {"teacher": teacher_task, "autoencoder": autoencoder_task, "text": text_task}


def final_losses(task, method, seeds, steps, optimizer=optax.adamw):
    """The mean loss of the last tenth of the steps, from each start."""
    rates = optax.cosine_decay_schedule(task.rate, steps, 0.01)
    tx = method.wrap(optimizer(rates))

    def train(seed):
        key = jax.random.key(seed)

        def body(carry, index):
            batch = task.batch(jax.random.fold_in(key, index))

            def loss_fn(params):
                wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
                return task.loss(wide, batch)

            loss, grads = jax.value_and_grad(loss_fn)(carry.params)
            return step(method, tx, carry, grads), loss

        carry = init(method, tx, task.init(jax.random.fold_in(key, steps)))
        _, losses = jax.lax.scan(body, carry, jnp.arange(steps))
        return jnp.mean(losses[-steps // 10 :])

    return np.asarray(jax.jit(jax.vmap(train))(jnp.arange(seeds)))


def table_of_losses(names, steps, seeds):
    table = {}
    for task_name, make_task in TASKS.items():
        task = make_task()
        rows = {}
        for name in names:
            losses = final_losses(task, METHODS[name], seeds, steps)
            rows[name] = {"mean": float(losses.mean()), "std": float(losses.std())}
            print(
                f"  {task_name:12} {name:26} {losses.mean():.5f} +- {losses.std():.5f}"
            )
        table[task_name] = rows
    return table


def main():
    parser = report.parser(__doc__, methods=METHODS)
    parser.add_argument("--machines", nargs="*", default=["CPU"])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    results = {"machine": processes.call(report.describe), "bytes": {}}
    for machine in options.machines:
        print(f"Bytes for each parameter on {machine}: arguments, moved, temporary")
        try:
            rows = table_of_bytes(machine, options.only)
        except targets.CannotCompile as error:
            print(f"  left out: {error}")
            continue
        results["bytes"][machine] = rows
        for name, row in rows.items():
            figures = [row[key] for key in ("arguments", "moved", "temporary")]
            seconds = row["compile seconds"]
            numbers = " ".join(f"{figure:6.1f}" for figure in figures)
            print(f"  {name:26} {numbers}   compiled in {seconds:.1f} s")
    if options.steps:
        print(f"Final losses after {options.steps} steps, from {options.seeds} starts")
        results["losses"] = table_of_losses(options.only, options.steps, options.seeds)
        results["steps"] = options.steps
        results["seeds"] = options.seeds
    if options.json:
        report.write(options.json, results)


if __name__ == "__main__":
    main()
