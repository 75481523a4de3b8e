"""The largest loss scale that does not overflow, found by a few backward passes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._gradients.scaled import representable
from .._gradients.value_and_grad import value_and_grad
from .._gradients.verdict import all_finite
from .._state.scale import init_state
from .._trees.arguments import int32, power_of_two
from .._trees.pytrees import Params, PyTree
from .._went import warn_of
from ._formats import exponent_of
from ._switches.backward import check_floating
from ._text import number, power


class Calibration(NamedTuple):
    """The finding of `calibrate`; `print` it for the sentence.

    Attributes:
      init_scale: the largest power of two that overflowed on no batch that was tried, or `None` if
        every power of two overflowed.
      overflows_at: the least scale that overflowed in a pass, or `None` if none did.
      passes: how many backward passes it took.
      batches: how many batches `init_scale` was tried on.
      is_largest: whether twice `init_scale` overflows, or is above `max_scale`.
      sentence: the result in words.
    """

    init_scale: float | None
    overflows_at: float | None
    passes: int
    batches: int
    is_largest: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def calibrate(
    fun: Callable[..., Any],
    params: Params,
    batches: Iterable[Any],
    *,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    max_passes: int = 10,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    jit: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Calibration:
    """Returns the largest power-of-two loss scale that does not overflow on some batches.

    Pass it as `init_scale` of a `jaxscale.DynamicLossScale`, and the run does not skip steps while
    a higher scale comes down. It is found by bisection. All passes run one compiled program.

    Several batches go in 0.7.0: take the least of what it finds on each. Each batch after the first
    takes one pass, or a few if it overflows at the scale that fits the others.

    Args:
      fun: the loss, `fun(params, batch)`, as for `jaxscale.value_and_grad`.
      params: the parameters, with respect to which `fun` is differentiated.
      batches: `[batch]`, or until 0.7.0 an iterable of several, taken until the passes are used up.
      min_scale: the least scale to try, a power of two.
      max_scale: the largest scale to try, a power of two. With a float16 loss none above 2**15 is
        tried, because its cotangent cannot hold it.
      max_passes: the most backward passes to make. By default one batch takes up to 5.
      transform: what differentiates: `None` for `jax.value_and_grad`, or
        `equinox.filter_value_and_grad` or `flax.nnx.value_and_grad`.
      has_aux: whether `fun` returns a pair of the loss and an auxiliary output.
      jit: the function that compiles: `None` for `jax.jit`, or `equinox.filter_jit` or
        `flax.nnx.jit`.
      **kwargs: passed to `transform`, such as `allow_int`.

    Returns:
      A `Calibration`. If even `min_scale` overflows, its `init_scale` is `None`.

    Raises:
      ValueError: if the loss itself is not finite on a batch, which no scale can change; if there
        is no batch, or a number is out of range.
      TypeError: if `batches` is a single batch, a parameter is not floating, or `fun` does not
        return a floating scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> loss_fn = lambda w, x: jnp.mean((x @ w).astype(jnp.float32) ** 2)
      >>> w = jnp.ones(2, jnp.float16)
      >>> found = diagnostics.calibrate(loss_fn, w, [jnp.ones((4, 2), jnp.float16)])
      >>> print(found)
      The largest loss scale that does not overflow is 2**13 (batches: 1, backward passes: 5).
      >>> policy = jaxscale.DynamicLossScale(init_scale=found.init_scale)
    """
    low = power_of_two("calibrate", "min_scale", min_scale)
    high = power_of_two("calibrate", "max_scale", max_scale)
    if low > high:
        raise ValueError(
            f"`calibrate` needs min_scale <= max_scale, got {min_scale} and {max_scale}."
        )
    enough = (high - low + 1).bit_length()  # for bisection on one batch
    max_passes = int32("calibrate", "max_passes", max_passes, enough)
    if isinstance(batches, Mapping) or hasattr(batches, "shape"):
        raise TypeError(
            "`calibrate(batches=...)` must be a list of batches, got one "
            f"{type(batches).__name__}. Pass [batch]."
        )

    also = " and jit=equinox.filter_jit"
    transform = transform or jax.value_and_grad
    check_floating("calibrate", (params,), transform, kwargs, also)

    @(jit or jax.jit)
    def run_pass(
        state: Any, params: Params, batch: PyTree
    ) -> tuple[jax.Array, jax.Array]:
        differentiated = value_and_grad(
            fun, state, transform=transform, has_aux=has_aux, **kwargs
        )
        value, grads = differentiated(params, batch)
        loss = value[0] if has_aux else value
        return loss, all_finite(grads)

    def try_scale(exponent: int, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        return run_pass(init_state(2.0**exponent), params, batch)

    search = Search(try_scale, low, high, max_passes)
    for i, batch in enumerate(batches):
        if i == 1:
            warn_of("calibrate")
        if search.is_over:
            break
        search.look_at(batch)
    return search.result()


@dataclasses.dataclass
class Search:
    """The search for the largest exponent at which none of the batches so far overflows.

    `try_scale` returns the loss at `2**exponent` on a batch, and whether the gradients are finite.
    """

    try_scale: Callable[[int, Any], tuple[jax.Array, jax.Array | bool]]
    low: int
    good: int  # the largest exponent that no batch has ruled out
    max_passes: int
    bad: int | None = None  # the least exponent that overflowed
    most: int = 126  # the largest that the cotangent of the loss holds
    passes: int = 0
    batches: int = 0  # how many batches `good`, or a larger exponent, was tried on
    is_largest: bool = True

    @property
    def is_over(self) -> bool:
        """No pass is left, or no exponent that may fit."""
        return self.passes == self.max_passes or self.good < self.low

    def look_at(self, batch: PyTree) -> None:
        """Lowers `good` until one more batch does not overflow at it, or no pass is left."""
        fits = self.low - 1
        bad = self.good + 1
        # `good` probably fits, as it did for the batches before: step down faster and faster.
        step = 1 if self.batches else bad - fits
        while bad - fits > 1 and self.passes < self.max_passes:
            exponent = max(bad - step, (fits + bad) // 2)
            if self._is_finite(exponent, batch):
                fits = exponent
            else:
                bad = exponent
                self.bad = exponent
                step *= 2
        self.is_largest = bad - fits == 1 or fits >= self.most
        if self.is_largest or fits >= self.low:
            self.good = fits
            self.batches += 1
        else:  # out of passes, and no exponent fitted yet
            self.good = bad - 1

    def _is_finite(self, exponent: int, batch: PyTree) -> bool:
        loss, is_finite = self.try_scale(exponent, batch)
        if not jnp.isfinite(loss):
            raise ValueError(
                f"`calibrate`: the loss on batches[{self.batches}] is {number(float(loss))} at any "
                "loss scale, because a loss scale changes gradients only. Look for bad data or "
                "parameters, or for an operation of the forward pass that leaves the range of its "
                "dtype: `jaxscale.diagnostics.doctor` finds it."
            )
        self.passes += 1
        # A float16 loss has a cotangent of 2**15 at most, whatever larger scale was asked for.
        largest = representable(jnp.float32(2.0**126), loss.dtype)
        self.most = exponent_of(float(largest))
        return bool(is_finite)

    def result(self) -> Calibration:
        """Returns what was found, or raises a `ValueError` if there was no batch."""
        if not self.passes:
            raise ValueError(
                "`calibrate(batches=...)` must hold at least one batch, got none."
            )
        init_scale = 2.0 ** min(self.good, self.most)
        overflows_at = None
        if self.bad is not None:
            overflows_at = 2.0 ** min(self.bad, self.most)
        largest = power(init_scale)
        where = f"(batches: {self.batches}, backward passes: {self.passes})"
        sentence = (
            f"The largest loss scale that does not overflow is {largest} {where}."
        )
        if self.good < self.low:
            init_scale = None
            least = power(2.0 ** min(self.low, self.most))
            sentence = (
                f"Even loss scale {least} overflows on batches[{self.batches - 1}], so no larger "
                "one does. `jaxscale.diagnostics.doctor` finds where; compute that in float32."
            )
        elif not self.is_largest:
            sentence = (
                f"Loss scale {largest} does not overflow {where}. These were too few passes "
                f"to find the largest: pass max_passes={2 * self.max_passes}."
            )
        elif overflows_at is None:
            sentence = (
                f"No loss scale up to {largest}, the largest to try, overflows {where}."
            )
        return Calibration(
            init_scale=init_scale,
            overflows_at=overflows_at,
            passes=self.passes,
            batches=self.batches,
            is_largest=self.is_largest,
            sentence=sentence,
        )
