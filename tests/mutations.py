"""Plants bugs in a copy of the package, one at a time, and checks that the suite goes red.

Run by hand, from the top of the project (about 20 minutes on two cores):

    python tests/mutations.py            # all of them
    python tests/mutations.py cap scale  # those with one of these words in their name

It prints which test caught each, and exits with 1 if one was not caught.
"""

import concurrent.futures
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
# The quickest first: a run ends with the first failure.
TESTS = [
    "test_policies",
    "test_traces",
    "test_presets",
    "test_state",
    "test_tree",
    "test_never",
    "test_user_reports",
    "test_value_and_grad",
    "test_errors",
    "test_report",
    "test_diagnostics_calibrate",
    "test_diagnostics_overflow",
    "test_diagnostics_histogram",
    "test_diagnostics_leaves",
    "test_diagnostics_pictures",
    "test_flax",
    "test_compiled",
    "test_devices",
    "test_package",
    "test_loss_scaled",
]

_INNER = "self.inner.update(grads, state.inner_state, map_gradients(widen, params), **extra_args)"

# name: (file, what stands there, what is planted instead)
MUTATIONS = {
    # how the scale moves
    "growth one step late": ("_dynamic", "grow = streak >= ", "grow = streak > "),
    "growth by equality": ("_dynamic", "grow = streak >= ", "grow = streak == "),
    "no cap": ("_dynamic", "jnp.minimum(scale * self.growth_factor, self.max_scale)", "scale * self.growth_factor"),
    "no floor": ("_dynamic", "jnp.maximum(scale * self.backoff_factor, self.min_scale)", "scale * self.backoff_factor"),
    "growth lowers a scale above the cap": ("_dynamic", "grown, lower = jnp.maximum(scale, grown), ", "grown, lower = grown, "),
    "backoff raises a scale below the floor": ("_dynamic", "jnp.maximum(scale, grown), jnp.minimum(scale, lower)", "jnp.maximum(scale, grown), lower"),
    "backoff does not clear the streak": ("_dynamic", "growth_tracker=jnp.full_like(state.growth_tracker, -self.growth_delay)", "growth_tracker=state.growth_tracker"),
    "growth does not clear the streak": ("_dynamic", "growth_tracker=jnp.where(grow, 0, streak)", "growth_tracker=streak"),
    "hysteresis never refilled": ("_dynamic", "refill = grow | self.refill_on_finite", "refill = self.refill_on_finite"),
    "hysteresis refilled by any finite step": ("_dynamic", "refill = grow | self.refill_on_finite", "refill = True"),
    "hysteresis tolerates one too many": ("_dynamic", "jnp.where(left == 0, lower, scale)", "jnp.where(state.hysteresis_tracker == 0, lower, scale)"),
    "a ruined scale stays ruined": ("_state", "jnp.where(usable, loss_scale, init_scale)", "loss_scale"),
    "streak wraps around": ("_dynamic", "jnp.asarray(optax.safe_increment(state.growth_tracker))", "state.growth_tracker + 1"),
    "growth factor of 1 accepted": ("_checks", "if not value > 1:", "if not value >= 1:"),
    "backoff factor of 1 accepted": ("_checks", "if not 0 < value < 1:", "if not 0 < value <= 1:"),
    "bounds unchecked": ("_dynamic", "if not (inside or", "if not (True or"),
    "delay forgotten at the start": ("_dynamic", "self.hysteresis, -self.growth_delay)", "self.hysteresis)"),
    "delay forgotten after a bad step": ("_dynamic", "jnp.full_like(state.growth_tracker, -self.growth_delay)", "jnp.zeros_like(state.growth_tracker)"),
    "backoff never refills": ("_dynamic", "refill = (left == 0) & self.refill_on_backoff", "refill = False"),
    "refused growth clipped": ("_dynamic", "if not self.clip_growth", "if False"),
    "clamped on moves only": ("_dynamic", 'if self.clamp == "steps"', "if False"),
    # the other policies and the presets
    "tolerance exceeded, not reached": ("_tolerance", "rate >= self.tolerance", "rate > self.tolerance"),
    "rate since the start": ("_tolerance", "steps_since_change=jnp.where(grow, 0, steps)", "steps_since_change=steps"),
    "overflows cleared by growth": ("_tolerance", "overflows_since_backoff=state.overflows_since_backoff", "overflows_since_backoff=jnp.where(grow, 0, state.overflows_since_backoff)"),
    "zero gradients poison LogMax": ("_logmax", "tree_where(~grads_finite | (amax > 0), moved, state)", "moved"),
    "LogMax counts overflows in other units": ("_logmax", "jnp.log2(amax), self.log_max)", "jnp.log2(amax), 2.0**self.log_max)"),
    "LogMax sees one device": ("_tree", "return largest if axis_name is None else jax.lax.pmax(largest, axis_name)", "return largest"),
    "gradients not shown to the policy": ("_loss_scaled", "self.policy.observe(state.scaling, grads, grads_finite, axis_name=self.axis_name)", "self.policy.adjust(state.scaling, grads_finite)"),
    "Flax grows one step early": ("_peers_jax", "growth_interval, least=0) + 1", "growth_interval, least=0)"),
    "reciprocal rounded up": ("_peers", "if float(reciprocal) * float(np.float32(value)) > 1", "if False"),
    "tracker not restored": ("_peer_states", "    if tracker:", "    if False:"),
    "fixed scale reacts": ("_fixed", "return state, jnp.array(True)", "return state, jnp.array(False)"),
    "fixed scale below 1 accepted": ("_fixed", "if value < 1", "if value < 0"),
    "bool passes for a number": ("_checks", "if isinstance(value, bool):  # a bool", "if False:  # a bool"),
    # states
    "weakly typed state": ("_state", "loss_scale=jnp.asarray(loss_scale, jnp.float32)", "loss_scale=jnp.asarray(loss_scale)"),
    "no-op multiplies": ("_value_and_grad", "is_unit = isinstance(state, UnitLossScaleState)", "is_unit = False"),
    "first of several scales taken": ("_state", "if len(found) == 1:", "if found:"),
    # gradients
    "unscaled by another scale": ("_value_and_grad", "else divide(grads, seed)", "else divide(grads, seed * 2)"),
    "unscaled by the uncapped scale": ("_value_and_grad", "_with_cotangent(loss, seed), (aux, seed)", "_with_cotangent(loss, seed), (aux, state.loss_scale)"),
    "loss multiplied": ("_value_and_grad", "return _with_cotangent(loss, seed), (aux, seed)", "return loss * seed, (aux, seed)"),
    "no upcast": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits >= 16"),
    "float64 cut to float32": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits == 32"),
    "no cap for float16": ("_state", "min(info.maxexp - 1, 126)", "126"),
    "cap at the largest number": ("_state", "2.0 ** min(info.maxexp - 1, 126)", "min(float(info.max), 2.0**126)"),
    "reciprocal flushes to zero": ("_state", "min(info.maxexp - 1, 126)", "min(info.maxexp - 1, 127)"),
    "imaginary part dropped": ("_state", "apply_to_leaf(leaf.real), apply_to_leaf(leaf.imag)", "apply_to_leaf(leaf.real), leaf.imag * 0"),
    "overwrites divided": ("_tree", "_is_inexact(leaf) and OVERWRITE_WITH_GRADIENT not in names", "_is_inexact(leaf)"),
    "integers scaled": ("_tree", "jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)", "jnp.issubdtype(jnp.result_type(leaf), jnp.number)"),
    "signature lost": ("_value_and_grad", "    @functools.wraps(fun)\n    def grad_fun", "    def grad_fun"),
    "keyword arguments lost": ("_value_and_grad", "(loss, (aux, seed)), grads = differentiated(*args, **kwargs)", "(loss, (aux, seed)), grads = differentiated(*args)"),
    "loss of any shape": ("_value_and_grad", "if shape != () or not", "if not"),
    # the verdict
    "verdict from a sum": ("_tree", "jnp.all(jnp.isfinite(leaf))", "jnp.isfinite(jnp.sum(leaf))"),
    "verdict blind to inf": ("_tree", "jnp.all(jnp.isfinite(leaf))", "~jnp.any(jnp.isnan(leaf))"),
    "verdict on the first leaf": ("_tree", "finite = finite & jnp.all(jnp.isfinite(leaf))", "return agree(jnp.all(jnp.isfinite(leaf)), axis_name)"),
    "verdict on the updates": ("_loss_scaled", "jnp.stack([all_finite(grads), ", f"jnp.stack([all_finite({_INNER}[0]), "),
    "devices do not agree": ("_tree", "if axis_name is None:", "if True:"),
    "bad loss applied": ("_loss_scaled", "should_apply = grads_finite & loss_finite", "should_apply = grads_finite"),
    "bad loss lowers the scale": ("_loss_scaled", "scaling=tree_where(loss_finite, scaling, state.scaling)", "scaling=scaling"),
    "scale does not move": ("_loss_scaled", "scaling=tree_where(loss_finite, scaling, state.scaling)", "scaling=state.scaling"),
    # the skip
    "multiply instead of select": ("_tree", "return jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))", "return (a * pred + b * (1 - pred)).astype(dtypes[0]) if jnp.issubdtype(dtypes[0], jnp.floating) else jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))"),
    "selection reversed": ("_tree", "return jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))", "return jax.lax.select(pred, cast(b, dtypes[0]), cast(a, dtypes[0]))"),
    "branch reversed": ("_skip", "lambda: step(operand), lambda: kept", "lambda: kept, lambda: step(operand)"),
    "inner state moves on a skip": ("_loss_scaled", "            inner_state=inner_state,\n            grads_finite", f"            inner_state={_INNER}[1],\n            grads_finite"),
    "updates of a skip are plus zero": ("_loss_scaled", "jax.lax.full_like(like, -0.0)", "jax.lax.full_like(like, 0.0)"),
    "raw infs reach the inner step": ("_skip", "taken = step(finite)", "taken = step(operand)"),
    "compiled when eager": ("_skip", "if not isinstance(pred, Tracer):", "if False:"),
    "selection on CPU": ("_skip", "cpu=lambda: jax.lax.cond(pred, lambda: step(operand), lambda: kept)", "cpu=lambda: select(step)"),
    "inner traced twice": ("_skip", "step = jax.jit(step, inline=True)  # traced", "pass  # traced"),
    "gives up": ("_loss_scaled", "should_apply = grads_finite & loss_finite", "should_apply = (grads_finite & loss_finite) | (state.notfinite_count > 100)"),
    # the wrapper
    "moments in half precision": ("_loss_scaled", "self.inner.init(map_gradients(widen, params))", "self.inner.init(params)"),
    "parameters shown in half precision": ("_loss_scaled", "grads, state.inner_state, map_gradients(widen, params), **extra_args\n            )", "grads, state.inner_state, params, **extra_args\n            )"),
    "weak types kept": ("_loss_scaled", "inner_state=cast_like(inner_state, inner_state)", "inner_state=inner_state"),
    "extra arguments dropped": ("_loss_scaled", "map_gradients(widen, params), **extra_args\n            )", "map_gradients(widen, params)\n            )"),
    "value not forwarded": ("_loss_scaled", 'extra_args = {"value": value, **extra_args}', "pass"),
    "counter wraps around": ("_loss_scaled", "optax.safe_increment(state.notfinite_count)", "state.notfinite_count + 1"),
    "counter not cleared": ("_loss_scaled", "jnp.where(should_apply, 0, ", "jnp.where(should_apply, state.notfinite_count, "),
    "total of bad losses lost": ("_loss_scaled", "_count(~loss_finite, state.total_notfinite_loss)", "state.total_notfinite_loss"),
    "parameters change their dtype": ("_loss_scaled", "return cast_like(optax.apply_updates(map_gradients(widen, params), updates), params)", "return optax.apply_updates(map_gradients(widen, params), updates)"),
    # reports and Flax
    "check one step late": ("_report", 'if counters["notfinite_count"] <= max_consecutive', 'if counters["notfinite_count"] <= max_consecutive + 1'),
    "check blames the wrong pass": ("_report", 'if counters["total_notfinite_loss"] >= counters["notfinite_count"]', 'if counters["total_notfinite_loss"] < counters["notfinite_count"]'),
    "step counts attempts": ("flax", 'step = keep("step", self.step + 1, self.step)', "step = self.step + 1"),
    "replaced fields not kept": ("flax", "new if name in always_replace else", "new if True else"),
    "no field opted out": ("flax", "new if name in always_replace else", "new if False else"),
    "overwrites replaced on a skip": ("flax", 'new = keep(f"grads[{OVERWRITE_WITH_GRADIENT!r}]", new, old)', "pass"),
    "Flax imported by the core": ("__init__", "from ._spec import", "from . import flax as _flax\nfrom ._spec import"),
    # diagnostics
    "diagnosis: subnormal numbers flushed": ("_diagnose_bits", "        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)", "        bits = jnp.where(leaf == 0, jnp.uint32(0), jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32))"),
    "diagnosis: exponents of subnormal numbers": ("_diagnose_bits", "jnp.where(field == 0, leading + _SMALLEST_EXPONENT, field - 127)", "field - 127"),
    "diagnosis: mantissas of subnormal numbers": ("_diagnose_bits", "jnp.where(field == 0, subnormal, mantissa)", "mantissa"),
    "diagnosis: imaginary part forgotten": ("_diagnose_bits", "jnp.stack([leaf.real, leaf.imag])", "leaf.real"),
    "diagnosis: float64 rounded to float32 first": ("_diagnose_bits", "return _cut(jax.lax.bitcast_convert_type(leaf, jnp.uint64))", "leaf = leaf.astype(jnp.float32)"),
    "diagnosis: a tie away from zero": ("_diagnose_formats", "_boundary(subnormal / 2, inclusive=False)", "_boundary(subnormal / 2, inclusive=True)"),
    "diagnosis: subnormal up to the smallest normal": ("_diagnose_formats", "normal - subnormal / 2", "normal"),
    "diagnosis: overflow from the largest number on": ("_diagnose_formats", "largest + spacing / 2", "largest"),
    "diagnosis: e4m3fn overflows at a tie": ("_diagnose_formats", "inclusive=largest / spacing % 2 == 1", "inclusive=True"),
    "diagnosis: the scale is applied the wrong way": ("_diagnose_histogram", "boundary.exponent - exponent - MIN_EXPONENT", "boundary.exponent + exponent - MIN_EXPONENT"),
    "diagnosis: histograms concatenate": ("_diagnose_histogram", "    def __add__", "    def _add"),
    "diagnosis: devices not summed up": ("_diagnose_histogram", "if axis_name is not None:", "if False:"),
    "diagnosis: counts of one device": ("_diagnose_leaves", "if axis_name is not None:", "if False:"),
    "diagnosis: best leaf first": ("_diagnose_leaves", "reverse=True", "reverse=False"),
    "diagnosis: largest may be inf": ("_diagnose_leaves", "jnp.where(is_finite, bits, zero)", "bits"),
    "diagnosis: zeros count as flushed": ("_diagnose_leaves", "~is_zero & (bits < nonzero)", "bits < nonzero"),
    "diagnosis: an overflow is suggested": ("_diagnose_suggest", "if not lost[k].overflowed]", "]"),
    "diagnosis: tolerance ignored": ("_diagnose_suggest", "max(tolerance * total, lost[fits[-1]].flushed)", "lost[fits[-1]].flushed"),
    "diagnosis: always needed": ("_diagnose_suggest", "needed = 0 not in best", "needed = True"),
    "diagnosis: layers overwrite each other": ("_diagnose_underflow", "layers.get(layer, 0) + ", ""),
    "diagnosis: one scale too high": ("_diagnose_calibrate", "good = min(exponent, self.high)", "good = min(exponent + 1, self.high)"),
    "diagnosis: later batches not tried": ("_diagnose_calibrate", "        search.look_at(batch)\n", "        search.look_at(batch)\n        break\n"),
    "diagnosis: too many passes": ("_diagnose_calibrate", "while bad - good > 1 and self.passes < self.max_passes:", "while bad - good > 1:"),
    "diagnosis: traced for each scale": ("_diagnose_calibrate", "    @jit\n", "    @(lambda fun: fun)\n"),
    "diagnosis: a bad loss is accepted": ("_diagnose_calibrate", "if not jnp.isfinite(loss):", "if False:"),
    "diagnosis: what a float16 loss carries": ("_diagnose_calibrate", "self.high = min(self.high, math.frexp(largest)[1] - 1)", "pass"),
    "diagnosis: unsure, and does not say so": ("_diagnose_calibrate", "self.is_largest = bad - good == 1", "self.is_largest = True"),
    "diagnosis: history waits": ("_diagnose_history", "self._on_device.append(_pack(floats, ints))", "self._on_device.append(jax.device_get(_pack(floats, ints)))"),
    "diagnosis: history fetches the youngest": ("_diagnose_history", "if len(self._on_device) >= 2 * _CHUNK:", "if len(self._on_device) >= _CHUNK:"),
    "diagnosis: skips before the first step counted": ("_diagnose_history", "return total - total[0] + bad[0]", "return total"),
    "diagnosis: flags name the finite leaves": ("_nonfinite_leaves", "if np.any(flag)", "if not np.any(flag)"),
}  # fmt: skip


