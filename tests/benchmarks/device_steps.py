"""Laws of the step: verdict, skip, scale, retries, spikes, windows and front ends."""

import contextlib
import itertools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from device_law import bits, check, distance, law, numbers

import jaxscale

DTYPES = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2),
}
BAD = {"inf": np.inf, "-inf": -np.inf, "NaN": np.nan}
SHAPES = {"w": (33, 7), "b": (5,), "one": (1,), "scalar": ()}


def make_params():
    params = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        params[name] = 0.1 * numbers(seed, *shape)
    return params


def no_poison():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def poisons():
    """Yields what to add to gradients: each bad number, at both ends of each leaf."""
    for (label, bad), name in itertools.product(BAD.items(), SHAPES):
        for index in (0, -1):
            poison = no_poison()
            poison[name].flat[index] = bad
            yield f"{label} in {name}[{index}]", poison


@jax.custom_vjp
def poison_gradient(x, poison):
    """Returns `x`. The poison is added to its gradient."""
    return x


def _backward(poison, cotangent):
    return cotangent + poison.astype(cotangent.dtype), jnp.zeros_like(poison)


poison_gradient.defvjp(lambda x, poison: (x, poison), _backward)


def loss_in(dtype):
    """Returns a loss, computed in a dtype, whose gradients are poisoned."""

    def loss_fn(params, poison):
        loss = jnp.float32(0)
        for name, param in params.items():
            half = poison_gradient(param.astype(dtype), poison[name])
            loss += jnp.sum((half.astype(jnp.float32) - 1) ** 2)
        return loss

    return loss_fn


def step_of(form, tx, dtype):
    """Returns a step, `(params, state, poison) -> (params, state)`, in one of its forms."""
    if form == "train_step":
        step = jaxscale.train_step(loss_in(dtype), tx)
        return lambda *args: step(*args)[:2]

    def gradients(params, poison):
        def gradient(param, poison):
            return (2 * (param - 1) + poison).astype(dtype)

        return jax.tree.map(gradient, params, poison)

    def apply(params, state, poison):
        return jaxscale.apply_gradients(tx, gradients(params, poison), state, params)

    def update(params, state, poison):
        updates, state = tx.update(gradients(params, poison), state, params)
        return optax.apply_updates(params, updates), state

    return {"apply_gradients": apply, "tx.update": update}[form]


FORMS = ["train_step", "apply_gradients", "tx.update"]
SKIPS = {
    ", ".join(names): names
    for names in [
        *itertools.product(FORMS, DTYPES, ["adamw"]),
        *itertools.product(FORMS, ["float16"], list(OPTIMIZERS)[1:]),
    ]
}


@law("a skipped step leaves parameters and inner state bit for bit", SKIPS)
def skipped_steps_leave_no_trace(form, dtype, optimizer):
    policy = jaxscale.DynamicLossScale(init_scale=2.0**8, growth_interval=1000)
    tx = jaxscale.loss_scaled(OPTIMIZERS[optimizer](), policy)
    step = jax.jit(step_of(form, tx, DTYPES[dtype]))
    params = make_params()
    params, state = step(params, tx.init(params), no_poison())
    check(bool(state.step_applied), "the first good step was skipped")
    before = bits((params, state.inner_state))
    for what, poison in poisons():
        skipped, skipped_state = step(params, state, poison)
        check(not skipped_state.step_applied, f"{what} was applied")
        check(bits((skipped, skipped_state.inner_state)) == before, f"{what}: changed")
        halved = float(skipped_state.scaling.loss_scale) == 2.0**7
        check(halved, f"{what}: the scale was not halved")
    params, state = step(skipped, skipped_state, no_poison())
    check(bits((params, state.inner_state)) != before, "a good step changed nothing")


@contextlib.contextmanager
def forced(form):
    """Compiles the form of a skip that a CPU gets, or that of the other devices."""
    choose = jax.lax.platform_dependent

    def chosen(*args, cpu, default):
        return cpu(*args) if form == "branch" else default(*args)

    jax.lax.platform_dependent = chosen
    try:
        yield
    finally:
        jax.lax.platform_dependent = choose


