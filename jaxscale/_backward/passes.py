"""The backward passes of `scale_backward`: one, and more if gradients overflow or flush.

A few cotangents may be far larger than all others, and set the power for them. If a gradient has
next to nothing in it then, small and large cotangents are pulled back apart, each at a power of
their own. The gradients are the sums, as a backward pass is linear.

All gradients may be next to nothing though no cotangent is: then these became small on their way,
and the pass is repeated at a larger scale. That one may overflow, so the gradients of the first are
kept, and each number is taken from there if it is not finite. A finite number is never given up for
one that is not.

One loop makes all passes, so the compiled program holds one.

A step in which one pass is enough pays for no other. What the loop would keep for another pass is
not written then, and starts uninitialized.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._gradients.reduction import reduce_sizes
from .._gradients.scaled import Scaled, divide, multiply
from .._gradients.verdict import agree_on_size
from .._jax import jaxprs
from .._jax.jaxprs import AxisNames
from .._trees.leaves import blank, cast, uninitialized
from .cotangent_scale import Sizes, choose_power, find_sizes, magnitude

# The scale is divided by this after an overflow.
_BACKOFF = 2.0**8

# The scale is multiplied by this if all gradients are small: cotangents that stand as high as they
# may at first then still fit in float16.
_RISE = 2.0**4

# If a loop hides where cotangents enter half precision, nothing says what fits, and the scale is
# multiplied by the first. What was too small to be exact then is, but for what is smaller by
# 2**20. By the second if nothing but zeros came out: all of it flushed.
_RISE_IN_LOOP = 2.0**24
_RISE_OF_ZEROS = 2.0**34

# A scale below this would not be a normal number, and might be flushed to 0; nor would the
# reciprocal of one above the other.
_SMALLEST_SCALE = 2.0**-126
_LARGEST_SCALE = 2.0**126

# In float16 a number below the first is inexact, and one up to the second becomes 0.
_SMALLEST_NORMAL = 2.0**-14
_FLUSHED = 2.0**-25

# The part of the largest cotangent up to which others are small, and gradients as well if all are.
# It lies above `_SMALLEST_NORMAL`, so that large ones are exact at the power of the largest.
_SMALL = 2.0**-10

# What a pass pulls back: all cotangents, and if a gradient asks for it the small ones, and then the
# large ones.
_ALL, _SMALL_ONES, _LARGE_ONES = range(3)


class Options(NamedTuple):
    """The options of the passes."""

    scale: float | None  # `None`: chosen from the cotangents
    retries: int
    axes: Any  # the named axes along which devices must use one scale
    may_flush: bool = False  # whether half precision flushes what float32 holds
    in_loop: bool = False  # whether a loop hides where cotangents enter half precision

    @property
    def may_divide(self) -> bool:
        """Small and large cotangents may be pulled back apart."""
        return self.may_flush and self.scale is None


class PassReport(NamedTuple):
    """A report of the passes of one call."""

    num_repeats: Any  # i32[], how many were repeated at another scale
    is_raised: Any  # bool[], whether that was a larger one, as gradients were almost 0
    is_divided: Any  # bool[], whether small and large cotangents were pulled back apart
    is_lost: Any  # bool[], whether gradients were nothing but zeros, as most cotangents flushed


# Called on the host with the report of each call, for the doctor and for benchmarks.
observer: ContextVar[Callable[[PassReport], None] | None]
observer = ContextVar("observer", default=None)


def observe(report: PassReport | None) -> None:
    """Hands a report to the observer, if there are both."""
    call = observer.get()
    if report is not None and call is not None:
        jax.debug.callback(call, report)


class _Progress(NamedTuple):
    """The carry of the loop, but for gradients."""

    stage: jax.Array  # i32[], what the next pass, or the last one, pulls back
    is_unfinished: jax.Array  # bool[], whether there is a next pass
    num_repeats: jax.Array  # i32[]
    factor: jax.Array  # f32[], what scales are multiplied by in repeated passes
    start: jax.Array  # f32[], the first scale
    threshold: jax.Array  # f32[], up to which cotangents are small
    asks: jax.Array  # bool[n], which gradients ask for another pass
    only_zeros: jax.Array  # bool[], whether no pass gave anything else
    scale: jax.Array  # f32[], of the last gradients
    is_finite: jax.Array  # bool[], whether these are finite
    is_kept: jax.Array  # bool[], whether they are kept
    kept_scale: jax.Array  # f32[], of those that are kept


class _Carry(NamedTuple):
    """The carry of the loop from one pass to the next."""

    progress: _Progress
    last: list[Any]  # the scaled gradients of the last pass
    # Those of the stage before, or before a larger scale, if there was one.
    kept: list[Any]


def pull_back(
    pull: Callable[[list[Any]], list[Any]],
    cotangents: list[Any],
    dtypes: Sequence[Any],
    options: Options,
) -> tuple[list[jax.Array], PassReport | None]:
    """Runs a backward pass, and again if gradients overflow or flush.

    Without retries it runs once, and nothing looks at what comes out.

    Args:
      pull: the backward pass: a function of scaled cotangents, which returns scaled gradients.
      cotangents: the cotangents, unscaled.
      dtypes: the dtype in which each gradient is divided by its scale, if it is float32 or wider.
      options: how passes are made.

    Returns:
      The gradients, unscaled, in float32 or wider, and what happened, if something looked. The
      gradients are NaN where they would be nothing but zeros because most cotangents flushed.
    """
    if not options.retries:
        scale = _choose_scale(find_sizes(cotangents, options.axes), options)
        gradients = pull([_scale(each, scale) for each in cotangents])
        return _unscale(gradients, dtypes, scale), None

    @jax.jit  # traced once, for its types and for the loop
    def run_pass(progress: _Progress) -> tuple[_Progress, list[Any]]:
        chosen = cotangents
        if options.may_divide:
            stage, threshold = progress.stage, progress.threshold
            chosen = [_choose(each, stage, threshold) for each in cotangents]
        sizes = find_sizes(chosen, options.axes)
        scale = _choose_scale(sizes, options)
        # The large ones have the first scale, at which all cotangents were finite: alone, their sum
        # may be so much smaller that they would overflow at a scale of their own.
        start = jnp.where(progress.stage == _ALL, scale, progress.start)
        scale = jnp.where(progress.stage == _SMALL_ONES, scale, start)
        scale = jnp.clip(scale * progress.factor, _SMALLEST_SCALE, _LARGEST_SCALE)
        gradients = pull([_scale(each, scale) for each in chosen])
        progress = progress._replace(start=start, scale=scale)
        return _advance(progress, gradients, sizes, options), gradients

    def run_next(carry: _Carry) -> _Carry:
        progress, gradients = run_pass(carry.progress)
        kept = carry.kept
        if options.may_divide:
            # A selection would read and write all of them in each pass.
            kept = jax.lax.cond(progress.is_kept, lambda: gradients, lambda: carry.kept)
        return _Carry(vary(progress), gradients, kept)

    start = _Progress(
        stage=jnp.int32(_ALL),
        is_unfinished=jnp.array(True),
        num_repeats=jnp.int32(0),
        factor=jnp.float32(1),
        start=jnp.float32(1),
        threshold=jnp.float32(0),
        asks=jnp.ones(len(dtypes), jnp.bool_),
        only_zeros=jnp.array(True),
        scale=jnp.float32(1),
        is_finite=jnp.array(False),
        is_kept=jnp.array(False),
        kept_scale=jnp.float32(1),
    )
    numbers, types = _types_of(run_pass, start)
    types = tuple(types)
    # What the loop carries must vary along the axes that its result varies along.
    axes = frozenset().union(*map(jaxprs.varying, numbers))

    def vary(progress: _Progress) -> _Progress:
        return _Progress(*(jaxprs.vary(number, axes) for number in progress))

    last = jax.lax.while_loop(
        lambda carry: carry.progress.is_unfinished,
        run_next,
        _Carry(
            progress=vary(start),
            last=_starts(types),
            kept=_starts(types) if options.may_divide else [],
        ),
    )
    return _finish(last, cotangents, dtypes, options)


def _choose_scale(sizes: Sizes, options: Options) -> jax.Array:
    if options.scale is not None:
        return jnp.float32(options.scale)
    return choose_power(sizes.largest, sizes.total)


def _advance(
    progress: _Progress, gradients: list[Any], of_cotangents: Sizes, options: Options
) -> _Progress:
    """Chooses the next pass: a repetition, the next stage, or none."""
    bits = jnp.concatenate(list(map(_find_largest, gradients)))
    sizes = agree_on_size(bits, options.axes)
    largest = of_cotangents.largest
    is_finite = jnp.all(jnp.isfinite(sizes))
    # No retry helps if a cotangent is inf or NaN before it is scaled.
    has_retry = jnp.isfinite(largest) & (progress.num_repeats < options.retries)
    # A larger scale than one without overflows is not lowered.
    repeats = has_retry & ~is_finite & (progress.factor <= 1)
    factor = jnp.where(repeats, progress.factor / _BACKOFF, progress.factor)
    is_first = progress.stage == _ALL
    asks = jnp.zeros_like(progress.asks)
    rises = jnp.array(False)
    if options.may_divide:
        # Whether some cotangents are inexact beside the largest.
        are_spread = largest * of_cotangents.largest_reciprocal > 1 / _SMALLEST_NORMAL
        # If they are not, and all gradients are small, the cotangents became small on their way.
        # In a loop that shows in one gradient, as the losses in it may be far apart.
        are_small = jnp.max(sizes) < _SMALL * largest * progress.scale
        rise = jnp.float32(_RISE)
        if options.in_loop:
            are_small |= jnp.any(sizes < _SMALLEST_NORMAL)
            rise = jnp.where(jnp.any(sizes > 0), _RISE_IN_LOOP, _RISE_OF_ZEROS)
        may_rise = is_first & has_retry & is_finite & (progress.factor == 1)
        rises = may_rise & (largest > 0) & ~are_spread & are_small
        factor = jnp.where(rises, rise, factor)
        repeats |= rises
        still_asks = jnp.where(
            is_first, are_spread & (sizes < _SMALLEST_NORMAL), sizes != 0
        )
        still_asks &= is_finite & jnp.isfinite(largest)
        asks = jnp.where(repeats, progress.asks, progress.asks & still_asks)
    goes_on = ~repeats & jnp.any(asks) & (progress.stage != _LARGE_ONES)
    is_kept = goes_on | rises
    return progress._replace(
        stage=progress.stage + goes_on.astype(jnp.int32),
        is_unfinished=repeats | goes_on,
        num_repeats=progress.num_repeats + repeats.astype(jnp.int32),
        factor=factor,
        threshold=jnp.where(is_first, largest * _SMALL, progress.threshold),
        asks=asks,
        only_zeros=progress.only_zeros & (~is_finite | jnp.all(sizes == 0)),
        is_finite=is_finite,
        is_kept=is_kept,
        kept_scale=jnp.where(is_kept, progress.scale, progress.kept_scale),
    )


def _finish(
    carry: _Carry,
    cotangents: list[Any],
    dtypes: Sequence[Any],
    options: Options,
) -> tuple[list[jax.Array], PassReport]:
    """Returns the unscaled gradients after the last pass, and what happened."""
    progress = carry.progress
    is_raised = progress.factor > 1
    is_lost = jnp.array(False)
    if options.may_flush:
        scale = jnp.where(progress.is_finite, progress.scale, progress.kept_scale)
        is_lost = _have_flushed(cotangents, scale, progress.only_zeros, options.axes)
    scale = _nan_if(is_lost, progress.scale)
    if options.may_divide:
        kept_scale = _nan_if(is_lost, progress.kept_scale)
        gradients = [
            _combine(
                last,
                kept,
                scale,
                kept_scale,
                progress.stage,
                is_raised,
                dtype=jnp.dtype(dtype),
            )
            for last, kept, dtype in zip(carry.last, carry.kept, dtypes, strict=True)
        ]
    else:
        gradients = _unscale(carry.last, dtypes, scale)
    is_divided = progress.stage == _LARGE_ONES
    report = PassReport(progress.num_repeats, is_raised, is_divided, is_lost)
    return gradients, report


# What is done with each cotangent and each gradient is compiled as a function, as a block that is
# called a hundred times may have hundreds of them.


@jax.jit
def _scale(cotangent: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns a cotangent times a scale, in its own dtype."""
    return cast(multiply(cotangent, scale), cotangent.dtype)


