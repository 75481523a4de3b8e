"""Counts of a function's products by their precision, with their lines."""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.cast_products import is_never_entered, why_not_cast
from .._autocast.product_owner import CallSite, outermost
from .._autocast.table import KERNELS, PRODUCTS
from .._jax.jaxprs import Jaxpr, JaxprEqn, closed, formats_of_product, programs
from .._trees.flat_functions import Flat
from .._trees.grammar import and_more
from .._trees.nnx_objects import wrap_call
from .._trees.pytrees import Leaf
from ._switches.equations import Around
from ._switches.places import find_line

_HALF = ("float16", "bfloat16")
_MOST_LINES = 20  # that are printed


class ProductLine(NamedTuple):
    """The products of one line in one precision.

    Attributes:
      dtype: the precision, such as `"float32"`: the widest dtype among their operands.
      number: how many there are.
      where: file and line, relative to the working directory, or `""` if no line is the user's.
      source: the text of that line.
      reason: why `autocast` leaves a float32 product as it is, or `""`.
    """

    dtype: str
    number: int
    where: str
    source: str
    reason: str

    def __str__(self) -> str:
        text = f"{self.number} at no line of yours"
        if self.where:
            text = f"{self.number} at {self.where}: `{self.source}`"
        if self.reason:
            text += f" ({self.reason})"
        return text


class Products(NamedTuple):
    """The findings of `products`; `print` it for a summary and the lines outside of half precision.

    Attributes:
      counts: how many products there are in each precision, by the name of the dtype.
      lines: the same by line, each a `ProductLine`, in the order in which they are first computed.
    """

    counts: dict[str, int]
    lines: tuple[ProductLine, ...]

    @property
    def not_half(self) -> tuple[ProductLine, ...]:
        """The lines whose products are neither in float16 nor in bfloat16."""
        return tuple(line for line in self.lines if line.dtype not in _HALF)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        if not total:
            return "No matrix products and no convolutions."
        what = "matrix products and convolutions"
        if total == 1:
            what = "matrix product or convolution"
        parts = [f"{count} in {dtype}" for dtype, count in sorted(self.counts.items())]
        lines = [f"  {line.dtype}: {line}" for line in self.not_half[:_MOST_LINES]]
        more = [
            f"  {words.capitalize()} lines."
            for words in and_more(self.not_half, _MOST_LINES)
        ]
        return "\n".join([f"{total} {what}: {', '.join(parts)}.", *lines, *more])


def products(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Products:
    """Returns how many products a function computes in each precision, and on which lines.

    Use it to see whether a model runs in float16. The function is traced and not run. Matrix
    products, convolutions and ragged products count, wherever they are: in `jit`, loops, `cond`,
    `remat`, custom derivatives, `shard_map` and kernels. An equation of a loop counts once, however
    often the loop runs. A function that is called twice counts twice, and all branches of a `cond`
    count.

    `fun` itself is the forward pass. To count both passes, pass `jax.value_and_grad(fun)`: for each
    product the backward pass has about two more, in the same precision.

    Args:
      fun: any function, such as `jaxscale.autocast(loss_fn)`.
      *args: the arguments for `fun`. They may hold modules of Flax NNX.
      **kwargs: the keyword arguments for `fun`.

    Returns:
      A `Products`: print it.

    Raises:
      TypeError: if `fun` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) @ w)
      >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
      >>> print(diagnostics.products(jaxscale.autocast(loss_fn), w, x))
      2 matrix products and convolutions: 2 in float16.
    """
    if not callable(fun):
        raise TypeError(
            f"`products(fun, *args)` must get a function first, got {type(fun).__name__}. Pass the "
            "function and its arguments: `products(jaxscale.autocast(loss_fn), params, batch)`."
        )
    args, kwargs = jax.tree.map(_as_in_jit, (args, kwargs))
    try:
        wrap_call(_raise_program, fun)(*args, **kwargs)
    except _Program as program:
        return _count(program.jaxpr)
    raise AssertionError("the function was not traced")


class _Program(Exception):
    """Raised with a traced program, so that no module of NNX keeps what was only traced."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        super().__init__()
        self.jaxpr = jaxpr


def _raise_program(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    flat = Flat(fun, args, kwargs, "products")
    raise _Program(jax.make_jaxpr(flat)(*flat.arrays).jaxpr)


def _as_in_jit(leaf: Leaf) -> Any:
    """Turns a NumPy array into one of JAX, because NumPy would compute with its own."""
    if isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf)
    return leaf


def _count(program: Jaxpr) -> Products:
    found = collections.Counter(_find(program, (), outermost(program), inside=""))
    counts: collections.Counter[str] = collections.Counter()
    lines = []
    for line, number in found.items():
        counts[line.dtype] += number
        lines.append(line._replace(number=number))
    return Products(dict(counts), tuple(lines))


def _find(
    program: Jaxpr, around: Around, site: CallSite, inside: str
) -> Iterator[ProductLine]:
    """Yields the products of a program, and of the programs that its equations hold.

    `inside` says why they run as they are written if each for itself would not, or is `""`.
    """
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            line = find_line(eqn, around)
            dtype = _find_dtype(eqn)
            reason = inside
            if dtype == "float32":
                reason = why_not_cast(eqn, site) or inside
            yield ProductLine(dtype, 1, line.where, line.text, reason)
        what = inside
        if name in KERNELS:
            what = "inside of a kernel"
        elif is_never_entered(eqn):
            what = inside or f"inside of `{name}`"
        for inner in programs(eqn):
            inner_site = site.inside(eqn, inner)
            yield from _find(closed(inner).jaxpr, (*around, eqn), inner_site, what)


def _find_dtype(eqn: JaxprEqn) -> str:
    """Returns the widest format of the two operands, or of integers their dtype."""
    operands: list[Any] = eqn.invars[:2]
    dtypes = formats_of_product(eqn) or {atom.aval.dtype for atom in operands}
    return str(jnp.result_type(*map(jnp.dtype, dtypes)))
