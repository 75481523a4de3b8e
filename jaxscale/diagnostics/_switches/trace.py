"""Effects of each line of a model on the loss and the gradients, as users ask for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from ..._state.find import find_scale_state
from ..._trees.grammar import and_more
from ..._trees.pytrees import ScaleState
from .._text import number, percent
from .backward import Backward, check_floating
from .board import Switchboard
from .places import Line
from .search import CLOSE, Search, find_error

_MOST_LINES = 10  # that are printed


@dataclasses.dataclass(frozen=True)
class TracedLine:
    """A line of the model that rounds numbers.

    Attributes:
      where: file and line, relative to the working directory, or `""`.
      file: the file of the innermost frame outside of JAX and libraries of layers, or `""`.
      line: its line, or 0.
      source: the text of that line.
      layers: the layers that it runs in, as modules of Flax and `jax.named_scope` set them.
      operations: what it does, as JAX calls it.
      error: how far the gradients are off, in relation to those in float32, with this line alone as
        it is written: the error of the worst leaf, or inf if they are not finite.
      loss_error: how far the loss is off then.
      is_to_blame: whether the gradients are right with this line, and all others that are to
        blame, in float32.
    """

    where: str
    file: str
    line: int
    source: str
    layers: tuple[str, ...]
    operations: tuple[str, ...]
    error: float
    loss_error: float
    is_to_blame: bool

    def __str__(self) -> str:
        where = "no line of the model"
        if self.file:
            where = f"{self.where}: `{self.source}`"
        loss = f"the loss {percent(self.loss_error)}"
        return f"{where}\n    alone: gradients off by {percent(self.error)}, {loss}"


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """The findings of `trace`; `print` it for the sentences.

    Attributes:
      loss: the loss as it is written.
      float32_loss: the loss with all lines in float32.
      loss_scale: the loss scale.
      error: how far the gradients are off, the worst leaf in relation to that in float32; inf if
        they are not finite.
      nonfinite_outputs: which of the loss, the auxiliary output and the gradients hold inf or NaN.
      nonfinite_arguments: which arguments do.
      limit: which limit of the format is to blame at the lines to blame: `"overflow"`,
        `"underflow"`, `"rounding"`, `"range"` for the first two, or `""` for more than that.
      lines: the lines that round numbers, those to blame first, then the most harmful. Where
        float32 is not finite either, the line that makes inf or NaN.
      not_entered: the names of operations that hold others which were not looked at.
    """

    loss: float
    float32_loss: float
    loss_scale: float
    error: float
    nonfinite_outputs: tuple[str, ...]
    nonfinite_arguments: tuple[str, ...]
    limit: str
    lines: tuple[TracedLine, ...]
    not_entered: tuple[str, ...]

    @property
    def blamed(self) -> tuple[TracedLine, ...]:
        """The lines to blame, the most harmful first."""
        return tuple(line for line in self.lines if line.is_to_blame)

    def __str__(self) -> str:
        parts = [
            f"loss {number(self.loss)}, in float32 {number(self.float32_loss)}, "
            f"loss scale {number(self.loss_scale)}: gradients off by {percent(self.error)}"
        ]
        if self.nonfinite_arguments:
            parts.append(f"inf or NaN in {', '.join(self.nonfinite_arguments)}")
        if self.nonfinite_outputs:
            parts.append(f"inf or NaN in {', '.join(self.nonfinite_outputs)}")
        if self.limit:
            parts.append(f"what is lost at the lines to blame: {self.limit}")
        if self.not_entered:
            parts.append(f"looked at as one: {', '.join(self.not_entered)}")
        for line in self.lines[:_MOST_LINES]:
            parts.append(f"to blame: {line}" if line.is_to_blame else str(line))
        parts += [f"{words} lines" for words in and_more(self.lines, _MOST_LINES)]
        return "\n".join(parts)


def trace(
    fun: Callable[..., Any],
    scaling: ScaleState,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., TraceReport]:
    """Returns a function that says what each line of a model does to the loss and the gradients.

    It goes in 0.7.0: `jaxscale.diagnostics.doctor` names the lines to blame.

    The function compiles the operations of `jaxscale.value_and_grad`, also those in `jit`, loops,
    `cond`, `remat` and custom derivatives, as one program in which each line is computed in float32
    or as it is written. It tries each line by itself, and searches for the lines without which the
    gradients are right. Call it on the host, outside of `jit`, and with one small batch.

    A kernel counts as one operation. A ref from outside `fun` keeps what it holds, because `fun`
    runs on a copy.

    Args:
      fun: a function that returns a floating scalar. It may be jitted.
      scaling: a `jaxscale.LossScaleState` with the scale to trace with, or a tree with one.
      transform: what differentiates, as for `jaxscale.value_and_grad`. Of several losses, under a
        `vmap`, the report has the mean.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun` that returns a `TraceReport`: print it.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or that of a population.
      TypeError: when called, if the loss is no floating scalar, a parameter is not floating, or
        inside `jit`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> scaling = jaxscale.DynamicLossScale().init()
      >>> def loss_fn(w, x):
      ...     scores = x * w
      ...     return jnp.mean((scores * scores).astype(jnp.float32))
      >>> x = jnp.array([1.0, 2.0, 3.0, 400.0], jnp.float16)
      >>> report = diagnostics.trace(loss_fn, scaling)(jnp.float16(1.0), x)
      >>> report.limit
      'overflow'
      >>> report.lines[0].source
      'return jnp.mean((scores * scores).astype(jnp.float32))'
    """
    loss_scale = find_scale_state("trace", scaling).loss_scale
    if loss_scale.shape:
        raise ValueError(
            f"`trace(scaling)` needs one loss scale, got an array of shape {loss_scale.shape}. "
            "Pass the state of one member of the population."
        )

    differentiate = transform or jax.value_and_grad

    def trace_fun(*args: Any, **fun_kwargs: Any) -> TraceReport:
        leaves = jax.tree.leaves((args, fun_kwargs, loss_scale))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                "`trace` reads values, so it cannot run inside `jit` or another transformation. "
                "Call it where the training step is called, with the same arguments."
            )
        check_floating("trace", args, differentiate, kwargs)
        backward = Backward(
            fun, args, fun_kwargs, transform=differentiate, has_aux=has_aux, **kwargs
        )
        return _report(backward, float(loss_scale))

    return trace_fun


def _report(backward: Backward, loss_scale: float) -> TraceReport:
    search = Search(Switchboard(backward))
    error_of = search.error_at(loss_scale, factors=[1.0])
    written = search.as_written(loss_scale)
    blamed: list[Line] = []
    limit = ""
    if not search.exact.is_finite:
        birth = search.find_birth()
        lines = [] if birth is None else [birth.place.line]
        blamed = lines
    else:
        lines = search.lines
        blame = search.blame(error_of, loss_scale)
        if blame is not None:
            limit = blame.limit
            blamed = list(blame.lines) if blame.error <= CLOSE else []
    traced = [_describe(search, line, loss_scale, line in blamed) for line in lines]
    traced.sort(key=lambda line: (not line.is_to_blame, -line.error))
    return TraceReport(
        loss=written.loss,
        float32_loss=search.exact.loss,
        loss_scale=loss_scale,
        error=error_of(search.board.places),
        nonfinite_outputs=written.nonfinite,
        nonfinite_arguments=backward.nonfinite_arguments,
        limit=limit,
        lines=tuple(traced),
        not_entered=tuple(sorted(search.board.operations.not_entered)),
    )


def _describe(
    search: Search, line: Line, loss_scale: float, is_to_blame: bool
) -> TracedLine:
    places = [place for place in search.board.places if place.line == line]
    alone = search.board.evaluate(loss_scale, places)
    layers = [place.layer for place in places if place.layer]
    operations = dict.fromkeys(place.primitive for place in places)
    return TracedLine(
        **line.fields(),
        layers=tuple(dict.fromkeys(layers)),
        operations=tuple(operations),
        error=search.worst_error(alone.grads),
        loss_error=find_error(alone.loss, search.exact.loss),
        is_to_blame=is_to_blame,
    )
