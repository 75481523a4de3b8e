"""Reports of a trace as plain Python values, and how they print."""

import dataclasses
from collections.abc import Sequence

from ..._trees.grammar import and_more
from .._text import number, percent

_MOST_PLACES = 5  # of each kind that are printed


@dataclasses.dataclass(frozen=True)
class Place:
    """An equation of the backward pass, and the line of the model: see `TracedNonfinite`."""

    primitive: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    direction: str
    scaled: bool
    where: str
    file: str
    line: int
    source: str
    called_from: tuple[str, ...]
    layer: str
    iteration: tuple[int, ...]
    times: int
    visits: int
    share: float

    def _say(self, what: str, advice: Sequence[str]) -> str:
        """Returns two lines of a report: what happened to which numbers and where, and details.

        Advice comes after the details.
        """
        shape = ",".join(map(str, self.shape))
        share = f"{percent(self.share)} of the {what}"
        where = "no line of the model"
        if self.file:
            where = f"{self.where}: `{self.source}`"
        parts = [self.direction, self.primitive, f"{self.dtype}[{shape}]", share, where]
        summary = ", ".join(parts)
        details = "; ".join([*self._list_details(), *advice])
        return f"{summary}\n    {details}"

    def _list_details(self) -> list[str]:
        details = []
        if self.layer:
            details.append(f"in {self.layer}")
        if self.called_from:
            innermost = ", ".join(self.called_from[:3])
            details.append(f"called from {innermost}")
        if self.iteration:
            indices = ", ".join(map(str, self.iteration))
            details.append(f"iteration {indices}")
        if self.visits > 1:
            details.append(f"{self.times} of {self.visits} times")
        return details


# What each cause means.
_CAUSES = {
    "range": "beyond {dtype}: float32 would hold it",
    "value": "not finite in float32 either: a division by zero, log(0), or far too large",
    "infinities": "a NaN made of infinities put there on purpose: is a whole row masked?",
    "given": "the inf or NaN was there before, in a constant or an argument",
}


@dataclasses.dataclass(frozen=True)
class TracedNonfinite(Place):
    """A place where an inf or a NaN was made.

    Attributes:
      primitive: the operation, as JAX calls it.
      dtype: the dtype of its output.
      shape: the shape of its output.
      inputs: dtypes and shapes of its inputs, such as `"float16[8,128]"`.
      direction: `"forward"` if the loss or the auxiliary output needs it, or `"backward"`.
      scaled: whether it depends on the loss scale. If not, no other scale can help.
      where: file and line, relative to the working directory, or `""`.
      file: the file of the innermost frame outside of JAX and libraries of layers, or `""`. For
        an operation of a backward rule, it is that of the call.
      line: its line, or 0.
      source: the text of that line.
      called_from: files and lines that called it, innermost first.
      layer: the scopes it is in, as modules of Flax and `jax.named_scope` set them.
      iteration: the index of each loop around it, outermost first, when it first happened. In
        a scan it is the index of the slice, also in the backward pass.
      times: how many times it happened at this place.
      visits: how many times this equation was run.
      share: the share of its output's elements that it made inf or NaN, when it first happened.
      elements: the number of these elements.
      cause: `"range"`: the inputs are finite, and so is the output in float32.
        `"value"`: the inputs are finite, and the output is not, in float32 either.
        `"infinities"`: a NaN made of infinities that were put there on purpose.
        `"given"`: an inf or NaN of a constant or an argument is first used here.
      reaches: the outputs that the inf or NaN got to, such as `"loss"`, `"grads['w']"` or
        `"aux['stats']"`. Empty if it became finite on the way, which is right for a mask and wrong
        for a norm.
      least_input: the least finite number among its floating-point inputs.
      largest_input: the largest one.
      float32_result: the largest magnitude that float32 gives in place of these elements: inf
        or NaN if it cannot hold them either, or cannot run the equation.
    """

    elements: int
    cause: str
    reaches: tuple[str, ...]
    least_input: float
    largest_input: float
    float32_result: float

    def __str__(self) -> str:
        advice = [_CAUSES[self.cause].format(dtype=self.dtype)]
        if self.cause == "range" and self.scaled:
            advice.append("a lower loss scale may help")
        elif self.cause == "range":
            advice.append("a lower loss scale cannot help")
        return self._say("elements", [*advice, self._say_reaches()])

    def _say_reaches(self) -> str:
        if not self.reaches:
            return (
                "became finite before the loss and the gradients: "
                "fine for a mask, not for a norm"
            )
        grads = [name for name in self.reaches if name.startswith("grads")]
        others = [name for name in self.reaches if name not in grads]
        if len(grads) > 3:
            grads = [f"{len(grads)} of the gradients"]
        return f"reaches {', '.join(others + grads)}"


