"""What smaller formats would lose of each layer, from the histograms of its leaves."""

from typing import Any, NamedTuple

import jax
import numpy as np

from .._trees.checks import int32, power_of_two
from .._trees.gradient_leaves import leaf_name
from ._formats import FORMATS
from ._histogram import Histogram, Shares, fetch_histogram, find_all_shares
from ._text import align_columns, percent, power


class Underflow(NamedTuple):
    """What `underflow` found; `print` it, or draw it with `plot_underflow`.

    Attributes:
      layers: what `shares` returns for each layer, under its path, in the order of the leaves.
      loss_scale: the loss scale that the formats are judged at.
    """

    layers: dict[str, dict[str, Shares]]
    loss_scale: float

    def __str__(self) -> str:
        headings = ("", *FORMATS)
        return f"{self.title}\n{align_columns([headings, *self.rows()])}"

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the name of each layer and what each format loses: a dash if all is 0 or bad."""
        rows = []
        for layer, shares in self.layers.items():
            cells = [_format_lost(shares[name]) for name in FORMATS]
            rows.append((layer, *cells))
        return rows

    @property
    def title(self) -> str:
        """What the numbers mean, as a heading."""
        return (
            "share of the nonzero gradients that becomes 0, inf or NaN if stored "
            f"at loss scale {power(self.loss_scale)}"
        )


def _format_lost(shares: Shares) -> str:
    has_numbers = any(shares)
    if not has_numbers:
        return "-"
    return percent(shares.lost)


def underflow(
    histograms: Any, *, loss_scale: float = 1.0, depth: int | None = None
) -> Underflow:
    """Returns what each small format would lose of each layer, on the host, at a loss scale.

    Args:
      histograms: what `leaf_histograms` returned.
      loss_scale: a power of two.
      depth: how many keys of a leaf's path make a layer. With 2, `params/Dense_0/kernel`
        and `params/Dense_0/bias` are one layer. With `None`, each leaf is a layer.

    Raises:
      ValueError: if `histograms` is empty, `loss_scale` is no power of two, or `depth` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> grads = {"dense": {"w": jnp.full(3, 1e-9), "b": jnp.ones(1)}, "out": jnp.array([1, 1e3])}
      >>> print(diagnostics.underflow(diagnostics.leaf_histograms(grads), depth=1))
      share of the nonzero gradients that becomes 0, inf or NaN if stored at loss scale 2**0
             float16  bfloat16  float8_e4m3fn  float8_e5m2
      dense    75.0%        0%          75.0%        75.0%
      out         0%        0%          50.0%           0%
    """
    exponent = power_of_two("underflow", "loss_scale", loss_scale)
    if depth is not None:
        depth = int32("underflow", "depth", depth, unit="keys of a path")
    nodes = jax.tree_util.tree_leaves_with_path(
        histograms, is_leaf=lambda node: isinstance(node, Histogram)
    )
    layers: dict[str, np.ndarray] = {}
    for path, node in nodes:
        layer = leaf_name(path[:depth])
        counts = fetch_histogram("underflow", node).counts
        layers[layer] = layers.get(layer, 0) + counts
    if not layers:
        raise ValueError(
            "`underflow(histograms=...)` got a tree without any leaf. Pass what "
            "`jaxscale.diagnostics.leaf_histograms` returned."
        )
    shares = {
        layer: find_all_shares(counts, exponent) for layer, counts in layers.items()
    }
    return Underflow(layers=shares, loss_scale=2.0**exponent)