def run_suite(folder):
    """The exit status of the suite in a copy of the project, and the first failure."""
    command = [sys.executable, "-m", "pytest", "-xq", "-n0", "-p", "no:cacheprovider"]
    command += [f"tests/{test}.py" for test in TESTS]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    failures = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return result.returncode, (failures or [result.stdout[-300:] + result.stderr[-300:]])[0][:110]


def copy_project(folder):
    ignored = shutil.ignore_patterns(".*", "__pycache__", "dist")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def try_mutation(name):
    file, old, new = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_project(pathlib.Path(temporary) / "copy")
        path = folder / "jaxscale" / f"{file}.py"
        text = path.read_text()
        if text.count(old) != 1:
            return name, False, f"not planted: {text.count(old)} places in {file}.py match"
        path.write_text(text.replace(old, new))
        status, failure = run_suite(folder)
        return name, status == 1, failure


def main(words):
    names = [name for name in MUTATIONS if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as temporary:
        status, failure = run_suite(copy_project(pathlib.Path(temporary) / "copy"))
    if status:
        sys.exit(f"The suite is red before anything is planted: {failure}")
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, red, failure in pool.map(try_mutation, names):
            caught += red
            print(f"{'caught' if red else 'MISSED':7} {name:42} {failure}", flush=True)
    print(f"{caught} of {len(names)} planted bugs were caught")
    sys.exit(caught != len(names))


if __name__ == "__main__":
    main(sys.argv[1:])