@law("the branch and the selection agree", {name: (name,) for name in FORMS})
def both_forms_of_the_skip_agree(form):
    ends = {}
    for skip in ("branch", "select"):
        # Linear in the gradients: Adam makes much of their last bits where they are nearly 0, and a
        # GPU multiplies by other kernels in each of the two programs.
        tx = jaxscale.loss_scaled(optax.sgd(1e-3, momentum=0.9), 2.0**8)
        step = step_of(form, tx, jnp.float16)
        params = make_params()
        bad = no_poison()
        bad["w"][3, 3] = np.inf
        with forced(skip):
            compiled = jax.jit(lambda *args, step=step: step(*args))
            good = compiled(params, tx.init(params), no_poison())
            skipped = compiled(*good, bad)
        inner = good[1].inner_state, skipped[1].inner_state
        check(bits(good[0]) == bits(skipped[0]), f"{skip}: parameters changed")
        check(bits(inner[0]) == bits(inner[1]), f"{skip}: the inner state changed")
        ends[skip] = good[0], inner[0]
    difference = distance(ends["branch"], ends["select"])
    check(difference < 1e-6, f"good steps differ by {difference:.2g}")


@law("scale and unscale are exact", {name: (name,) for name in DTYPES})
def scaling_is_exact(dtype):
    drawn = np.random.default_rng(0).standard_normal(4096)
    values = jnp.asarray(drawn, DTYPES[dtype])
    state = jaxscale.FixedLossScale(2.0**15).init()
    wide = np.asarray(values).astype(np.float32)
    scaled = jax.jit(jaxscale.scale)(state, values)
    unscaled = jax.jit(jaxscale.unscale)(state, values)
    again = jax.jit(jaxscale.unscale)(state, scaled)
    check(bits(scaled) == bits(wide * np.float32(2**15)), "scale rounded")
    check(bits(unscaled) == bits(wide / np.float32(2**15)), "unscale rounded")
    check(bits(again) == bits(wide), "scale and unscale do not cancel")


@law("the verdict sees one bad number anywhere", {name: (name,) for name in DTYPES})
def the_verdict_sees_every_position(dtype):
    verdict = jax.jit(jaxscale.all_finite)
    dtype = DTYPES[dtype]
    largest = float(jnp.finfo(dtype).max)
    shapes = {"scalar": (), "one": (1,), "odd": (3, 7), "row": (40,)}
    shapes["wide"] = (129, 65)
    tree = {name: np.full(shape, largest, dtype) for name, shape in shapes.items()}
    check(bool(verdict(tree)), "finite numbers whose sum overflows are not finite")
    rng = np.random.default_rng(0)
    for name, leaf in tree.items():
        places = range(leaf.size)
        if leaf.size > 100:
            places = [0, leaf.size - 1, *rng.integers(0, leaf.size, 60).tolist()]
        for place, (label, bad) in itertools.product(places, BAD.items()):
            spoiled = leaf.copy()
            spoiled.flat[place] = bad
            where = f"{label} in {name}[{place}]"
            check(not verdict(tree | {name: spoiled}), f"{where} was not seen")


class Scaler:
    """The rule of `DynamicLossScale`, in plain Python."""

    def __init__(self, policy):
        self.policy = policy
        self.scale = policy.init_scale
        self.streak = 0
        self.tolerated = policy.hysteresis

    def move(self, finite):
        policy = self.policy
        if finite:
            self.streak += 1
            if self.streak >= policy.growth_interval:
                self.scale = min(self.scale * policy.growth_factor, policy.max_scale)
                self.streak = 0
                self.tolerated = policy.hysteresis
        else:
            self.streak = 0
            self.tolerated = max(self.tolerated - 1, 0)
            if not self.tolerated:
                self.scale = max(self.scale * policy.backoff_factor, policy.min_scale)
        return self.scale


POLICIES = {
    "as PyTorch": {"growth_interval": 3},
    "hysteresis": {"growth_interval": 4, "hysteresis": 2},
    "narrow": {
        "init_scale": 8.0,
        "growth_interval": 1,
        "min_scale": 4.0,
        "max_scale": 32.0,
    },
    "other factors": {
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
    },
}


@law("the scale grows and backs off", {name: (name,) for name in POLICIES})
def the_dynamic_scale_follows_its_rule(name):
    policy = jaxscale.DynamicLossScale(**POLICIES[name])
    verdicts = np.random.default_rng(1).random(400) < 0.75

    @jax.jit
    def run(state, verdicts):
        def body(state, finite):
            state = policy.adjust(state, finite)
            return state, state.loss_scale

        return jax.lax.scan(body, state, verdicts)[1]

    scaler = Scaler(policy)
    expected = [scaler.move(finite) for finite in verdicts.tolist()]
    found = np.asarray(run(policy.init(), verdicts)).tolist()
    check(found == expected, "the scales are not those of the rule")


