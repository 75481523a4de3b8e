"""The texts of `check`: its warnings, and what its errors have in common with them."""

from .limits import MANY_BAD_LOSSES, MANY_FALLS, MANY_ZEROS

DOCTOR = (
    "`jaxscale doctor` names the line of the model (with `--autocast float16` if it is under "
    "`autocast`)."
)
DOCTOR_WITHOUT_HALF = "`jaxscale doctor` names the line of the model."

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
    'small: `jaxscale.loss_scaled(tx, "adaptive")` finds a scale for them, however high.'
)

BAD_LOSSES = (
    f"`check`: the loss itself was not finite in {MANY_BAD_LOSSES} steps in a row or more. Look "
    "for a stretch of bad data, or for parameters that have diverged: then go back to a "
    "checkpoint, and lower the learning rate."
)

ZEROS = (
    f"`check`: all moments of the optimizer are 0 after {MANY_ZEROS} steps or more, so all "
    "gradients were 0, and nothing is learned. "
    "If something changes gradients before the optimizer gets them, such as `nan_to_num`, it hides "
    "every overflow, and the scale never falls: pass that function as `on_grads=` to "
    "`jaxscale.train_step`, which judges the gradients first. If a scale that is too low lets them "
    "flush to 0, `jaxscale.diagnostics.calibrate` finds a better one. If neither, the loss does "
    "not depend on the parameters."
)

SPIKES = (
    "`check`: spikes are skipped again and again: 20 or more in a row, or more than one step in "
    "20. This is not a one-time jump of the loss: the rule accepts one within 15 steps. If it is "
    "one kind of batch that stands out, such as those with a reward among many without, these are "
    "good steps, and nothing is learned from them: raise `sigmas` of the `SpikeRule`, or do "
    "without it. If the run diverges, skipping does not help: lower the learning rate, or go back "
    "to a checkpoint."
)
NORMS = (
    " Some of the spikes had finite gradients whose norm is inf in float32, with elements of about "
    "1e19 or more: their squares would make the second moment of Adam inf for good. No such level "
    "is ever accepted: look for what makes them so large, or make the loss smaller."
)

# What may make a NaN without any half precision, most likely things first.
WITHOUT_HALF = (
    "Check the batch for NaN and inf first. Then look for 0/0, for the square root of 0 or the "
    "norm of zeros, whose derivative is inf, for the logarithm of 0, and for a mask of -inf that "
    "covers a whole row of a softmax."
)
# What `scale_backward` does where a few cotangents are far larger than all others.
ALL_FLUSHED = (
    "`scale_backward` also makes gradients NaN that would be nothing but zeros, as almost all "
    "numbers flushed beside a few huge ones: look for a division by almost 0, such as by the norm "
    "of a row of padding."
)
OF_UPDATES = (
    "If the scale did not fall in these steps, the gradients are finite, and the optimizer makes "
    "an inf or a NaN of them, which `check_updates=True` skips: no scale helps, so use another "
    "optimizer, or other settings of it."
)
AT_ANY_SCALE = (
    "a division by zero, the square root of 0, a mask of -inf (run one step under `with "
    "jax.disable_jit(), jax.debug_infs(True)`)"
)
ON_CPU = "On a CPU, XLA may lose a NaN of the loss on the way, so a finite loss proves little."

_RATE = (
    "`check`: one step in 20 or more was skipped lately (`skip_rate` of `metrics`). "
)
RATE_LOSS = (
    _RATE
    + "Mostly the loss itself was not finite, so no loss scale can help: look for NaN and "
    "inf in the batches, and for an operation in the forward pass that leaves the range of its "
    "dtype. " + DOCTOR
)
RATE_GRADS = (
    _RATE
    + "Mostly the gradients were not finite. If the loss was passed as `value`, it was "
    "finite; if not, pass it, so that a bad forward pass is told apart. If the scale is at its "
    "floor or fixed, it may be too high. Otherwise some batches overflow at any scale: look into "
    f"them, and for {AT_ANY_SCALE}. " + DOCTOR
)
RATE_UNSCALED_LOSS = (
    f"{_RATE}Mostly the loss itself was not finite. {WITHOUT_HALF} "
    f"{DOCTOR_WITHOUT_HALF}"
)
RATE_UNSCALED_GRADS = (
    f"{_RATE}Mostly the gradients were not finite. {WITHOUT_HALF} If the loss was not passed as "
    f"`value`, pass it, so that a bad forward pass is told apart. {ON_CPU} {DOCTOR_WITHOUT_HALF}"
)


def say_of_optimizer(place: str) -> str:
    """Returns what to do about a NaN in the state of an optimizer, given where it is."""
    return (
        f"The optimizer itself made a NaN of finite gradients: there is one in its state, at "
        f"{place}, where no step with a gradient that is not finite ever leads. The parameters are "
        "likely to hold one, too. Go back to a checkpoint, and pass `check_updates=True` to skip "
        "such steps; `optax.contrib.prodigy`, for one, makes a NaN of a first gradient of 0."
    )
