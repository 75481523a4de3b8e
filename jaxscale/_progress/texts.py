"""The texts of `check`: its warnings, and what its errors have in common with them."""

from typing import NamedTuple

from .limits import MANY_BAD_LOSSES, MANY_FALLS, MANY_ZEROS

DOCTOR = (
    "`jaxscale doctor` names the line of the model (with `--autocast float16` if it is under "
    "`autocast`)."
)

EXHAUSTED = (
    f"`check`: in {MANY_FALLS} steps or more no retry helped: the loss was finite, and the "
    "gradients were not, at any of the scales that were tried, so these batches were lost. If the "
    "scale is not to blame, look at the data, as an inf gives a finite loss behind a tanh or a "
    "sigmoid, and for a division by 0 or the square root of 0. "
    + DOCTOR
    + " If the scale is, start lower, lower its floor, or allow more `retries`."
)

# Without numbers: Python's filter of warnings shows a text once for each line that calls `check`.
_DECAY = "`check`: the loss scale fell again and again without growing in between, so "
# If it is known how large the gradients are: as large as the scale lets them be, or not.
DECAY_OF_GRADS = (
    _DECAY
    + "the gradients have grown: at this scale they fill float16's range. The scale follows them, "
    "and nothing is wrong with any line of the model. Look at the loss and at `grad_norm` over "
    "time. If both rise, the run diverges: lower the learning rate, or warm it up for longer."
)
_LEAVES_RANGE = (
    "something in the model leaves float16's range at lower and lower scales, and small gradients "
    "are lost. " + DOCTOR + " If it is only in rare batches, "
    "`jaxscale.train_step(..., retries=10)` loses none of them. If bad data is to blame instead, "
    "pass the loss as `value`: then a bad loss does not lower the scale."
)
DECAY_IN_MODEL = _DECAY + _LEAVES_RANGE
DECAY = (
    _DECAY
    + "the gradients, or what is on the way to them, have grown. With `max_norm` `metrics` shows "
    "the norm of the gradients, `grad_norm`. If that rises with the loss, the run diverges: lower "
    "the learning rate, or clip, as with `max_norm=1.0`. If it does not, "
    + _LEAVES_RANGE
)
IDLE = (
    "`check`: the loss scale has grown to 2**24 or more, and no step has ever overflowed. Maybe "
    "nothing scales the backward pass, as in a trainer that calls `jax.value_and_grad` itself: "
    "give it `jaxscale.scale_backward(loss_fn)`, or in a step of your own make the gradients by "
    "`jaxscale.value_and_grad(loss_fn, opt_state)`, or the whole step by "
    "`jaxscale.train_step(loss_fn, tx)`. Or the model computes in float32 or bfloat16, which need "
    "no loss scale: wrap its optimizer by `jaxscale.skip_nonfinite(tx)`. Or all gradients are very "
    "small: let the scale rise further, as by `jaxscale.DynamicLossScale(max_scale=2.0**60)`."
)

BAD_LOSSES = (
    f"`check`: the loss itself was not finite in {MANY_BAD_LOSSES} steps in a row or more. Look "
    "for a stretch of bad data, or for parameters that have diverged: then go back to a "
    "checkpoint, and lower the learning rate."
)

_IF_ZEROS = (
    "all gradients were 0, and nothing is learned. If something changes gradients before the "
    "optimizer gets them, such as `nan_to_num`, it hides every overflow, and the scale never "
    "falls: pass that function as `on_grads=` to `jaxscale.train_step`, which judges the "
    "gradients first. If a scale that is too low lets them flush to 0, "
    "`jaxscale.diagnostics.calibrate` finds a better one. If neither, the loss does not depend on "
    "the parameters."
)
ZERO_MOMENTS = (
    f"`check`: all moments of the optimizer are 0 after {MANY_ZEROS} steps or more, so "
    + _IF_ZEROS
)
ZERO_NORMS = (
    f"`check`: the norm of the gradients was 0 in {MANY_ZEROS} steps or more, so "
    + _IF_ZEROS
)

BAD_MOMENTS = (
    "`check`: a moment of the optimizer is inf or NaN, and stays so. The gradients that made it "
    "were finite, but their squares or sums were not. Its parameters have stopped, or are NaN. Go "
    "back to a checkpoint, and pass `check_updates=True` or `spikes=jaxscale.SpikeRule()`, which "
    "skip such steps."
)

SPIKES = (
    "`check`: spikes are skipped again and again: 20 or more in a row, or more than one step in "
    "20. This is not a one-time jump of the loss: the rule accepts one within 15 steps. If it is "
    "one kind of batch that stands out, such as those with a reward among many without, these are "
    "good steps, and nothing is learned from them: raise `sigmas` of the `SpikeRule`, or do "
    "without it. If the run diverges, skipping does not help: lower the learning rate, or go back "
    "to a checkpoint."
)
SPIKES_OF_NORMS = (
    SPIKES
    + " Some of the spikes had finite gradients whose norm is inf in float32, with elements of "
    "about 1e19 or more: their squares would make the second moment of Adam inf for good. No such "
    "level is ever accepted: look for what makes them so large, or make the loss smaller."
)

LOST = (
    "`check`: the training state has made {step} steps, but its optimizer only {steps}, so the "
    "optimizer was not restored. Flax's `restore_checkpoint` leaves it out silently if it was "
    "saved before it was wrapped. Restore with the bare optimizer, and then pass "
    "`tx.init(params)._replace(inner_state=restored.opt_state)`."
)