@law("the seed of the backward pass does not overflow the loss")
def the_seed_does_not_overflow_the_loss():
    state = jaxscale.FixedLossScale(2.0**24).init()

    def loss_fn(w):
        return jnp.float32(3e38) + jnp.sum(w)

    loss, grads = jax.jit(jaxscale.value_and_grad(loss_fn, state))(jnp.ones(3))
    check(float(loss) == float(jnp.float32(3e38)), f"the loss is {loss}")
    check(grads.tolist() == [1, 1, 1], f"the gradients are {grads}")


@law("the seed of a float16 loss is capped at 2**15")
def the_seed_of_a_float16_loss_is_capped():
    state = jaxscale.FixedLossScale(2.0**20).init()

    def loss_fn(w):
        return jnp.sum(w.astype(jnp.float16) * jnp.float16(0.5))

    loss, grads = jax.jit(jaxscale.value_and_grad(loss_fn, state))(jnp.ones(4))
    check(loss.dtype == jnp.float16 and float(loss) == 2, f"the loss is {loss}")
    check(grads.tolist() == [0.5] * 4, f"the gradients are {grads}")


def half_square(w, x):
    """A loss of a float16 product, whose cotangent is float16, too."""
    y = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(y**2)


def counted(fun):
    """Returns a function and the list that has an item for each of its traces."""
    traces = []

    def wrapped(*args):
        traces.append(None)
        return fun(*args)

    return wrapped, traces


@law("retries lose no batch, and compile once")
def retries_lose_no_batch():
    w = 0.1 * numbers(0, 64, 64)
    x = numbers(1, 32, 64)
    policy = jaxscale.DynamicLossScale(init_scale=2.0**24, growth_interval=2)
    tx = jaxscale.loss_scaled(optax.sgd(1.0), policy)
    alone, _ = counted(half_square)
    loss_fn, traces = counted(half_square)
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=20))
    expected = w - jax.grad(alone)(w, x)  # nothing flushes at this size
    updated, state, _ = step(w, tx.init(w), x)
    check(bool(state.step_applied), "the batch was lost")
    check(int(state.total_retries) > 0, "there was nothing to repeat")
    found = distance(updated - w, expected - w)
    check(found < 1e-2, f"the update is off by {found:.2g}")
    num_traces = len(traces)
    for _ in range(6):
        updated, state, _ = step(updated, state, x)
    check(int(state.total_notfinite) == 0, "a later batch was lost")
    check(len(traces) == num_traces, "the model was traced again")
    check(step._cache_size() == 1, "the step was compiled again")
    return {"retries": int(state.total_retries), "traces": num_traces}


@law("without retries the scale comes down by itself")
def the_scale_comes_down():
    w = 0.1 * numbers(0, 64, 64)
    x = numbers(1, 32, 64)
    tx = jaxscale.loss_scaled(
        optax.sgd(0.1), jaxscale.DynamicLossScale(init_scale=2.0**24)
    )
    step = jax.jit(jaxscale.train_step(half_square, tx))
    state = tx.init(w)
    for _ in range(24):
        w, state, loss = step(w, state, x)
    skipped = int(state.total_notfinite)
    check(0 < skipped < 20, f"{skipped} steps were skipped")
    check(bool(state.step_applied), "the last step was skipped")
    check(float(state.scaling.loss_scale) == 2.0 ** (24 - skipped), "a wrong scale")
    check(bool(jnp.isfinite(loss)), f"the loss is {loss}")


@law("a spike is skipped and leaves no trace")
def a_spike_is_skipped():
    tx = jaxscale.skip_nonfinite(
        optax.adamw(1e-3), spikes=jaxscale.SpikeRule(window=16, min_history=8)
    )
    rng = np.random.default_rng(0)

    def loss_fn(w, factor):
        return factor * jnp.mean((w - 1) ** 2)

    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    w = numbers(0, 100)
    state = tx.init(w)
    for factor in 1 + 0.1 * rng.standard_normal(24):
        w, state, _ = step(w, state, jnp.float32(factor))
        check(bool(state.step_applied), "an ordinary step was skipped")
    before = bits((w, state.inner_state))
    w, state, _ = step(w, state, jnp.float32(1000))
    check(not state.step_applied, "the spike was applied")
    check(bits((w, state.inner_state)) == before, "the spike left a trace")
    check(int(jaxscale.metrics(state)["total_spikes"]) == 1, "it was not counted")
    w, state, _ = step(w, state, jnp.float32(1))
    check(bool(state.step_applied), "the step after the spike was skipped")