@jax.jit
def _choose(cotangent: jax.Array, stage: jax.Array, threshold: jax.Array) -> jax.Array:
    """Returns a cotangent with zeros in the place of what a pass does not pull back."""
    is_large = magnitude(cotangent) > threshold
    left_out = (stage == _SMALL_ONES) & is_large | (stage == _LARGE_ONES) & ~is_large
    return jnp.where(left_out, jnp.zeros_like(cotangent), cotangent)


@functools.partial(jax.jit, static_argnums=0)
def _start(aval: Any) -> jax.Array:
    """Returns an array of a type that the first pass writes."""
    return uninitialized(aval)


@functools.partial(jax.jit, static_argnums=0)
def _starts(types: tuple[Any, ...]) -> list[jax.Array]:
    return list(map(_start, types))


@jax.jit
def _find_largest(gradient: jax.Array) -> jax.Array:
    """Returns the largest magnitude in a gradient, as bits, an `i32[1]`."""
    return reduce_sizes(Scaled([gradient])).largest_bits()[None]


@functools.partial(jax.jit, static_argnames="dtype")
def _divide(gradient: jax.Array, scale: jax.Array, *, dtype: Any) -> jax.Array:
    """Returns a gradient divided by a scale, in a dtype of its own, or in float32."""
    return divide(cast(gradient, dtype), scale)


