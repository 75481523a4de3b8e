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
    "policies/test_policies",
    "presets/test_traces",
    "presets/test_presets",
    "core/test_state",
    "core/test_state_dict",
    "core/test_tree",
    "integration/test_user_reports",
    "core/test_value_and_grad",
    "core/test_errors",
    "integration/test_nnx",
    "core/test_accumulation",
    "core/test_quotient",
    "core/test_progress",
    "diagnostics/test_calibrate",
    "core/test_track_leaves",
    "core/test_verdict",
    "core/test_inner",
    "core/test_max_norm",
    "core/test_switched_off",
    "doctor/test_doctor",
    "diagnostics/test_json",
    "diagnostics/test_histogram",
    "diagnostics/test_leaves",
    "diagnostics/test_pictures",
    "diagnostics/test_trace",
    "integration/test_flax",
    "core/test_compiled",
    "integration/test_devices",
    "integration/test_sharding",
    "integration/test_package",
    "integration/test_help",
    "integration/test_differentiation",
    "integration/test_transformations",
    "core/test_kinds",
    "core/test_optimizer",
    "integration/test_checkpoints",
    "integration/test_soak",
    "core/test_types",
]

_INNER = "self.inner.update(grads, state.inner_state, map_gradients(widen, params), **extra_args)"