@law("steps compile once, through growth and skips", {name: (name,) for name in FORMS})
def steps_compile_once(form):
    tx = jaxscale.loss_scaled(
        optax.adamw(1e-3),
        jaxscale.DynamicLossScale(init_scale=2.0**4, growth_interval=2),
    )
    counted_step, traces = counted(step_of(form, tx, jnp.float16))
    step = jax.jit(counted_step, donate_argnums=(0, 1))
    params = make_params()
    state = tx.init(params)
    bad = no_poison()
    bad["b"][0] = np.nan
    scales = set()
    for index in range(20):
        poison = bad if index % 7 == 6 else no_poison()
        params, state = step(params, state, poison)
        scales.add(float(state.scaling.loss_scale))
    check(int(state.total_notfinite) == 2, "not two steps were skipped")
    check(len(scales) > 4, f"the scale took the values {scales}")
    check(len(traces) == 1, f"the step was traced {len(traces)} times")
    check(step._cache_size() == 1, "the step was compiled again")


@law("a donated step updates in place", {name: (name,) for name in FORMS})
def donation_works(form):
    tx = jaxscale.loss_scaled(optax.adamw(1e-3))
    step = jax.jit(step_of(form, tx, jnp.float32), donate_argnums=(0, 1))
    params = make_params()
    state = tx.init(params)
    analysis = step.lower(params, state, no_poison()).compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state.inner_state)))
    if analysis is not None:
        aliased = analysis.alias_size_in_bytes
        check(aliased >= held, f"{aliased} of {held} bytes are updated in place")
    jax.block_until_ready(step(params, state, no_poison()))
    kept = [name for name, leaf in params.items() if not leaf.is_deleted()]
    check(not kept, f"{kept} were not consumed")


@law("a step waits for no host and holds no 64-bit numbers")
def the_step_stays_on_the_device():
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), max_norm=1.0)
    loss_fn = jaxscale.autocast(lambda w, x: jnp.mean((x @ w) ** 2))
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=2))
    w = numbers(0, 64, 64)
    x = numbers(1, 64, 64)
    text = step.lower(w, tx.init(w), x).compile().as_text()
    found = hlo.oddities(text)
    check(found["host"] == 0, f"{found['host']} instructions wait for the host")
    return found


@law("multi_steps makes the step of the whole batch, without what is bad")
def windows_make_the_step_of_the_batch():
    inner = optax.sgd(0.1)
    tx = jaxscale.loss_scaled(jaxscale.multi_steps(inner, 4), 2.0**8)
    step = jax.jit(step_of("apply_gradients", tx, jnp.float16))
    params = make_params()
    state = tx.init(params)
    bad = no_poison()
    bad["scalar"] = np.float32(np.inf)
    current = params
    for index in range(4):
        before = bits(current)
        current, state = step(current, state, bad if index == 1 else no_poison())
        applied = bits(current) != before
        check(applied == (index == 3), f"micro-batch {index}: changed is {applied}")
    # Of gradients that are all alike, the mean is each of them.
    expected = {name: p - 0.1 * 2 * (p - 1) for name, p in params.items()}
    found = distance(current, expected)
    check(found < 2e-3, f"the step is off by {found:.2g}")
    check(int(state.total_notfinite) == 1, "the bad micro-batch was not counted")


@law("the global norm is clipped")
def the_norm_is_clipped():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**8, max_norm=0.5)
    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    params = make_params()
    scaled_step = jax.jit(step_of("train_step", tx, jnp.float32))
    clipped, state = scaled_step(params, tx.init(params), no_poison())
    grads = jax.tree.map(lambda p: 2 * (p - 1), params)
    updates, _ = plain.update(grads, plain.init(params), params)
    found = distance(clipped, optax.apply_updates(params, updates))
    check(found < 1e-5, f"the step is off by {found:.2g}")
    norm = float(optax.global_norm(grads))
    check(abs(float(state.grad_norm) / norm - 1) < 1e-5, "a wrong norm")


@law("members of a vmap skip one by one")
def members_skip_one_by_one():
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), 2.0**8)
    step = step_of("train_step", tx, jnp.float16)
    params = jax.tree.map(lambda p: jnp.stack([p] * 3), make_params())
    state = jax.vmap(tx.init)(params)
    poison = jax.tree.map(lambda p: np.stack([p] * 3), no_poison())
    poison["w"][1, 0, 0] = np.inf
    updated, state = jax.jit(jax.vmap(step))(params, state, poison)
    check(state.step_applied.tolist() == [True, False, True], "the wrong ones")
    for member in range(3):
        old = bits(jax.tree.map(lambda leaf, m=member: leaf[m], params))
        new = bits(jax.tree.map(lambda leaf, m=member: leaf[m], updated))
        check((old == new) == (member == 1), f"member {member} is wrong")