# In errors names stand for the numbers of a run.
OF_OPTIMIZER = (
    "The optimizer itself made a NaN of finite gradients: there is one in its state, at "
    "{place_of_nan}, where no step with a gradient that is not finite ever leads. The parameters "
    "are likely to hold one, too. Go back to a checkpoint, and pass `check_updates=True` to skip "
    "such steps; `optax.contrib.prodigy`, for one, makes a NaN of a first gradient of 0."
)
OF_UPDATES = (
    "If the scale did not fall in these steps, the gradients are finite, and the optimizer makes "
    "an inf or a NaN of them, which `check_updates=True` skips: no scale helps, so use another "
    "optimizer, or other settings of it."
)
TOLD_APART = (
    "If the loss was passed as `value`, it is finite, and the backward pass overflows; if not, "
    "pass it, so that a bad forward pass is told apart."
)
_AT_ANY_SCALE = (
    "a division by zero, the square root of 0, a mask of -inf (run one step under `with "
    "jax.disable_jit(), jax.debug_infs(True)`)"
)
_STALE = (
    "`jaxscale.value_and_grad` was called outside of the step and uses an older scale"
)
FALLING = (
    "The scale is still on its way down, to {lowest:g}: start lower, or accept more skipped steps "
    f"in a row. Or {_STALE}."
)
UNKNOWN = (
    f"It does so at any scale: {_AT_ANY_SCALE}, or because the scale is fixed and too high, or "
    f"still on its way down, or {_STALE}. Pass `tx` to `check` to have these told apart."
)
FIXED = (
    f"The scale is fixed, and too high. Or it overflows at any scale: {_AT_ANY_SCALE}."
)
_TOO_LARGE = (
    "Most often the loss is too large for float16: take a mean instead of a sum, or lower "
    "`min_scale`: `jaxscale.loss_scaled(tx, jaxscale.DynamicLossScale("
    "min_scale=2.0**{floor_exponent}))`. "
    f"Or it overflows at any scale: {_AT_ANY_SCALE}, or {_STALE}."
)
AT_ONE = f"A scale of 1 scales nothing. {_TOO_LARGE}"
AT_FLOOR = f"The scale is at its floor, and too high. {_TOO_LARGE}"


class Words(NamedTuple):
    """The texts that differ if there is no loss scale. Two are also warnings."""

    row: str
    loss_now: str
    loss_never: str
    gradients: str  # empty if that depends on the policy
    rate_of_loss: str
    rate_of_gradients: str
    doctor: str


_ROW = (
    "{notfinite_count} steps in a row were skipped ({total_notfinite} of {total_steps} in all, "
    "{total_notfinite_loss} of them with a non-finite loss)"
)
_LOSS = "The loss itself is not finite in {row_notfinite_loss} of these {notfinite_count} steps"
_NO_SCALE_HELPS = ", so no loss scale can help"
_FINE = (
    ". {applied} steps were fine: look for a stretch of bad data, or for parameters that have "
    "diverged."
)
_RATE = (
    "`check`: one step in 20 or more was skipped lately (`skip_rate` of `metrics`). "
)
_RATE_OF_LOSS = _RATE + "Mostly the loss itself was not finite"
_RATE_OF_GRADIENTS = _RATE + "Mostly the gradients were not finite. "
# What may make a NaN without any half precision, most likely things first.
_WITHOUT_HALF = (
    "Check the batch for NaN and inf first. Then look for 0/0, for the square root of 0 or the "
    "norm of zeros, whose derivative is inf, for the logarithm of 0, and for a mask of -inf that "
    "covers a whole row of a softmax. "
)
_ON_CPU = "On a CPU, XLA may lose a NaN of the loss on the way, so a finite loss proves little."
_DOCTOR_WITHOUT_HALF = "`jaxscale doctor` names the line of the model."

SCALED = Words(
    row=_ROW + "; the loss scale is {loss_scale}",
    loss_now=_LOSS + _NO_SCALE_HELPS + _FINE,
    loss_never=(
        f"{_LOSS}{_NO_SCALE_HELPS}. It never was: look for NaN in the data, and for an operation "
        "in the forward pass that leaves the range of its dtype; compute norms, softmax and the "
        "loss in float32."
    ),
    gradients="",
    rate_of_loss=(
        f"{_RATE_OF_LOSS}{_NO_SCALE_HELPS}: look for NaN and inf in the batches, and for an "
        f"operation in the forward pass that leaves the range of its dtype. {DOCTOR}"
    ),
    rate_of_gradients=(
        f"{_RATE_OF_GRADIENTS}If the loss was passed as `value`, it was finite; if not, pass it, "
        "so that a bad forward pass is told apart. If the scale is at its floor or fixed, it may "
        "be too high. Otherwise some batches overflow at any scale: look into them, and for "
        f"{_AT_ANY_SCALE}. {DOCTOR}"
    ),
    doctor=DOCTOR,
)
UNSCALED = Words(
    row=_ROW,
    loss_now=_LOSS + _FINE,
    loss_never=f"{_LOSS}. It never was. {_WITHOUT_HALF}",
    # Also what `scale_backward` does where a few cotangents are far larger than all others.
    gradients=(
        f"{_WITHOUT_HALF}`scale_backward` also makes gradients NaN that would be nothing but "
        "zeros, as almost all numbers flushed beside a few huge ones: look for a division by "
        "almost 0, such as by the norm of a row of padding. To find the line, run one step under "
        f"`with jax.disable_jit(), jax.debug_infs(True)`. {_ON_CPU}"
    ),
    rate_of_loss=f"{_RATE_OF_LOSS}. {_WITHOUT_HALF}{_DOCTOR_WITHOUT_HALF}",
    rate_of_gradients=(
        f"{_RATE_OF_GRADIENTS}{_WITHOUT_HALF}If the loss was not passed as `value`, pass it, so "
        f"that a bad forward pass is told apart. {_ON_CPU} {_DOCTOR_WITHOUT_HALF}"
    ),
    doctor=_DOCTOR_WITHOUT_HALF,
)