@dataclasses.dataclass(frozen=True)
class TracedUnderflow(Place):
    """A place where most nonzero values became zero or subnormal.

    The attributes that are not listed are those of `TracedNonfinite`.

    Attributes:
      dtype: the dtype of its output, in which the values are zero or subnormal.
      scaled: whether it depends on the loss scale. If so, a higher one helps.
      iteration: the index of each loop around it, on the visit that lost most.
      times: on how many visits most nonzero values were lost.
      share: the share of the nonzero values that was lost, on the visit that lost most.
      nonzero: how many values are not zero in float32 on that visit.
      zeros: how many of them became zero.
      subnormals: how many of them became subnormal.
      lost_sum: the share of those that became zero in the sum of all magnitudes. It is small if
        only the smallest values were lost, as in a confident softmax.
    """

    nonzero: int
    zeros: int
    subnormals: int
    lost_sum: float

    def __str__(self) -> str:
        zeros = percent(self.zeros / self.nonzero)
        subnormals = percent(self.subnormals / self.nonzero)
        what = f"nonzero values lost ({zeros} zero, {subnormals} subnormal)"
        advice = "no loss scale can help"
        if self.scaled:
            advice = "a higher loss scale helps"
        return self._say(what, [advice])


@dataclasses.dataclass(frozen=True)
class TracedConstant:
    """A number of the source that its dtype rounds to 0, 1, -1 or inf.

    Attributes:
      value: the number, such as 1e-9.
      became: what it is in the dtype: 0, 1, -1, inf or -inf.
      dtype: the dtype, such as `"float16"`.
      primitive: the operation that uses it. The other attributes are those of `TracedNonfinite`.
    """

    value: float
    became: float
    dtype: str
    primitive: str
    where: str
    file: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.value:.9g} is {self.became:g} in {self.dtype}, {self.where}: `{self.source}`"


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """What `trace` found, as plain Python values; `print` it.

    Attributes:
      loss: the loss.
      loss_scale: the loss scale it was traced with.
      equations: how many equations were run. Each iteration of a loop counts.
      nonfinite: where inf and NaN were made, in the order of execution. Places of cause
        `"given"` come last, and only if no other place explains the outputs they reach.
      underflows: where most nonzero values were lost, in the order of execution. The first
        place is the likely cause of the others.
      nonfinite_arguments: the arguments that held inf or NaN before anything ran, such as
        `"args[1]['x']"`.
      nonfinite_outputs: which of the loss, the auxiliary output and the gradients hold them.
      not_compared: primitives that may have lost values but cannot be run in float32.
      not_entered: primitives that hold operations and ran as one, such as a `shard_map`, or one
        that a newer JAX describes in a form not known here.
      constants: the numbers of the source that their dtype rounds to 0, 1, -1 or inf.
    """

    loss: float
    loss_scale: float
    equations: int
    nonfinite: tuple[TracedNonfinite, ...]
    underflows: tuple[TracedUnderflow, ...]
    nonfinite_arguments: tuple[str, ...]
    nonfinite_outputs: tuple[str, ...]
    not_compared: tuple[str, ...]
    not_entered: tuple[str, ...]
    constants: tuple[TracedConstant, ...]

    @property
    def first_nonfinite(self) -> TracedNonfinite | None:
        """The first place whose inf or NaN reaches an output; if none does, the first."""
        if not self.nonfinite:
            return None
        for place in self.nonfinite:
            if place.reaches:
                return place
        return self.nonfinite[0]

    @property
    def found(self) -> bool:
        """Whether there is anything to report."""
        return bool(
            self.nonfinite
            or self.underflows
            or self.nonfinite_outputs
            or self.constants
        )

    def __str__(self) -> str:
        summary = (
            f"{self.equations} equations, loss {number(self.loss)}, "
            f"loss scale {number(self.loss_scale)}"
        )
        if self.not_entered:
            summary += f", looked at as one: {', '.join(self.not_entered)}"
        if not self.found:
            return f"nothing found: {summary}"
        lines = [summary]
        if self.nonfinite_arguments:
            lines.append(
                f"inf or NaN in the arguments: {', '.join(self.nonfinite_arguments)}"
            )
        first = self.first_nonfinite
        if first is not None:
            kind = "inf or NaN"
            if first.cause == "range":
                kind = "overflow"
            lines.append(f"first {kind}: {first}")
        for constant in self.constants[:_MOST_PLACES]:
            lines.append(f"rounded: {constant}")
        others = [place for place in self.nonfinite if place is not first]
        lines += _say_places("also inf or NaN", others)
        lines += _say_places("underflow", self.underflows)
        if self.not_compared:
            lines.append(f"not compared with float32: {', '.join(self.not_compared)}")
        return "\n".join(lines)


def _say_places(what: str, places: Sequence[Place]) -> list[str]:
    """Returns lines on the first places, and on how many more there are."""
    lines = [f"{what}: {place}" for place in places[:_MOST_PLACES]]
    for words in and_more(places, _MOST_PLACES):
        lines.append(f"{words} places: {what}")
    return lines