@law("steps in a scan are those of a loop")
def scanned_steps_are_those_of_a_loop():
    tx = jaxscale.loss_scaled(
        optax.adamw(1e-2), jaxscale.DynamicLossScale(init_scale=16.0, growth_interval=3)
    )
    step = step_of("train_step", tx, jnp.float16)
    poison = jax.tree.map(lambda p: np.stack([p] * 8), no_poison())
    poison["b"][4, 2] = np.nan
    params = make_params()

    def body(carry, poison):
        return step(*carry, poison), None

    start = params, tx.init(params)
    scanned = jax.jit(lambda start: jax.lax.scan(body, start, poison)[0])(start)
    looped = start
    compiled = jax.jit(step)
    for index in range(8):
        looped = compiled(*looped, jax.tree.map(lambda p, i=index: p[i], poison))
    check(bits(scanned[1].scaling) == bits(looped[1].scaling), "other scales")
    found = distance(scanned[0], looped[0])
    check(found < 1e-5, f"parameters differ by {found:.2g}")


@law("a state comes back from its dictionary bit for bit")
def states_come_back():
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), "adaptive")
    params = make_params()
    step = jax.jit(step_of("train_step", tx, jnp.float16))
    _, state = step(params, tx.init(params), no_poison())
    saved = jax.device_get(jaxscale.to_state_dict(state))
    restored = jaxscale.from_state_dict(tx.init(params), saved)
    check(bits(restored) == bits(state), "it did not")


@law("the adaptive scale puts gradients where float16 holds them")
def the_adaptive_scale_follows_the_gradients():
    tx = jaxscale.loss_scaled(optax.sgd(1e-3), "adaptive")

    def loss_fn(w, x):
        return 2.0**-20 * half_square(w, x)

    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    w = numbers(0, 64, 64)
    x = numbers(1, 32, 64)
    state = tx.init(w)
    for _ in range(40):
        w, state, _ = step(w, state, x)
    check(bool(state.step_applied), "the last step was skipped")
    scale = float(state.scaling.loss_scale)
    check(scale > 2.0**15, f"the scale is {scale:g}")
    check(int(state.total_notfinite) < 5, f"{int(state.total_notfinite)} skips")


@law("a skipped step keeps the batch statistics of a Linen model")
def linen_keeps_its_statistics():
    import flax.linen as nn

    import jaxscale.flax

    class State(jaxscale.flax.TrainState):
        batch_stats: dict

    model = nn.BatchNorm(use_running_average=False, momentum=0.5)

    def loss_fn(params, fields, x):
        variables = {"params": params, **fields}
        y, fields = model.apply(variables, x, mutable=list(fields))
        return jnp.mean(y**2), fields

    state = State.create(
        apply_fn=model.apply,
        tx=jaxscale.loss_scaled(optax.adamw(0.1)),
        **model.init(jax.random.key(0), jnp.ones((4, 2))),
    )
    step = jax.jit(jaxscale.flax.train_step(loss_fn, has_state=True))
    state, _ = step(state, jnp.ones((4, 2)))
    check(state.batch_stats["mean"].tolist() == [0.5, 0.5], "wrong statistics")
    kept = bits((state.params, state.batch_stats, state.step))
    state, _ = step(state, jnp.full((4, 2), jnp.inf))
    found = bits((state.params, state.batch_stats, state.step))
    check(found == kept, "the skipped step left a trace")


@law("a skipped step keeps the batch statistics of an NNX model")
def nnx_keeps_its_statistics():
    from flax import nnx

    import jaxscale.nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
            self.dense = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.norm(x))

    model = Model(nnx.Rngs(0))
    tx = jaxscale.loss_scaled(optax.adamw(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss_fn = jaxscale.autocast(lambda model, x: jnp.mean(model(x) ** 2))
    step = nnx.jit(jaxscale.nnx.train_step(loss_fn))
    step(model, optimizer, numbers(0, 16, 8))
    check(bool(jaxscale.metrics(optimizer)["step_applied"]), "a good step was skipped")
    kept = bits(nnx.state(model))
    step(model, optimizer, jnp.full((16, 8), jnp.inf))
    check(not jaxscale.metrics(optimizer)["step_applied"], "a bad step was applied")
    check(bits(nnx.state(model)) == kept, "the skipped step left a trace")
    step(model, optimizer, numbers(1, 16, 8))
    check(bits(nnx.state(model)) != kept, "a good step changed nothing")