# name: (file, what stands there, what is planted instead)
MUTATIONS = {
    # how the scale moves
    "growth one step late": ("_policies/dynamic", "grow = streak >= ", "grow = streak > "),
    "growth by equality": ("_policies/dynamic", "grow = streak >= ", "grow = streak == "),
    "no cap": ("_policies/dynamic", "jnp.minimum(scale * self.growth_factor, self.max_scale)", "scale * self.growth_factor"),
    "no floor": ("_policies/dynamic", "jnp.maximum(scale * self.backoff_factor, self.min_scale)", "scale * self.backoff_factor"),
    "growth lowers a scale above the cap": ("_policies/dynamic", "return jnp.maximum(scale, grown)", "return grown"),
    "backoff raises a scale below the floor": ("_policies/dynamic", "return jnp.minimum(scale, lowered)", "return lowered"),
    "backoff does not clear the streak": ("_policies/dynamic", "growth_tracker=jnp.zeros_like(state.growth_tracker)", "growth_tracker=state.growth_tracker"),
    "growth does not clear the streak": ("_policies/dynamic", "growth_tracker=jnp.where(grow, 0, streak)", "growth_tracker=streak"),
    "hysteresis never refilled": ("_policies/dynamic", "jnp.where(grow, self.hysteresis, state.hysteresis_tracker)", "state.hysteresis_tracker"),
    "hysteresis refilled by any finite step": ("_policies/dynamic", "jnp.where(grow, self.hysteresis, state.hysteresis_tracker)", "jnp.full_like(state.hysteresis_tracker, self.hysteresis)"),
    "hysteresis tolerates one too many": ("_policies/dynamic", "jnp.where(left == 0, self._lowered", "jnp.where(state.hysteresis_tracker == 0, self._lowered"),
    "a ruined scale stays ruined": ("_state", "jnp.where(usable, loss_scale, init_scale)", "loss_scale"),
    "streak wraps around": ("_policies/dynamic", "jnp.asarray(optax.safe_increment(state.growth_tracker))", "state.growth_tracker + 1"),
    "growth factor of 1 accepted": ("_checks", "if not value > 1:", "if not value >= 1:"),
    "backoff factor of 1 accepted": ("_checks", "if not 0 < value < 1:", "if not 0 < value <= 1:"),
    "bounds unchecked": ("_policies/dynamic", "if not self._in_bounds()", "if False"),
    "delay forgotten at the start": ("presets/_rule", "self.hysteresis, -self.growth_delay)", "self.hysteresis)"),
    "delay forgotten after a bad step": ("presets/_rule", "jnp.full_like(after.growth_tracker, -self.growth_delay)", "after.growth_tracker"),
    "finite step never refills": ("presets/_rule", "if self.refill_on_finite", "if False"),
    "backoff never refills": ("presets/_rule", "if self.refill_on_backoff", "if False"),
    "refused growth clipped": ("presets/_rule", "at_bound = self.max_scale if self.clip_growth else scale", "at_bound = self.max_scale"),
    "clamped on moves only": ("presets/_rule", 'if self.clamp == "steps"', "if False"),
    "clamped growth kept above the cap": ("presets/_rule", 'jnp.maximum(scale, grown) if self.clamp == "never" else grown', "jnp.maximum(scale, grown)"),
    "clamped backoff kept below the floor": ("presets/_rule", 'jnp.minimum(scale, lowered) if self.clamp == "never" else lowered', "jnp.minimum(scale, lowered)"),
    "growth delay lost on the way to PyTorch": ("presets/_saved", "policy.growth_delay if isinstance(policy, PresetLossScale) else 0", "0"),
    # the other policies and the presets
    "tolerance exceeded, not reached": ("_policies/tolerance", "rate >= self.tolerance", "rate > self.tolerance"),
    "rate since the start": ("_policies/tolerance", "steps_since_change=jnp.where(grow, 0, steps)", "steps_since_change=steps"),
    "overflows cleared by growth": ("_policies/tolerance", "overflows_since_backoff=state.overflows_since_backoff", "overflows_since_backoff=jnp.where(grow, 0, state.overflows_since_backoff)"),
    "zero gradients poison LogMax": ("_policies/logmax", "tree_where(~grads_finite | (amax > 0), moved, state)", "moved"),
    "LogMax counts overflows in other units": ("_policies/logmax", "x = jnp.where(grads_finite, x, self.log_max)", "x = jnp.where(grads_finite, x, 2.0**self.log_max)"),
    "LogMax sees one device": ("_tree", "return largest if axis_name is None else jax.lax.pmax(largest, axis_name)", "return largest"),
    "gradients not shown to the policy": ("_policies/base", "state, grads_finite, grads=grads, axis_name=axis_name)", "state, grads_finite, axis_name=axis_name)"),
    "Flax grows one step early": ("presets/_jax", "growth_interval, least=0) + 1", "growth_interval, least=0)"),
    "reciprocal rounded up": ("presets/_common", "if float(reciprocal) * float(np.float32(value)) > 1", "if False"),
    "tracker not restored": ("presets/_saved", "    if tracker:", "    if False:"),
    "fixed scale reacts": ("_policies/fixed", "return state, jnp.array(True)", "return state, jnp.array(False)"),
    "fixed scale below 1 accepted": ("_policies/fixed", "if value < 1", "if value < 0"),
    "bool passes for a number": ("_checks", "if isinstance(value, bool):  # a bool", "if False:  # a bool"),
    # states
    "weakly typed state": ("_state", "loss_scale=jnp.asarray(loss_scale, jnp.float32)", "loss_scale=jnp.asarray(loss_scale)"),
    "no-op multiplies": ("_value_and_grad", "is_unit = isinstance(state, UnitLossScaleState)", "is_unit = False"),
    "first of several scales taken": ("_state", "if len(found) == 1:", "if found:"),
    "a name taken for a state": ("_state", 'return marked and hasattr(node, "_fields")', 'return "loss_scale" in getattr(node, "_fields", ())'),
    "state of an optimizer known by its name alone": ("_scaling", "return is_loss_scaled(node) or is_policy_state(node)", "return is_policy_state(node)"),
    "tolerance state unmarked": ("_policies/tolerance", "    is_loss_scale_state = True", "    pass"),
    "LogMax state unmarked": ("_policies/logmax", "    is_loss_scale_state = True", "    pass"),
    "unmarked state not told": ("_state", 'if "loss_scale" in getattr(tree, "_fields", ()):', "if False:"),
    "population scaled as one": ("_state", "    if shape != ():", "    if False:"),
    "policy does not tell the order": ("_state", "if _is_state(grads) and not _is_state(state):", "if False:"),
    "policy takes another's state": ("_state", "elif isinstance(state, kind):", "elif True:"),
    "policy does not tell an optimizer's state": ("_state", 'elif _is_optimizers(state) or hasattr(state, "opt_state"):', "elif False:"),
    "fixed scale takes any state": ("_policies/fixed", "state, LossScaleState, grads)", "state)"),
    "policy reads variables": ("_state", "        state = unwrapped(state)\n", ""),
    "check reads variables": ("_progress", "unwrapped(state._replace(inner_state=None))", "state._replace(inner_state=None)"),
    "metrics named by variables": ("_progress", "named_flags(unwrapped(node.nonfinite_leaves))", "named_flags(node.nonfinite_leaves)"),
    "check takes one number of each array": ("_progress", "leaf.reshape(-1, *leaf.shape[axes:])[worst]", "np.ravel(leaf)[worst]"),
    # gradients
    "seeds by example": ("_value_and_grad", "return seed if seed is None or not seed.ndim else seed_of(seed.dtype)", "return seed"),
    "seeds by example of another dtype": ("_value_and_grad", "else seed_of(seed.dtype)", "else seed_of(jnp.float32)"),
    "gradients alone not told": ("_value_and_grad", "case (_, Seeded()):", "case (_, Seeded()) if False:"),
    "loss beside gradients not told": ("_value_and_grad", "case ((_, Seeded()), _):", "case ((_, Seeded()), _) if False:"),
    "unscaled by another scale": ("_value_and_grad", "else divide(grads, seed)", "else divide(grads, seed * 2)"),
    "unscaled by the uncapped scale": ("_value_and_grad", "loss, seed), Seeded(aux, seed)", "loss, seed), Seeded(aux, state.loss_scale)"),
    "loss multiplied": ("_value_and_grad", "return _with_tangent(jnp.multiply, loss, seed), Seeded(aux, seed)", "return loss * seed, Seeded(aux, seed)"),
    "derivative of the loss scaled": ("_value_and_grad", "if seed is not None:", "if False:"),
    "no upcast": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits >= 16"),
    "float64 cut to float32": ("_tree", "if jnp.finfo(dtype).bits >= 32", "if jnp.finfo(dtype).bits == 32"),
    "no cap for float16": ("_state", "min(info.maxexp - 1, 126)", "126"),
    "cap at the largest number": ("_state", "2.0 ** min(info.maxexp - 1, 126)", "min(float(info.max), 2.0**126)"),
    "reciprocal flushes to zero": ("_state", "min(info.maxexp - 1, 126)", "min(info.maxexp - 1, 127)"),
    "imaginary part dropped": ("_state", "_apply(op, leaf.real, number), _apply(op, leaf.imag, number)", "_apply(op, leaf.real, number), leaf.imag * 0"),
    "overwrites divided": ("_tree", "is_inexact(leaf) and OVERWRITE_WITH_GRADIENT not in names", "is_inexact(leaf)"),
    "integers scaled": ("_leaf", "jnp.issubdtype(dtype_of(leaf), jnp.inexact)", "jnp.issubdtype(dtype_of(leaf), jnp.number)"),
    "signature lost": ("_value_and_grad", "    @functools.wraps(fun)\n    def grad_fun", "    def grad_fun"),
    "keyword arguments lost": ("_value_and_grad", 'with_loss("value_and_grad", differentiated(*args, **kwargs))', 'with_loss("value_and_grad", differentiated(*args))'),
    "loss of any shape": ("_value_and_grad", "shape != () or not is_floating", "not is_floating"),
    # the verdict
    "verdict from a sum": ("_verdict", "return jax.lax.is_finite(widen(part))", "return jax.lax.is_finite(jnp.sum(widen(part)))"),
    "verdict blind to inf": ("_verdict", "return jax.lax.is_finite(widen(part))", "return ~jnp.isnan(widen(part))"),
    "verdict on one leaf": ("_verdict", "for leaf in leaves for part in", "for leaf in leaves[:1] for part in"),
    "verdict on one traced leaf": ("_verdict", "(cast(each, dtype) for each in sums)", "(cast(each, dtype) for each in sums[-1:])"),
    "verdict by a sum": ("_verdict", "jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))", "jnp.sum(functools.reduce(jax.lax.add, map(widen, parts))).real * 0 == 0"),
    "quotients of another scale": ("_state", "1 / each.divisor for", "2 / each.divisor for"),
    "quotients not divided": ("_state", "leaf if quotient is None else _apply(jax.lax.mul, leaf, factors[id(quotient.divisor)])", "leaf"),
    "quotients not remembered": ("_quotient", "        _QUOTIENTS[key] = own,", "        own,"),
    "quotients remembered for ever": ("_quotient", "weakref.ref(leaf, lambda _: _QUOTIENTS.pop(key, None))", "lambda: leaf"),
    "verdict on the updates": ("_step", "read(grads, by_leaf", f"read({_INNER}[0], by_leaf"),
    "groups cut short": ("_verdict", "range(0, len(leaves), most)", "range(0, most, most)"),
    "types put together": ("_verdict", "(aval, i if alone else None)", "(aval.dtype, i if alone else None)"),
    "leaves put together anywhere": ("_verdict", "return jax.device_count() == 1", "return True"),
    "automatic axes taken for known": ("_verdict", "mesh.size == 1 or AxisType.Auto not in mesh.axis_types", "True"),
    "leaves never put together": ("_verdict", "alone = by_leaf or not _is_placed(aval)", "alone = True"),
    "parts of sharded leaves": ("_verdict", "if _is_whole(aval) and _is_large", "if _is_large"),
    "a part left out": ("_verdict", "return jnp.split(leaf, number, axis)", "return jnp.split(leaf, number, axis)[1:]"),
    "squares without a verdict": ("_verdict", "return jax.lax.sub(square, jax.lax.max(excess, jax.lax.full_like(leaf, 0)))", "return square"),
    "squares of real parts": ("_verdict", "_squares(leaf.real, placed) + _squares(leaf.imag, placed)", "_squares(leaf.real, placed)"),
    "sums in float32 alone": ("_verdict", "key=lambda d: d.itemsize, default=jnp.float32)", "key=lambda d: -d.itemsize, default=jnp.float32)"),
    "clipped always": ("_verdict", "jnp.maximum(norm, max_norm)", "norm"),
    "norm of one micro-batch": ("_step", "self.max_norm is not None and self.window is None and", "self.max_norm is not None and"),
    "norm with NaNs as errors": ("_step", "self.window is None and not nans_are_errors()", "self.window is None"),
    "norm of what is not stepped with": ("_step", "global_norm(grads) if norm is None", "jnp.float32(1) if norm is None"),
    "max_norm lost by the order": ("_optimizer", "max_norm=wrapper.max_norm if max_norm is None else max_norm", "max_norm=max_norm"),
    "off is on": ("_step", "if not self.skips:", "if False:"),
    "off for a dynamic scale": ("_optimizer", "_NEVER_MOVE = (NoOpLossScale, FixedLossScale)", "_NEVER_MOVE = object"),
    "branch for none": ("_skip", "pred | ~branches", "pred"),
    "zeros of one type for all": ("_skip", "aval = jax.typeof(leaf)", "aval = jax.typeof(leaf).dtype"),
    "no zeros where it does not count": ("_skip", "tree_where(choose, operand, _zeros(operand))", "operand"),
    "devices do not agree": ("_verdict", "if axis_name is None:", "if True:"),
    "bad loss applied": ("_step", "counts = grads_finite & loss_finite", "counts = grads_finite"),
    "bad loss lowers the scale": ("_step", "scaling=tree_where(observed, scaling, state.scaling)", "scaling=scaling"),
    "scale does not move": ("_step", "scaling=tree_where(observed, scaling, state.scaling)", "scaling=state.scaling"),
    # the skip
    "multiply instead of select": ("_tree", "return jax.lax.select(pred, strong(a), strong(b))", "return (a * pred + b * (1 - pred)).astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else jax.lax.select(pred, strong(a), strong(b))"),
    "selection reversed": ("_tree", "return jax.lax.select(pred, strong(a), strong(b))", "return jax.lax.select(pred, strong(b), strong(a))"),
    "branch reversed": ("_skip", "lambda: step(operand), lambda: kept", "lambda: kept, lambda: step(operand)"),
    "inner state moves on a skip": ("_step", "return (params if applies else _no_updates(like, grads)), opt_state", f"return (params if applies else _no_updates(like, grads)), {_INNER}[1]"),
    "updates of a skip are plus zero": ("_step", "else -0.0", "else 0.0"),
    "imaginary part of a skip is plus zero": ("_step", "complex(-0.0, -0.0) if is_complex", "complex(-0.0, 0.0) if is_complex"),
    "raw infs reach the inner step": ("_skip", "taken = step(finite)", "taken = step(operand)"),
    "compiled when eager": ("_skip", "if not isinstance(branches, Tracer):", "if False:"),
    "selection on CPU": ("_skip", "cpu=lambda: jnp.array(True)", "cpu=lambda: jnp.array(False)"),
    "inner traced twice": ("_skip", "step = jax.jit(step)  # traced", "pass  # traced"),
    "gives up": ("_step", "counts = grads_finite & loss_finite", "counts = (grads_finite & loss_finite) | (state.notfinite_count > 100)"),
    # the wrapper
    "moments in half precision": ("_step", "        params = map_gradients(widen, params)\n        inner_state", "        inner_state"),
    "parameters shown in half precision": ("_step", "grads, opt_state, map_gradients(widen, params), **extra_args", "grads, opt_state, params, **extra_args"),
    "weak types kept": ("_step", "inner_state = cast_like(inner_state, inner_state)", "pass"),
    "extra arguments dropped": ("_step", "map_gradients(widen, params), **extra_args", "map_gradients(widen, params)"),
    "value not forwarded": ("_step", '{"value": value}', "{}"),
    "counter wraps around": ("_step", "optax.safe_increment(state.notfinite_count)", "state.notfinite_count + 1"),
    "counter not cleared": ("_step", "jnp.where(applied, 0, ", "jnp.where(applied, state.notfinite_count, "),
    "total of bad losses lost": ("_step", "_count(~loss_finite, state.total_notfinite_loss)", "state.total_notfinite_loss"),
    "parameters change their dtype": ("_step", "outcome = apply_updates(params, updates) if applies else addable(updates, params)\n            if not", "outcome = optax.apply_updates(map_gradients(widen, params), updates) if applies else updates\n            if not"),
    "sum rounded twice": ("_tree", "(widen(param) if is_inexact(param) else param) + update", "param + cast(update, jnp.result_type(param))"),
    "what has a dtype is an array": ("_leaf", "    return is_python_number(leaf)\n\n\ndef is_python", '    return is_python_number(leaf) or hasattr(leaf, "dtype")\n\n\ndef is_python'),
    "text of NumPy is an array": ("_leaf", "(_kind(dtype) is not None and dtype.kind != \"m\")", "True"),
    "differences in time are numbers": ("_leaf", ' and dtype.kind != "m")', ")"),
    "numbers of NumPy are no arrays": ("_leaf", "isinstance(leaf, (np.ndarray, np.generic))", "isinstance(leaf, np.ndarray)"),
    "choices are numbers": ("_leaf", "(enum.Enum, np.generic)", "np.generic"),
    "functions compared by identity alone": ("_leaf", "        return bool(a == b)\n", "        return False\n"),
    "text compared element by element": ("_leaf", "        if isinstance(a, np.ndarray):  # of text or objects", "        if False:"),
    "what cannot be compared raises": ("_leaf", "    except Exception:  # a comparison", "    except KeyError:  # a comparison"),
    "Python numbers promote": ("_tree", "    if strengths[0] == strengths[1] < STRONG:", "    if True:"),
    "Python numbers wrap": ("_tree", "if is_python_number(leaf) and not holds(dtype, leaf)", "if False"),
    "Python numbers cut": ("_leaf", " and number.real == int(number.real)", ""),
    "Python numbers overflow": ("_leaf", "return not any(overflow <= abs(part)", "return True or not any(overflow <= abs(part)"),
    "imaginary part of a Python number dropped": ("_leaf", "(kind < 3 and number.imag != 0)", "False"),
    "weak types cut": ("_leaf", "    return kind >= (_kind(own) or 0)", "    return True"),
    "weakly typed like any other": ("_leaf", "own == dtype or strength(leaf) == STRONG or kind is None", "True"),
    "strongly typed like any other": ("_leaf", " or strength(leaf) == STRONG or kind is None", " or kind is None"),
    "largest gradient overflows": ("_tree", "cast(jnp.minimum(magnitude, most), jnp.float32)", "cast(magnitude, jnp.float32)"),
    "largest asks for a size": ("_tree", "        magnitude = jnp.max(jnp.abs(widen(leaf)), initial=0.0)", "        if not jnp.size(leaf):\n            continue\n        magnitude = jnp.max(jnp.abs(widen(leaf)))"),
    "no update of None": ("_tree", "if update is None or not is_array(param) or", "if"),
    "leaves without gradients compiled": ("_optimizer", "trained, rest = split(params, grads)", "trained, rest = params, params"),
    "leaves without gradients lost": ("_optimizer", "return joined(trained, rest), cast(", "return trained, cast("),
    # accumulation
    "bad micro-batch summed": ("_accumulate", "jnp.where(counts, saturated(acc + share), acc)", "saturated(acc + share)"),
    "bad micro-batch counted": ("_accumulate", "state.counted + counts.astype(jnp.int32)", "state.counted + 1"),
    "bad micro-batch takes no place": ("_accumulate", "optax.safe_increment(state.mini_step))", "state.mini_step + counts.astype(jnp.int32))"),
    "mean over the whole window": ("_accumulate", "return self._length(state).astype(jnp.float32) / counted", "return jnp.float32(1)"),
    "window never dropped": ("_accumulate", 'if self.drop == "window" else', 'if self.drop == "never" else'),
    "empty window stepped": ("_accumulate", "else state.counted > 0", "else state.counted >= 0"),
    "window not emptied": ("_accumulate", "jnp.where(full, jnp.zeros_like(acc), acc)", "acc"),
    "mean loss not emptied": ("_accumulate", "jnp.where(full, 0.0, state.acc_value)", "state.acc_value"),
    "a sum for a mean": ("_accumulate", "saturated(cast(leaf, acc.dtype)) / length.astype(acc.dtype)", "saturated(cast(leaf, acc.dtype))"),
    "accumulator holds parameters": ("_accumulate", "jax.tree.map(jnp.zeros_like, only_gradients(params))", "jax.tree.map(jnp.zeros_like, params)"),
    "micro-batches counted as steps": ("_accumulate", "                stepped, optax.safe_increment(state.gradient_step), state.gradient_step\n", "                True, optax.safe_increment(state.gradient_step), state.gradient_step\n"),
    "growth counts micro-batches": ("_step", 'if self.window.growth_unit == "optimizer_step":', "if False:"),
    "growth counts optimizer steps": ("_step", 'if self.window.growth_unit == "optimizer_step":', "if True:"),
    "bad micro-batch keeps the scale": ("_step", "observed &= due | ~grads_finite", "observed &= due"),
    "window around changes nothing": ("_optimizer", "return _transformation(dataclasses.replace(wrapper, window=window))", "return _transformation(wrapper)"),
    "axis name lost by the order": ("_optimizer", "axis_name=wrapper.axis_name if axis_name is None else axis_name", "axis_name=axis_name"),
    "wrapped twice": ("_optimizer", "if wrapper.policy != NoOpLossScale():", "if False:"),
    "wrapped deeper": ("_step", "        _check_not_nested(inner_state)\n", ""),
    # reports and Flax
    "check blames good data": ("_progress", "        if applied\n        else", "        if not applied\n        else"),
    "check mistakes a floor": ("_progress", "if lowest < state.scaling.loss_scale:", "if lowest <= state.scaling.loss_scale:"),
    "check mistakes a fixed scale": ("_progress", "if isinstance(policy, FixedLossScale):", "if False:"),
    "check forgets the optimizer": ("_progress", "policy = None if wrapper is None else wrapper.policy", "policy = None"),
    "check one step late": ("_progress", "if state.notfinite_count <= max_consecutive", "if state.notfinite_count <= max_consecutive + 1"),
    "check blames the wrong pass": ("_progress", "if state.total_notfinite_loss < state.notfinite_count", "if state.total_notfinite_loss >= state.notfinite_count"),
    "step counts attempts": ("flax", "step = select(call, stepped(before, after), self.step + 1, self.step)", "step = self.step + 1"),
    "replaced fields not kept": ("flax", "new if name in always_replace else", "new if True else"),
    "names read once": ("flax", "        names = tuple(always_replace)\n", "        names = always_replace\n"),
    "names by their letters": ("flax", "if not isinstance(always_replace, str) and isinstance", "if isinstance"),
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
    "variables written": ("_state_dict", "if children is not None and _is_variable(node, children):\n            return save", "if False:\n            return save"),
    "variables lost": ("_state_dict", "return rebuild([restore(path, child, _held(saved, child))])", "return restore(path, child, _held(saved, child))"),
    "written variables not read": ("_state_dict", 'return values["value"]', "return saved"),
    "tree in a variable taken for one": ("_state_dict", ' or "value" in (children or ())', ""),
    "Python number becomes an array": ("_state_dict", "return type(target)(values[()])", "return values"),
    "Flax imported by the core": ("__init__", "from ._policies.spec import", "from . import flax as _flax\nfrom ._policies.spec import"),
    # diagnostics
    "diagnosis: subnormal numbers flushed": ("diagnostics/_formats", "        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)", "        bits = jnp.where(leaf == 0, jnp.uint32(0), jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32))"),
    "diagnosis: exponents of subnormal numbers": ("diagnostics/_formats", "jnp.where(field == 0, leading + _SMALLEST_EXPONENT, field - 127)", "field - 127"),
    "diagnosis: mantissas of subnormal numbers": ("diagnostics/_formats", "jnp.where(field == 0, subnormal, mantissa)", "mantissa"),
    "diagnosis: imaginary part forgotten": ("diagnostics/_formats", "jnp.stack([leaf.real, leaf.imag])", "leaf.real"),
    "diagnosis: float64 rounded to float32 first": ("diagnostics/_formats", "return _cut(jax.lax.bitcast_convert_type(leaf, jnp.uint64))", "leaf = leaf.astype(jnp.float32)"),
    "diagnosis: a tie away from zero": ("diagnostics/_formats", "_boundary(subnormal / 2, inclusive=False)", "_boundary(subnormal / 2, inclusive=True)"),
    "diagnosis: subnormal up to the smallest normal": ("diagnostics/_formats", "normal - subnormal / 2", "normal"),
    "diagnosis: overflow from the largest number on": ("diagnostics/_formats", "largest + spacing / 2", "largest"),
    "diagnosis: e4m3fn overflows at a tie": ("diagnostics/_formats", "inclusive=largest / spacing % 2 == 1", "inclusive=True"),
    "diagnosis: the scale is applied the wrong way": ("diagnostics/_histogram", "boundary.exponent - exponent - MIN_EXPONENT", "boundary.exponent + exponent - MIN_EXPONENT"),
    "diagnosis: histograms concatenate": ("diagnostics/_histogram", "    def __add__", "    def _add"),
    "diagnosis: devices not summed up": ("diagnostics/_histogram", "if axis_name is not None:", "if False:"),
    "diagnosis: counts of one device": ("diagnostics/_leaves", "if axis_name is not None:", "if False:"),
    "diagnosis: best leaf first": ("diagnostics/_leaves", "reverse=True", "reverse=False"),
    "diagnosis: largest may be inf": ("diagnostics/_leaves", "jnp.where(is_finite, bits, zero)", "bits"),
    "diagnosis: zeros count as flushed": ("diagnostics/_leaves", "~is_zero & (bits < nonzero)", "bits < nonzero"),
    "diagnosis: an overflow is suggested": ("diagnostics/_suggest", "if not lost[k].overflowed]", "]"),
    "diagnosis: tolerance ignored": ("diagnostics/_suggest", "max(tolerance * total, lost[fits[-1]].flushed)", "lost[fits[-1]].flushed"),
    "diagnosis: always needed": ("diagnostics/_suggest", "needed = 0 not in best", "needed = True"),
    "diagnosis: layers overwrite each other": ("diagnostics/_underflow", "layers.get(layer, 0) + ", ""),
    "diagnosis: one scale too high": ("diagnostics/_calibrate", "good = min(exponent, self.high)", "good = min(exponent + 1, self.high)"),
    "diagnosis: later batches not tried": ("diagnostics/_calibrate", "        search.look_at(batch)\n", "        search.look_at(batch)\n        break\n"),
    "diagnosis: too many passes": ("diagnostics/_calibrate", "while bad - good > 1 and self.passes < self.max_passes:", "while bad - good > 1:"),
    "diagnosis: traced for each scale": ("diagnostics/_calibrate", "    @jit\n", "    @(lambda fun: fun)\n"),
    "diagnosis: a bad loss is accepted": ("diagnostics/_calibrate", "if not jnp.isfinite(loss):", "if False:"),
    "diagnosis: what a float16 loss carries": ("diagnostics/_calibrate", "self.high = min(self.high, math.frexp(largest)[1] - 1)", "pass"),
    "diagnosis: unsure, and does not say so": ("diagnostics/_calibrate", "self.is_largest = bad - good == 1", "self.is_largest = True"),
    "diagnosis: history waits": ("diagnostics/_history", "self._on_device.append(_pack(floats, ints))", "self._on_device.append(jax.device_get(_pack(floats, ints)))"),
    "diagnosis: history fetches the youngest": ("diagnostics/_history", "if len(self._on_device) >= 2 * _CHUNK:", "if len(self._on_device) >= _CHUNK:"),
    "diagnosis: skips before the first step counted": ("diagnostics/_history", "return total - total[0] + bad[0]", "return total"),
    "diagnosis: flags name the finite leaves": ("_verdict", "if np.any(flag)", "if not np.any(flag)"),
    "tracking: a finite step clears it": ("_verdict", "jnp.where(grads_finite, flag, ", "jnp.where(grads_finite, False, "),
    "tracking: only the first overflow": ("_verdict", "else new)", "else new | flag)"),
    "tracking: each device its own": ("_step", "= agree(local, self.axis_name)", "= (*agree(local[:2], self.axis_name), *local[2:])"),
    "tracking: a second pass": ("_step", "evidence.finite(), all_finite(value)", "read(grads).finite(), all_finite(value)"),
    "diagnosis: a scatter has no float32": ("diagnostics/_trace/numbers", "_SCATTERS.get(eqn.primitive.name)", "None"),
    "diagnosis: the sum of all that is tiny": ("diagnostics/_trace/numbers", "_share_of_sum(exact, zeros)", "_share_of_sum(exact, tiny)"),
    "diagnosis: a float16 loss is unscaled in float16": ("diagnostics/_trace/trace", "unseed(grads, widen(one_seed(seed)))", "unseed(grads, one_seed(seed))"),
    "diagnosis: a scan of length 0 is run as one equation": ("diagnostics/_trace/interpreter", 'case "scan":', 'case "scan" if eqn.params["length"]:'),
    "diagnosis: a ref is an array": ("diagnostics/_trace/jaxpr", 'hasattr(atom.aval, "inner_aval")', "False"),
    "diagnosis: a ref is never written to": ("diagnostics/_trace/interpreter", "            cell.value = value\n", "            pass\n"),
    "diagnosis: a ref is not read in the next iteration": ("diagnostics/_trace/jaxpr", "*stacked, *refs)", "*stacked, *needs[len(eqn.outvars) :])"),
    "diagnosis: a row of a ref is not written back": ("diagnostics/_trace/interpreter", "each.value = _with_slice(each.value, i, part.value)", "pass"),
    "diagnosis: refs from outside are forgotten": ("diagnostics/_trace/interpreter", "self._cells.setdefault(id(ref), Cell(Value(ref[...])))", "Cell(Value(ref[...] * 0))"),
    "diagnosis: an empty ref outside of jit": ("diagnostics/_trace/numbers", "return jax.jit(bind)(*inputs)", "return bind(*inputs)"),
    "diagnosis: a trace is not JSON": ("diagnostics/_text", "dataclasses.is_dataclass(result)", "False"),
    "diagnosis: NaN and the infinities are None in JSON": ("diagnostics/_text", 'return "NaN" if math.isnan(result) else "Infinity" if result > 0 else "-Infinity"', "return None"),
    "diagnosis: -inf is inf in JSON": ("diagnostics/_text", '"Infinity" if result > 0 else "-Infinity"', '"Infinity"'),
    "diagnosis: what has a dtype is an array": ("diagnostics/_formats", "return is_array(leaf) and not is_python_number(leaf)", 'return hasattr(leaf, "dtype")'),
    "diagnosis: what has a dtype has a shape": ("diagnostics/_formats", "if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):", 'if hasattr(leaf, "dtype"):'),
    "diagnosis: Python numbers are arrays": ("diagnostics/_formats", "return is_array(leaf) and not is_python_number(leaf)", "return is_array(leaf)"),
    "diagnosis: NaN as Python prints it": ("diagnostics/_text", 'return "NaN" if math.isnan(value) else', "return"),
    "diagnosis: whatever has a dtype is differentiated": ("diagnostics/_trace/trace", "if not is_inexact(leaf):", 'if not jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact):'),
    "diagnosis: history takes arrays only": ("diagnostics/_history", "jnp.result_type(value)", "value.dtype"),
    "doctor: an underflow is no problem": ("_doctor/findings", "return may_matter(place) and not _is_close(exam)", "return False"),
    "doctor: float32 is not asked": ("_doctor/findings", "return may_matter(place) and not _is_close(exam)", "return may_matter(place)"),
    "doctor: the smallest numbers matter too": ("_doctor/exam", " and place.lost_sum >= _LOST_SUM", ""),
    "doctor: only the last gradients are judged": ("_doctor/advice", "compared is not None and max(compared.flushed, compared.error) > _NEEDED", "bool(exam.suggestion.needed)"),
    "doctor: a problem for each operation": ("_doctor/findings", "of_line.setdefault((place.file, place.line), [])", "of_line.setdefault((place.primitive, id(place)), [])"),
    "doctor: the backward pass comes first": ("_doctor/findings", 'key=lambda place: place.direction != "forward"', 'key=lambda place: place.direction == "forward"'),
    "doctor: no infinity is meant": ("_doctor/findings", "if not exam.trace.nonfinite_outputs:\n        title", "if False:\n        title"),
    "doctor: functions are differentiated": ("_doctor/target", "trained = only_gradients(params)", "trained = params"),
    "doctor: only the loss of a pair": ("_doctor/exam", "report = trace(target.loss_fn, init_state(used), has_aux=target.has_aux)", "report = trace(lambda *a: target.loss_fn(*a)[0] if target.has_aux else target.loss_fn(*a), init_state(used))"),
    "doctor: always content": ("_doctor/cli", "return int(any(finding.is_problem for finding in found))", "return 0"),
    "doctor: what the model prints is in the JSON": ("_doctor/cli", "redirect_stdout(sys.stderr) if options.json", "redirect_stdout(stdout) if options.json"),
    # what promises broke by in 0.1.0
    "promise: an imaginary part cast away": ("_verdict", "return _is_finite(part.real) & _is_finite(part.imag)", "return _is_finite(part.real)"),
    "promise: an imaginary part not squared": ("_verdict", "return _squares(leaf.real, placed) + _squares(leaf.imag, placed)", "return _squares(leaf.real, placed) + 0 * leaf.imag.astype(jnp.int32)"),
    "promise: a verdict that fast math removes": ("_verdict", "return jax.lax.sub(square, jax.lax.max(excess, jax.lax.full_like(leaf, 0)))", "return jax.lax.add(square, jax.lax.sub(leaf, leaf))"),
    "promise: the same on several devices": ("_verdict", "jax.lax.select(jax.lax.is_finite(leaf), square, jax.lax.neg(magnitude))", "jax.lax.add(square, jax.lax.sub(leaf, leaf))"),
    "promise: a symbol compared": ("_verdict", "return isinstance(size, int) and size >= _LARGE", "return size >= _LARGE"),
    "promise: a loss made up": ("_step", "value = None if value is None else self.window.mean_value(window)", "value = self.window.mean_value(window)"),
    "promise: a loss for who takes none": ("_step", "if value is not None and _takes_value(self.inner.update)", "if value is not None"),
    "promise: a norm that is inf": ("_verdict", "if max_norm > float(info.max)", "if False"),
    "promise: a norm that is 0": ("_verdict", "max(max_norm, float(info.smallest_normal))", "max_norm"),
    "promise: a sum rounds to inf": ("_accumulate", "jnp.where(counts, saturated(acc + share), acc)", "jnp.where(counts, acc + share, acc)"),
    "promise: a mean rounds to inf": ("_accumulate", "else saturated(acc * ratio.astype(acc.dtype))", "else acc * ratio.astype(acc.dtype)"),
    "promise: updates unchecked": ("_step", "finite = all_finite(updates, axis_name=self.axis_name)", "finite = jnp.array(True)"),
    "promise: a bad update counted as a step": ("_step", "due, grads_finite = due & updates_finite, grads_finite & updates_finite", "grads_finite = grads_finite & updates_finite"),
    "promise: devices part": ("_step", "apart = varying_axes(value) - set(names)", "apart = set()"),
    "promise: flags taken for parameters": ("_verdict", "if not gradients:", "if False:"),
    # types, and what was told too late or not at all
    "types: any string drops": ("_optimizer", 'drop: Literal["micro_batch", "window"] = "micro_batch"', 'drop: str = "micro_batch"'),
    "types: the loss function's arguments lost": ("_value_and_grad", ") -> Callable[_Args, tuple[jax.Array, Any]]: ...", ") -> Callable[..., tuple[jax.Array, Any]]: ..."),
    "state of a step in variables": ("_step", "state = unwrapped(state) if is_wrapped(state.grads_finite) else state", "return state"),
    "variables of parameters lost": ("_step", "state = unwrapped(state) if is_wrapped(state.grads_finite) else state", "return unwrapped(state)"),
    "state of another scale not told": ("_step", "if type(state.scaling) is not expected:", "if False:"),
    "gradients of a window unchecked": ("_accumulate", "        _check_gradients(state.acc_grads, grads)\n", ""),
    "loss function for a loss": ("_step", "    if callable(value):", "    if False:"),
    "wrapped state of a bare optimizer": ("_optimizer", "    if isinstance(opt_state, LossScaledState):", "    if False:"),
    "optimizer not called": ("_optimizer", "    if not isinstance(tx, optax.GradientTransformation):", "    if False:"),
    "promise: narrow numbers cannot be added": ("_tree", "jnp.finfo(dtype_of(param)).bits > 8", "True"),
    # what users read first
    "command: no flag": ("__main__", 'os.environ["XLA_FLAGS"] = f"{flags} {_EXCESS}=false"', "pass"),
    "command: no help": ("__main__", 'sys.argv[1:] or ["--help"]', "sys.argv[1:]"),
    "help: the core imports flax": ("__init__", "import typing as _typing\n", "import typing as _typing\nfrom . import flax as flax\n"),
    "help: missing flax not told": ("__init__", 'if (error.name or "").partition(".")[0] != "flax":', "if True:"),
    "help: flax promised without flax": ("__init__", 'if _util.find_spec("flax") is not None:', "if True:"),
    "help: modules not listed": ("__init__", "sorted({*globals(), *__all__})", "sorted(globals())"),
    "help: a name that does not resolve": ("_optimizer", "Feed it the gradients of `jaxscale.value_and_grad`", "Feed it the gradients of `jaxscale.value_and_grads`"),
}  # fmt: skip


def run_suite(folder):
    """The exit status of the suite in a copy of the project, and the first failure."""
    command = [sys.executable, "-m", "pytest", "-xq", "--slow", "-p", "no:cacheprovider"]
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
