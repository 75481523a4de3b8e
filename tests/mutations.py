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
    "test_state_dict",
    "test_tree",
    "test_never",
    "test_user_reports",
    "test_value_and_grad",
    "test_errors",
    "test_accumulation",
    "test_quotient",
    "test_report",
    "test_diagnostics_calibrate",
    "test_track_leaves",
    "test_finite",
    "test_max_norm",
    "test_switched_off",
    "test_doctor",
    "test_diagnostics_json",
    "test_diagnostics_histogram",
    "test_diagnostics_leaves",
    "test_diagnostics_pictures",
    "test_diagnostics_trace",
    "test_flax",
    "test_compiled",
    "test_devices",
    "test_sharding",
    "test_package",
    "test_differentiation",
    "test_transformations",
    "test_kinds",
    "test_loss_scaled",
    "test_checkpoints",
    "test_soak",
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
    "LogMax counts overflows in other units": ("_logmax", "x = jnp.where(grads_finite, x, self.log_max)", "x = jnp.where(grads_finite, x, 2.0**self.log_max)"),
    "LogMax sees one device": ("_tree", "return largest if axis_name is None else jax.lax.pmax(largest, axis_name)", "return largest"),
    "gradients not shown to the policy": ("_step", "self.policy.observe(state.scaling, grads, grads_finite, axis_name=self.axis_name)", "self.policy.adjust(state.scaling, grads_finite)"),
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
    "unscaled by the uncapped scale": ("_value_and_grad", "loss, seed), (aux, seed)", "loss, seed), (aux, state.loss_scale)"),
    "loss multiplied": ("_value_and_grad", "return _with_tangent(jnp.multiply, loss, seed), (aux, seed)", "return loss * seed, (aux, seed)"),
    "derivative of the loss scaled": ("_value_and_grad", "if seed is not None:", "if False:"),
    "no upcast": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits >= 16"),
    "float64 cut to float32": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits == 32"),
    "no cap for float16": ("_state", "min(info.maxexp - 1, 126)", "126"),
    "cap at the largest number": ("_state", "2.0 ** min(info.maxexp - 1, 126)", "min(float(info.max), 2.0**126)"),
    "reciprocal flushes to zero": ("_state", "min(info.maxexp - 1, 126)", "min(info.maxexp - 1, 127)"),
    "imaginary part dropped": ("_state", "_apply(op, leaf.real, number), _apply(op, leaf.imag, number)", "_apply(op, leaf.real, number), leaf.imag * 0"),
    "overwrites divided": ("_tree", "_is_inexact(leaf) and OVERWRITE_WITH_GRADIENT not in names", "_is_inexact(leaf)"),
    "integers scaled": ("_tree", "jnp.issubdtype(_dtype(leaf), jnp.inexact)", "jnp.issubdtype(_dtype(leaf), jnp.number)"),
    "signature lost": ("_value_and_grad", "    @functools.wraps(fun)\n    def grad_fun", "    def grad_fun"),
    "keyword arguments lost": ("_value_and_grad", "(loss, (aux, seed)), grads = differentiated(*args, **kwargs)", "(loss, (aux, seed)), grads = differentiated(*args)"),
    "loss of any shape": ("_value_and_grad", "if shape != () or not", "if not"),
    # the verdict
    "verdict from a sum": ("_finite", "return jax.lax.is_finite(widen(part))", "return jax.lax.is_finite(jnp.sum(widen(part)))"),
    "verdict blind to inf": ("_finite", "return jax.lax.is_finite(widen(part))", "return ~jnp.isnan(widen(part))"),
    "verdict on one leaf": ("_finite", "for leaf in leaves for part in", "for leaf in leaves[:1] for part in"),
    "verdict on one traced leaf": ("_finite", "(cast(each, dtype) for each in sums)", "(cast(each, dtype) for each in sums[-1:])"),
    "verdict by a sum": ("_finite", "return jnp.sum(leaf - leaf)", "return jnp.sum(leaf) * 0"),
    "quotients of another scale": ("_state", "1 / each.divisor for", "2 / each.divisor for"),
    "quotients not divided": ("_state", "leaf if quotient is None else _apply(jax.lax.mul, leaf, factors[id(quotient.divisor)])", "leaf"),
    "quotients not remembered": ("_quotient", "        _QUOTIENTS[key] = own,", "        own,"),
    "quotients remembered for ever": ("_quotient", "weakref.ref(leaf, lambda _: _QUOTIENTS.pop(key, None))", "lambda: leaf"),
    "verdict on the updates": ("_step", "evidence(grads, by_leaf", f"evidence({_INNER}[0], by_leaf"),
    "groups cut short": ("_finite", "range(0, len(leaves), most)", "range(0, most, most)"),
    "types put together": ("_finite", "(aval, i if alone else None)", "(aval.dtype, i if alone else None)"),
    "leaves put together anywhere": ("_finite", "return jax.device_count() == 1", "return True"),
    "automatic axes taken for known": ("_finite", "mesh.size == 1 or AxisType.Auto not in mesh.axis_types", "True"),
    "leaves never put together": ("_finite", "alone = by_leaf or not _is_placed(aval)", "alone = True"),
    "parts of sharded leaves": ("_finite", "if _is_whole(aval) and leaves", "if leaves"),
    "a part left out": ("_finite", "return jnp.split(leaf, number, axis)", "return jnp.split(leaf, number, axis)[1:]"),
    "squares without a verdict": ("_finite", "jax.lax.add(jax.lax.mul(leaf, leaf), jax.lax.sub(leaf, leaf))", "jax.lax.mul(leaf, leaf)"),
    "squares of real parts": ("_finite", "_squares(leaf.real) + _squares(leaf.imag)", "_squares(leaf.real)"),
    "sums in float32 alone": ("_finite", "key=lambda d: d.itemsize, default=jnp.float32)", "key=lambda d: -d.itemsize, default=jnp.float32)"),
    "clipped always": ("_clip", "jnp.maximum(norm, max_norm)", "norm"),
    "norm of one micro-batch": ("_step", "self.max_norm is not None and one_batch and", "self.max_norm is not None and"),
    "norm with NaNs as errors": ("_step", "one_batch and not nans_are_errors()", "one_batch"),
    "norm of what is not stepped with": ("_step", "global_norm(grads) if norm is None", "jnp.float32(1) if norm is None"),
    "max_norm lost by the order": ("_loss_scaled", "max_norm=rule.max_norm if max_norm is None else max_norm", "max_norm=max_norm"),
    "off is on": ("_step", "if not self.skips:", "if False:"),
    "off for a dynamic scale": ("_loss_scaled", "_NEVER_MOVE = (NoOpLossScale, FixedLossScale)", "_NEVER_MOVE = object"),
    "branch for none": ("_skip", "pred | ~branches", "pred"),
    "zeros of one type for all": ("_skip", "aval = jax.typeof(leaf)", "aval = jax.typeof(leaf).dtype"),
    "no zeros where it does not count": ("_skip", "tree_where(choose, operand, _zeros(operand))", "operand"),
    "devices do not agree": ("_finite", "if axis_name is None:", "if True:"),
    "bad loss applied": ("_step", "should_apply = grads_finite & loss_finite", "should_apply = grads_finite"),
    "bad loss lowers the scale": ("_step", "scaling=tree_where(observed, scaling, state.scaling)", "scaling=scaling"),
    "scale does not move": ("_step", "scaling=tree_where(observed, scaling, state.scaling)", "scaling=state.scaling"),
    # the skip
    "multiply instead of select": ("_tree", "return jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))", "return (a * pred + b * (1 - pred)).astype(dtypes[0]) if jnp.issubdtype(dtypes[0], jnp.floating) else jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))"),
    "selection reversed": ("_tree", "return jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))", "return jax.lax.select(pred, cast(b, dtypes[0]), cast(a, dtypes[0]))"),
    "branch reversed": ("_skip", "lambda: step(operand), lambda: kept", "lambda: kept, lambda: step(operand)"),
    "inner state moves on a skip": ("_step", "inner_state=self.window.turn(window, new_state, due)", f"inner_state={_INNER}[1]"),
    "updates of a skip are plus zero": ("_step", "else -0.0", "else 0.0"),
    "imaginary part of a skip is plus zero": ("_step", "complex(-0.0, -0.0) if is_complex", "complex(-0.0, 0.0) if is_complex"),
    "raw infs reach the inner step": ("_skip", "taken = step(finite)", "taken = step(operand)"),
    "compiled when eager": ("_skip", "if not isinstance(pred, Tracer):", "if False:"),
    "selection on CPU": ("_skip", "cpu=lambda: jnp.array(True)", "cpu=lambda: jnp.array(False)"),
    "inner traced twice": ("_skip", "step = jax.jit(step)  # traced", "pass  # traced"),
    "gives up": ("_step", "should_apply = grads_finite & loss_finite", "should_apply = (grads_finite & loss_finite) | (state.notfinite_count > 100)"),
    # the wrapper
    "moments in half precision": ("_step", "        params = map_gradients(widen, params)\n        inner_state", "        inner_state"),
    "parameters shown in half precision": ("_step", "grads, opt_state, map_gradients(widen, params), **given", "grads, opt_state, params, **given"),
    "weak types kept": ("_step", "self.window.init(params, cast_like(inner_state, inner_state))", "self.window.init(params, inner_state)"),
    "extra arguments dropped": ("_step", "**given, **extra_args", "**given"),
    "value not forwarded": ("_step", '{"value": value}', "{}"),
    "counter wraps around": ("_step", "optax.safe_increment(state.notfinite_count)", "state.notfinite_count + 1"),
    "counter not cleared": ("_step", "jnp.where(should_apply, 0, ", "jnp.where(should_apply, state.notfinite_count, "),
    "total of bad losses lost": ("_step", "_count(~loss_finite, state.total_notfinite_loss)", "state.total_notfinite_loss"),
    "parameters change their dtype": ("_step", "return apply_updates(params, updates)", "return optax.apply_updates(map_gradients(widen, params), updates)"),
    "sum rounded twice": ("_tree", "(widen(param) if _is_inexact(param) else param) + update", "param + cast(update, jnp.result_type(param))"),
    # accumulation
    "bad micro-batch summed": ("_accumulate", "jnp.where(counts, acc + cast", "jnp.where(True, acc + cast"),
    "bad micro-batch counted": ("_accumulate", "state.counted + counts.astype(jnp.int32)", "state.counted + 1"),
    "bad micro-batch takes no place": ("_accumulate", "optax.safe_increment(state.mini_step))", "state.mini_step + counts.astype(jnp.int32))"),
    "mean over the whole window": ("_accumulate", "ratio = self._length(state).astype(jnp.float32) / counted", "ratio = jnp.float32(1)"),
    "window never dropped": ("_accumulate", 'if self.drop == "window" else', 'if self.drop == "never" else'),
    "empty window stepped": ("_accumulate", "else state.counted > 0", "else state.counted >= 0"),
    "window not emptied": ("_accumulate", "jnp.where(full, jnp.zeros_like(acc), acc)", "acc"),
    "mean loss not emptied": ("_accumulate", "jnp.where(full, 0.0, state.acc_value)", "state.acc_value"),
    "a sum for a mean": ("_accumulate", "acc + cast(leaf, acc.dtype) / length.astype(acc.dtype)", "acc + cast(leaf, acc.dtype)"),
    "accumulator holds parameters": ("_accumulate", "jax.tree.map(jnp.zeros_like, only_gradients(params))", "jax.tree.map(jnp.zeros_like, params)"),
    "micro-batches counted as steps": ("_accumulate", "                stepped, optax.safe_increment(state.gradient_step), state.gradient_step\n", "                True, optax.safe_increment(state.gradient_step), state.gradient_step\n"),
    "growth counts micro-batches": ("_step", 'if self.window.growth_unit == "optimizer_step":', "if False:"),
    "growth counts optimizer steps": ("_step", 'if self.window.growth_unit == "optimizer_step":', "if True:"),
    "bad micro-batch keeps the scale": ("_step", "observed &= due | ~grads_finite", "observed &= due"),
    "window around changes nothing": ("_loss_scaled", "return _transformation(dataclasses.replace(rule, window=window))", "return _transformation(rule)"),
    "axis name lost by the order": ("_loss_scaled", "axis_name=rule.axis_name if axis_name is None else axis_name", "axis_name=axis_name"),
    "wrapped twice": ("_loss_scaled", "if rule.policy != NoOpLossScale():", "if False:"),
    "wrapped deeper": ("_step", "        _check_not_nested(inner_state)\n", ""),
    # reports and Flax
    "check blames good data": ("_check", "        if applied\n        else", "        if not applied\n        else"),
    "check mistakes a floor": ("_check", "if lowest < state.scaling.loss_scale:", "if lowest <= state.scaling.loss_scale:"),
    "check mistakes a fixed scale": ("_check", "if isinstance(policy, FixedLossScale):", "if False:"),
    "check forgets the optimizer": ("_check", "policy = rule.policy if isinstance(rule, LossScaled) else None", "policy = None"),
    "check one step late": ("_check", "if state.notfinite_count <= max_consecutive", "if state.notfinite_count <= max_consecutive + 1"),
    "check blames the wrong pass": ("_check", "if state.total_notfinite_loss < state.notfinite_count", "if state.total_notfinite_loss >= state.notfinite_count"),
    "step counts attempts": ("flax", "step = select(call, stepped(before, after), self.step + 1, self.step)", "step = self.step + 1"),
    "replaced fields not kept": ("flax", "new if name in always_replace else", "new if True else"),
    "no field opted out": ("flax", "new if name in always_replace else", "new if False else"),
    "overwrites replaced on a skip": ("flax", 'new = keep(f"grads[{OVERWRITE_WITH_GRADIENT!r}]", new, old)', "pass"),
    # the state dictionary
    "dictionary shares its arrays": ("_state_dict", 'return np.array(_data(_at("tree"', 'return np.asarray(_data(_at("tree"'),
    "dictionary lives on in the tree": ("_state_dict", "np.array(_data(given, leaf))", "np.asarray(_data(given, leaf))"),
    "None written as empty": ("_state_dict", "return None if node is None else nodes", "return nodes"),
    "no version written": ("_state_dict", '{"version": _VERSION} | save', "{} | save"),
    "later versions read": ("_state_dict", "range(1, _VERSION + 1):", "range(1, 99):"),
    "version overwritten": ("_state_dict", ' or "version" in children', ""),
    "unit scale overwritten": ("_state_dict", "if isinstance(node, UnitLossScaleState)", "if False"),
    "another's dictionary read": ("_state_dict", "if values and values.keys().isdisjoint(children)", "if False"),
    "inner state takes a default": ("_state_dict", "if not own or name in _REQUIRED:", "if not own:"),
    "state inside a window takes a default": ("_state_dict", '"inner_opt_state", ', ""),
    "count of a window takes a default": ("_state_dict", ', "counted")', ")"),
    "any named tuple takes defaults": ("_state_dict", "package == __name__.partition", "True or __name__.partition"),
    "TrainState takes defaults": ("_state_dict", 'hasattr(node, "_fields") and package', "package"),
    "earlier states not read": ("_state_dict", "own = _is_own(node)", "own = False"),
    "unknown keys ignored": ("_state_dict", "if not own:\n            surplus", "if False:\n            surplus"),
    "shapes unchecked": ("_state_dict", "if values.shape != np.shape(like)", "if False"),
    "numbers rounded": ("_state_dict", "if not exact.all()", "if False"),
    "numbers of another kind": ("_state_dict", "if kinds[0] != kinds[1] or", "if"),
    "numbers wrapped": ("_state_dict", "exact &= (cast < 0) == (values < 0)", "pass"),
    "NaN refused": ("_state_dict", " | (values != values)", ""),
    "weak type lost": ("_state_dict", "elif jax.typeof(target).weak_type", "elif False"),
    "sharding lost": ("_state_dict", "target.sharding if target.committed else None", "None"),
    "committed to a device": ("_state_dict", "target.sharding if target.committed else None", "target.sharding"),
    "kind of key lost": ("_state_dict", "impl = jax.random.key_impl(target)", "impl = None"),
    "read inside jit": ("_state_dict", " or isinstance(leaf, Tracer)", ""),
    "Python number becomes an array": ("_state_dict", "return type(target)(values[()])", "return values"),
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
    "tracking: a finite step clears it": ("_nonfinite_leaves", "jnp.where(grads_finite, flag, ", "jnp.where(grads_finite, False, "),
    "tracking: only the first overflow": ("_nonfinite_leaves", "else new)", "else new | flag)"),
    "tracking: each device its own": ("_step", "= agree(jnp.stack(local), self.axis_name)", "= (*agree(jnp.stack(local[:2]), self.axis_name), *local[2:])"),
    "tracking: a second pass": ("_step", "verdict, squares = combined(numbers)", "verdict, squares = combined(evidence(grads))"),
    "diagnosis: a scatter has no float32": ("_diagnose_numbers", "_SCATTERS.get(eqn.primitive.name)", "None"),
    "diagnosis: the sum of all that is tiny": ("_diagnose_numbers", "_share_of_sum(exact, zeros)", "_share_of_sum(exact, tiny)"),
    "diagnosis: a float16 loss is unscaled in float16": ("_diagnose_trace", "unseed(grads, widen(seed))", "unseed(grads, seed)"),
    "diagnosis: a scan of length 0 is run as one equation": ("_diagnose_interpret", 'case "scan":', 'case "scan" if eqn.params["length"]:'),
    "diagnosis: a ref is an array": ("_diagnose_jaxpr", 'hasattr(atom.aval, "inner_aval")', "False"),
    "diagnosis: a ref is never written to": ("_diagnose_interpret", "            cell.value = value\n", "            pass\n"),
    "diagnosis: a ref is not read in the next iteration": ("_diagnose_jaxpr", "*stacked, *refs)", "*stacked, *needs[len(eqn.outvars) :])"),
    "diagnosis: a row of a ref is not written back": ("_diagnose_interpret", "each.value = _with_slice(each.value, i, part.value)", "pass"),
    "diagnosis: refs from outside are forgotten": ("_diagnose_interpret", "self._cells.setdefault(id(ref), Cell(Value(ref[...])))", "Cell(Value(ref[...] * 0))"),
    "diagnosis: an empty ref outside of jit": ("_diagnose_numbers", "return jax.jit(bind)(*inputs)", "return bind(*inputs)"),
    "diagnosis: a trace is not JSON": ("_diagnose_words", "dataclasses.is_dataclass(result)", "False"),
    "diagnosis: NaN and the infinities are None in JSON": ("_diagnose_words", 'return "NaN" if math.isnan(result) else "Infinity" if result > 0 else "-Infinity"', "return None"),
    "diagnosis: -inf is inf in JSON": ("_diagnose_words", '"Infinity" if result > 0 else "-Infinity"', '"Infinity"'),
    "diagnosis: what has a dtype is an array": ("_diagnose_bits", "return isinstance(leaf, (jax.Array, np.ndarray, np.generic))", 'return hasattr(leaf, "dtype")'),
    "diagnosis: whatever has a dtype is differentiated": ("_diagnose_trace", "is_number = is_ndarray(leaf) or isinstance(leaf, (float, complex))", "is_number = True"),
    "diagnosis: history takes arrays only": ("_diagnose_history", "jnp.result_type(value)", "value.dtype"),
    "doctor: an underflow is no problem": ("_doctor_findings", "return may_matter(place) and not _is_close(exam)", "return False"),
    "doctor: float32 is not asked": ("_doctor_findings", "return may_matter(place) and not _is_close(exam)", "return may_matter(place)"),
    "doctor: the smallest numbers matter too": ("_doctor_exam", " and place.lost_sum >= _LOST_SUM", ""),
    "doctor: only the last gradients are judged": ("_doctor_scales", "compared is not None and max(compared.flushed, compared.error) > _NEEDED", "bool(exam.suggestion.needed)"),
    "doctor: a problem for each operation": ("_doctor_findings", "of_line.setdefault((place.file, place.line), [])", "of_line.setdefault((place.primitive, id(place)), [])"),
    "doctor: the backward pass comes first": ("_doctor_findings", 'key=lambda place: place.direction != "forward"', 'key=lambda place: place.direction == "forward"'),
    "doctor: no infinity is meant": ("_doctor_findings", "if not exam.trace.nonfinite_outputs:\n        title", "if False:\n        title"),
    "doctor: functions are differentiated": ("_doctor_target", "trained = only_gradients(params)", "trained = params"),
    "doctor: only the loss of a pair": ("_doctor_exam", "report = trace(target.loss_fn, init_state(used), has_aux=target.has_aux)", "report = trace(lambda *a: target.loss_fn(*a)[0] if target.has_aux else target.loss_fn(*a), init_state(used))"),
    "doctor: always content": ("_doctor", "return int(any(finding.is_problem for finding in found))", "return 0"),
    "doctor: what the model prints is in the JSON": ("_doctor", "redirect_stdout(sys.stderr) if options.json", "redirect_stdout(stdout) if options.json"),
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
