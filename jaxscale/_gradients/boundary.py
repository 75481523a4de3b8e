"""`scale_backward`: a function whose backward pass is scaled, and nothing outside of it is.

The function is traced and split in two (see `head_and_tail`). Its backward pass, the rule of one
`jax.custom_vjp`, has four steps: the tail, unscaled; the scale, from the cotangents that leave it;
the head, with these cotangents scaled, and again at a lower scale if it overflows; the division.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from .. import _jax
from .._boundary import check_cotangent, mark_boundary, under_autocast
from .._trees.checks import int32, normal_float32
from .._trees.flat import Flat, array_names
from .._trees.nnx_objects import wrap_call
from .._trees.tree import blank, cast, widen
from .head_and_tail import Part, split
from .reduction import reduce_gradients, reduce_sizes
from .scaled import Scaled, divide, multiply
from .verdict import agree, agree_on_sizes, axis_names, no_such_axis

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# By what the scale is divided after an overflow. Two retries reach a 256th.
_BACKOFF = 16.0

# The cotangents of one loss may be smaller than those of another by this power of two, and keep
# their accuracy in float16. Below that the scale rises, by no more than one retry takes back.
_UNHARMED, _MOST_RAISED = 12, 4

# A scale below it would not be a normal number, and might be flushed to 0.
_LEAST = 2.0**-126

_NO_FORWARD = (
    "`scale_backward(fun)` was differentiated in forward mode (`jax.jvp`, `jax.jacfwd`, "
    "`jax.linearize`). There is no cotangent to scale. Differentiate `fun` itself, or use reverse "
    "mode: `jax.grad`, `jax.vjp`."
)
_NO_SECOND = (
    "`scale_backward(retries={})`: its backward pass was differentiated in reverse mode, such as "
    "for the gradient of a gradient norm. The loop of retries has no such derivative. Pass "
    "`retries=0`, and wrap what is made of the gradients by `scale_backward`, too; or "
    "differentiate the gradients in forward mode: `jax.jvp(jax.grad(...), ...)`."
)
_UNSCALED_SECOND = (
    "`scale_backward(retries=0)`: its backward pass is differentiated in reverse mode, such as for "
    "the gradient of a gradient norm. That second pass is not scaled, and small values flush to 0 "
    "in it. Wrap what is made of the gradients by `scale_backward`, too, apart from the loss: "
    "`loss(p) + scale_backward(lambda p: penalty(jax.grad(loss)(p)))(p)`."
)
_HALF_INPUT = (
    "`scale_backward(fun)` was differentiated by its input {}, which is {}: a gradient of that "
    "dtype flushes to 0 as it is unscaled. Keep parameters in float32 and cast them inside of "
    "`fun`; or let `fun` include what made the input, such as the whole model or the loss."
)

_WAY_OUT = (
    "Call what is at that line outside of the function that `scale_backward` wraps, such as on "
    "what goes into it."
)
_naming_the_line = functools.partial(_jax.naming_the_line, "scale_backward(fun)", _WAY_OUT)


class _Options(NamedTuple):
    scale: float | None  # `None` to take it from the cotangents
    retries: int
    axis_name: Any


def scale_backward(
    fun: Callable[_Args, _Result], scale: Any = "auto", *, retries: int = 2, axis_name: Any = None
) -> Callable[_Args, _Result]:
    """Returns the function with a scaled backward pass: loss scaling without a state.

    It is for trainers that call `jax.value_and_grad` and the optimizer themselves: give them the
    loss, or the model, wrapped by this. Values are unchanged, and the gradients that come out are
    unscaled. Wrap the optimizer by `jaxscale.skip_nonfinite`, as a bad batch still gives bad
    gradients. In a step of your own, `jaxscale.train_step` does it all.

    The function is traced, as by `jax.jit`. What follows its last half-precision value, such as
    the loss, runs backward unscaled in float32. The cotangents that reach half precision are
    multiplied by one power of two, which brings the largest to about 1, however large the loss is.
    The gradients for all inputs are divided by that number, in float32 or wider. Matrix products
    in float32 count as half precision if a `jaxscale.autocast` is around the function, or if there
    is nothing else in half precision.

    Loops and branches belong to one side as a whole: wrap the loss inside of a `jax.lax.scan`
    over micro-batches. Around it the scale would be about 1, however small the gradients are.
    `jit`, `shard_map` and `jax.checkpoint` are entered. A `jax.checkpoint` outside of the wrapped
    function is cheaper than one inside, which is computed again with each retry.

    A backward rule that is not linear, such as `clip_gradient` in JAX's documentation, sees scaled
    cotangents inside of the function. Apply it outside, to what goes in, or clip in the optimizer.

    Args:
      fun: a function, such as a loss, Linen's `model.apply`, a module or a method of NNX, or a
        module of Equinox. Its inputs and outputs may be any trees. Arrays that it closes over
        get gradients, too.
      scale: `"auto"`, or a number to scale by.
      retries: how often the backward pass may be repeated, each time at a 16th of the scale, if
        the gradients are not finite and the cotangents were. The forward pass is not repeated.
        Gradients that become 2**15 times larger on their way repeat it in every step; for these
        `jaxscale doctor` says which number to pass as `scale`. The loop keeps all gradients of
        `fun` in memory at once, where an optimizer might use each as it comes. On a CPU XLA takes
        many times as long for a convolution in a loop. 0 compiles to no loop, and the backward
        pass can be differentiated in reverse mode. That second pass is not scaled: wrap what is
        made of the gradients, such as a penalty, by `scale_backward`, too.
      axis_name: further axes of `shard_map` or `pmap` along which devices are to use one scale.
        They agree by themselves along those that need it: where gradients are summed, and
        where `fun` itself communicates.

    Returns:
      A function with the arguments, the outputs and the signature of `fun`.

    Raises:
      TypeError: if `fun` is not callable, or `scale` or `retries` is not a number. When
        differentiated: in forward mode (inside of `jax.jit` the words are JAX's); by an input in
        float16, or through an output in it, as such a cotangent has lost the small values already
        (bfloat16 has not); or twice in reverse mode with retries.
      ValueError: if `scale` is not positive, or not normal in float32, or if `retries` is below 0.

    Warns:
      UserWarning: if its backward pass is differentiated in reverse mode, outside of another one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxscale
      >>> def loss_fn(w, x):
      ...     y = w.astype(jnp.float16) * x
      ...     return 2.0**-30 * jnp.sum(y.astype(jnp.float32))
      >>> w, x = jnp.float32(1), jnp.float16(3)
      >>> jax.grad(loss_fn)(w, x)
      Array(0., dtype=float32)
      >>> jax.grad(jaxscale.scale_backward(loss_fn))(w, x) * 2.0**30
      Array(3., dtype=float32)
    """
    if not callable(fun):
        raise TypeError(
            f"`scale_backward(fun)` must be a function, got {type(fun).__name__}. Pass the loss "
            "or the model itself, such as `model.apply`, and not what it returns."
        )
    is_auto = isinstance(scale, str)
    if is_auto and scale != "auto":
        raise ValueError(
            f'`scale_backward(scale=...)` must be "auto" or a positive number, got {scale!r}.'
        )
    number = None if is_auto else normal_float32("scale_backward", "scale", scale)
    retries = int32("scale_backward", "retries", retries, 0, "retries")
    return wrap_call(functools.partial(_call, _Options(number, retries, axis_name)), fun)


def _call(options: _Options, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    output_names: list[str] = []  # those of the arrays

    def named(*args: Any, **kwargs: Any) -> Any:
        output = fun(*args, **kwargs)
        output_names[:] = array_names(output, jax.Array)
        return output

    flat = Flat(named, args, kwargs, getattr(fun, "__name__", "scale_backward"))
    # What the function closes over, tracers among it, becomes an input: a `custom_vjp` function
    # must not close over what it is differentiated by.
    jaxpr, consts = _jax.without_constants(jax.make_jaxpr(flat)(*flat.arrays))
    program = _jax.closed(jaxpr)
    input_names = ["that it closes over"] * len(consts)
    input_names += [f"args{name}" for name in array_names(args)]
    input_names += [f"kwargs{name}" for name in array_names(kwargs)]
    # Asked now: JAX may trace the backward pass when the `autocast` is through.
    plan = functools.cache(functools.partial(_Plan, program, under_autocast.get()))

    @jax.custom_vjp
    def scaled(*inputs: Any) -> Any:
        return tuple(_jax.jaxpr_as_fun(program)(*inputs))

    def forward(*inputs: Any) -> Any:
        perturbed = tuple(each.perturbed and _jax.holds_inexact(each.value) for each in inputs)
        for each, is_perturbed, name in zip(inputs, perturbed, input_names, strict=True):
            if is_perturbed and _jax.has_narrow_range(each.value.dtype):
                raise TypeError(_HALF_INPUT.format(name, each.value.dtype))
        with _naming_the_line():
            return plan(perturbed).forward([each.value for each in inputs])

    def backward(pull: Any, cotangents: Any) -> Any:
        for each, name in zip(cotangents, output_names, strict=True):
            check_cotangent(each, name)
        with _naming_the_line():
            return pull(cotangents, options)

    scaled.defvjp(forward, backward, symbolic_zeros=True)
    try:
        with mark_boundary():
            outputs = scaled(*consts, *flat.arrays)
    except TypeError as error:
        if not _jax.is_of_forward_mode(error):
            raise
        raise TypeError(_NO_FORWARD) from error
    return flat.restored(outputs)


class _Plan:
    """A program, split, and what is differentiated in each part by what."""

    def __init__(
        self, program: _jax.ClosedJaxpr, under_autocast: bool, perturbed: tuple[bool, ...]
    ) -> None:
        parts = split(program, under_autocast)
        self.inputs, self.tail = parts.inputs, parts.tail
        self.axes = _jax.collective_axes(program)
        by = {v for v, is_given in zip(self.inputs, perturbed, strict=True) if is_given}
        # Parameters are cast before the head, and the gradients cast back after it: in the loop
        # of retries all of them are in memory at once, and take half of it.
        self.head, self.sources = parts.head.without_casts(by)
        by |= set(self.sources)
        derived = self.head.derived(by)
        self.head_by = [var for var in self.head.inputs if var in by]
        # Of these, the inputs of the program that they are or are cast from.
        self.head_of = [self.sources.get(var, var) for var in self.head_by]
        self.tail_by = [var for var in self.tail.inputs if var in by]
        # Where the cotangents of the tail may enter the head.
        self.entries = [var for var in self.head.outputs if var in derived]
        self.entry_types: list[Any] = []

    def forward(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        """Returns the outputs, and what pulls cotangents back through both parts."""
        env = dict(zip(self.inputs, inputs, strict=True))
        env |= {var: cast(env[source], var.aval.dtype) for var, source in self.sources.items()}
        with _noting() as have_tangents:
            crossing, pull_head = _vjp(
                self.head, env, self.head_by, self.entries, note_outputs=_note_tangents
            )
        env |= zip(self.head.outputs, crossing, strict=True)
        # Of a `shard_map` the types are known only now, and are the same in each call.
        self.entry_types = [jax.typeof(env[var]) for var in self.entries]
        # If none has a tangent, no rule was asked.
        have_tangents = have_tangents or [False] * len(self.entries)
        entries = list(itertools.compress(self.entries, have_tangents))
        inexact = [atom for atom in self.tail.outputs if _jax.holds_inexact(atom.aval)]

        def note_entries(*given: Any) -> Any:
            return *_note_zeros(*given[: len(entries)]), *given[len(entries) :]

        by = [*entries, *self.tail_by]
        outputs, pull_tail = _vjp(self.tail, env, by, inexact, note_inputs=note_entries)
        # It holds no array: its structure says which entries there are.
        kept = [() if each else None for each in have_tangents]
        return tuple(outputs), Partial(self.backward, kept, pull_head, pull_tail)

    def backward(
        self, kept: Any, pull_head: Any, pull_tail: Any, cotangents: Any, options: _Options
    ) -> tuple[Any, ...]:
        """Returns the gradients for all inputs, `None` for those that have none."""
        given = [each for each in cotangents if _jax.holds_inexact(each)]
        with _noting() as are_zeros:
            pulled = pull_tail([_zero(x.aval) if isinstance(x, SymbolicZero) else x for x in given])
        number = len(pulled) - len(self.tail_by)
        gradients = dict(zip(self.tail_by, pulled[number:], strict=True))
        # If all of them are zeros, no rule was asked.
        are_zeros = are_zeros or [True] * number
        pairs = zip(pulled, are_zeros, strict=False)
        known = iter([None if is_zero else each for each, is_zero in pairs])
        entering = [None if each is None else next(known) for each in kept]
        if self.head_by and any(each is not None for each in entering):
            with _noting():
                through = self._through_head(pull_head, entering, options)
            for var, gradient in zip(self.head_of, through, strict=True):
                known = gradients.get(var)
                gradients[var] = gradient if known is None else gradient + widen(known)
        return tuple(
            cast(gradients[var], var.aval.dtype) if var in gradients else None
            for var in self.inputs
        )

    def _through_head(self, pull: Any, cotangents: list[Any], options: _Options) -> list[Any]:
        """Returns what the head makes of cotangents, in float32 or wider.

        Given is one for each entry, and `None` for an entry that nothing depends on.
        """
        entering = [each for each in cotangents if each is not None]
        axes = self._agreed_axes(entering, options.axis_name)

        def pull_scaled(scale: jax.Array) -> list[Any]:
            scaled = iter(zip(multiply(entering, scale), entering, strict=True))
            given = [
                _zero(aval) if each is None else _cast_like(*next(scaled))
                for aval, each in zip(self.entry_types, cotangents, strict=True)
            ]
            return list(pull(given))

        scale, is_finite = jnp.float32(options.scale or 1), jnp.array(True)
        if options.scale is None or options.retries:
            bits = reduce_sizes(Scaled(entering), by_leaf=True).numbers
            _, agreed = agree_on_sizes(jnp.zeros(0, jnp.bool_), dict(enumerate(bits)), axes)
            found = jnp.stack(list(agreed.values()))
            is_finite = jnp.all(jnp.isfinite(found))
            if options.scale is None:
                scale = _power(found, _MOST_RAISED if options.retries else 0)
        if options.retries:
            gradients, scale = _repeated(pull_scaled, scale, is_finite, options.retries, axes)
        else:
            gradients = pull_scaled(scale)
        pairs = zip(gradients, self.head_of, strict=True)
        gradients = divide([cast(each, var.aval.dtype) for each, var in pairs], scale)
        if not options.retries:
            return [_jax.note_transposing(each, _warn_unscaled) for each in gradients]
        reason = _NO_SECOND.format(options.retries)
        return [_jax.refuse_transposing(each, reason) for each in gradients]

    def _agreed_axes(self, entering: list[Any], axis_name: Any) -> tuple[Any, ...] | None:
        """Returns the axes along which the devices must use one scale."""
        inputs = [_jax.varying(var.aval) for var in self.head_by]
        vary_somewhere = frozenset().union(
            *inputs, *(_jax.varying(jax.typeof(x)) for x in entering)
        )
        # Where an input does not vary, its gradient is a sum over devices.
        axes = set(vary_somewhere.difference(frozenset.intersection(*inputs)))
        # Where the devices exchange numbers, none may go round again alone. What does not vary
        # is the same on all of them.
        for axis in (*self.axes, *axis_names(axis_name)):
            if axis in vary_somewhere or not _is_told_apart(axis):
                axes.add(axis)
        return tuple(sorted(axes, key=repr)) or None


def _is_told_apart(axis: Any) -> bool:
    """Returns whether types say what differs along a named axis, which must be there."""
    try:
        return _jax.is_told_apart(axis)
    except NameError as error:
        given = f"`scale_backward(axis_name={axis!r})`"
        raise no_such_axis(given, "largest cotangent") from error


def _vjp(
    part: Part,
    env: dict[Any, Any],
    by: Sequence[Any],
    of: Sequence[Any],
    note_inputs: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    note_outputs: Callable[..., Sequence[Any]] = lambda *outputs: outputs,
) -> tuple[list[Any], Any]:
    """Returns the outputs of a part, and what pulls cotangents of those in `of` back to `by`.

    Both may go through functions that note what JAX knows of their derivatives.
    """
    places = [i for i, atom in enumerate(part.outputs) if any(atom is each for each in of)]

    def fun(*given: Any) -> Any:
        values = env | dict(zip(by, note_inputs(*given), strict=True))
        outputs = part(*(values[var] for var in part.inputs))
        return list(note_outputs(*(outputs[i] for i in places))), outputs

    _, pull, outputs = jax.vjp(fun, *(env[var] for var in by), has_aux=True)
    return outputs, pull


# Where `_note_tangents` and `_note_zeros` write what they see.
_noted: ContextVar[list[bool]] = ContextVar("noted")


@contextlib.contextmanager
def _noting() -> Iterator[list[bool]]:
    """Gives a list of what `_note_tangents` or `_note_zeros` sees inside of this context.

    JAX knows of some derivatives that they are zero, and derivative rules of functions may ask. But
    `jax.vjp` takes and returns arrays: what crosses from one part to the other would look as if it
    had a derivative, and rules in the other part would fail, or compute with zeros.
    """
    noted: list[bool] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _note(flags: list[bool]) -> None:
    noted = _noted.get(None)
    if noted is not None:  # else it is in a program that is differentiated later: nobody asks
        noted[:] = flags


@jax.custom_jvp
def _note_tangents(*values: Any) -> tuple[Any, ...]:
    """Returns values as they are, and notes which of them have a tangent."""
    return values


def _tangents_noted(values: Any, tangents: Any) -> Any:
    _note([not isinstance(each, SymbolicZero) for each in tangents])
    return tuple(values), tuple(tangents)


_note_tangents.defjvp(_tangents_noted, symbolic_zeros=True)


@jax.custom_vjp
def _note_zeros(*values: Any) -> tuple[Any, ...]:
    """Returns values as they are, and notes which of their cotangents are zero."""
    return values


def _zeros_noted(_: None, cotangents: Any) -> Any:
    are_zeros = [isinstance(each, SymbolicZero) for each in cotangents]
    _note(are_zeros)
    return tuple(None if z else x for x, z in zip(cotangents, are_zeros, strict=True))


_note_zeros.defvjp(
    lambda *values: (tuple(each.value for each in values), None), _zeros_noted, symbolic_zeros=True
)


def _warn_unscaled() -> None:
    """Warns of a second reverse pass, unless that is the backward pass of a boundary itself."""
    if _noted.get(None) is None:
        warnings.warn(_UNSCALED_SECOND, stacklevel=2)


def _zero(aval: Any) -> Any:
    """Returns the cotangent of what nothing depends on."""
    zero = _jax.zero_cotangent(aval)
    return blank(aval) if zero is None else zero


def _cast_like(array: jax.Array, like: jax.Array) -> jax.Array:
    return cast(array, like.dtype)


def _repeated(
    pull: Callable[[jax.Array], list[Any]],
    scale: jax.Array,
    may_repeat: jax.Array,
    retries: int,
    axes: Any,
) -> tuple[list[Any], jax.Array]:
    """Returns gradients and the scale that they were made at, lower if the first ones overflow."""

    @jax.jit  # traced once, for its types and for the loop
    def one_pass(scale: jax.Array, number: jax.Array) -> tuple[list[Any], jax.Array]:
        gradients = pull(scale)
        again = ~agree(reduce_gradients(gradients).finite(), axes) & may_repeat & (number < retries)
        return gradients, again

    def body(carry: Any) -> Any:
        scale, number, *_ = carry
        gradients, again = one_pass(scale, number)
        lower = jnp.where(again, jnp.maximum(scale / _BACKOFF, _LEAST), scale)
        return lower, number + again.astype(jnp.int32), again, gradients

    number = jnp.zeros((), jnp.int32)
    *types, apart = jax.make_jaxpr(one_pass)(scale, number).out_avals
    axes_apart = _jax.varying(apart) | _jax.varying(jax.typeof(scale))
    start = [_jax.vary(each, axes_apart) for each in (scale, number, jnp.array(True))]
    carry = *start, [blank(aval) for aval in types]
    scale, _, _, gradients = jax.lax.while_loop(lambda carry: carry[2], body, carry)
    return gradients, scale


def _power(largest: jax.Array, most_raised: int) -> jax.Array:
    """Returns the power of two to scale cotangents by: it brings the largest to 1 or more, below 2.

    Given is the largest magnitude of each entry, an `f32[n]`. If those of some are so small that
    they would flush, it is raised, by 2**`most_raised` at most. Without finite cotangents it is 1,
    and otherwise 2**-126 to 2**126, so that it and its reciprocal are normal numbers. Exponents are
    taken from the bits: a rounded logarithm gives other numbers.
    """
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    most = jnp.max(exponents)
    least = jnp.min(jnp.where(largest > 0, exponents, most))
    raised = jnp.clip(most - least - _UNHARMED, 0, most_raised)
    exponent = jnp.clip(254 - most + raised, 1, 253)
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.all(jnp.isfinite(largest)), power, jnp.ones_like(power))