@functools.partial(jax.jit, static_argnames="dtype")
def _combine(
    last: jax.Array,
    kept: jax.Array,
    scale: jax.Array,
    kept_scale: jax.Array,
    stage: jax.Array,
    is_raised: jax.Array,
    *,
    dtype: Any,
) -> jax.Array:
    """Returns the gradient that two passes give, unscaled, after the last stage."""
    last = _divide(last, scale, dtype=dtype)
    kept = _divide(kept, kept_scale, dtype=dtype)
    of_all = jnp.where(is_raised & ~jnp.isfinite(last), kept, last)
    divided = jnp.where(stage == _LARGE_ONES, kept + last, of_all)
    # If the small cotangents gave nothing to what asked, or nothing finite, those of all count.
    return jnp.where(stage == _SMALL_ONES, kept, divided)


@jax.jit
def _count_flushed(cotangent: jax.Array, scale: jax.Array) -> jax.Array:
    """Counts the elements of a cotangent that flush at a scale, minus those that do not."""
    size = magnitude(cotangent)
    flushes = size * cast(scale, size.dtype) <= _FLUSHED
    votes = jnp.where(size > 0, jnp.where(flushes, 1.0, -1.0), 0.0)
    return jnp.sum(votes, dtype=jnp.float32)


def _unscale(
    gradients: Sequence[Any], dtypes: Sequence[Any], scale: jax.Array
) -> list[jax.Array]:
    """Returns gradients divided by a scale, each in a dtype of its own, or in float32."""
    return [
        _divide(gradient, scale, dtype=jnp.dtype(dtype))
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    ]


def _have_flushed(
    cotangents: Sequence[Any], scale: jax.Array, only_zeros: jax.Array, axes: AxisNames
) -> jax.Array:
    """Returns whether gradients are only zeros, and most cotangents flush at a scale."""

    def count() -> jax.Array:
        return jnp.sum(jnp.stack([_count_flushed(each, scale) for each in cotangents]))

    nothing = blank(_types_of(count))
    votes = jax.lax.cond(only_zeros, count, lambda: nothing)
    if axes is not None:
        votes = jax.lax.psum(votes, axes)
    return votes > 0


def _nan_if(flag: jax.Array, number: jax.Array) -> jax.Array:
    """Returns NaN in the place of a number, if a flag is set."""
    # Compiled, as JAX's check for NaN would stop at one that is not selected.
    return jax.jit(jnp.where)(flag, jnp.nan, number)


def _types_of(fun: Callable[..., Any], *args: object) -> Any:
    """Returns the types of what a function returns, in its place."""
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)
