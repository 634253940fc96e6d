"""Which outlier pattern a tensor shows: a few large rows, a few large columns, or neither."""

import dataclasses
import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from adahop_jax.blocking import check_float, widen


class Pattern(enum.StrEnum):
    """Outliers of a matrix [R, C]: whole rows, whole columns, or neither."""

    ROW = "row"
    COL = "col"
    NONE = "none"

    @property
    def opposite(self) -> "Pattern":
        """The pattern of the transposed matrix."""
        swap = {Pattern.ROW: Pattern.COL, Pattern.COL: Pattern.ROW}
        return swap.get(self, self)


METHODS: tuple[str, ...] = ("published", "robust")
"""Names of the classifiers; `pattern_votes` defines both."""

VOTE_ORDER = (Pattern.ROW, Pattern.COL, Pattern.NONE)

_PUBLISHED_RATIO = 2.0
# float32 sums are good to about 1e-6. A spread below this part of the mean is taken for rounding:
# the ratio of two such spreads would be arbitrary.
_RESOLUTION = 1e-5

_ROBUST_OCTAVES = 1.0
_ROBUST_ERRORS = 2.0
# Below the root of float32's smallest normal number, hence below the root of every nonzero entry.
_TINY = 1e-19


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorProfile:
    """Statistics of matrices [..., R, C]: each one float32 scalar a matrix.

    Scaling a matrix leaves them unchanged, transposing it swaps row and col. A NaN or Inf among its
    entries makes all of them NaN.

    Attributes:
      cv_row: published; the coefficient of variation of the R row variances, over the value
        sqrt(2/(C-1)) that independent Gaussian entries would give.
      cv_col: the same of the C column variances.
      excess_row: ours; by how many octaves (log2) the magnitude of the largest row surely exceeds
        that of the typical row. A row's magnitude is the squared mean of sqrt|x|; "surely": that
        mean less two standard errors; typical: the median of the means.
      excess_col: the same of columns.
    """

    cv_row: Float[Array, "..."]
    cv_col: Float[Array, "..."]
    excess_row: Float[Array, "..."]
    excess_col: Float[Array, "..."]


def profile_tensor(x: Float[Array, "... R C"]) -> TensorProfile:
    """The statistics that the classifiers decide by.

    They come from float32 sums over rows and columns of the whole array, so under `jit` it may be
    sharded in any way; statistics that are not used are not computed. No gradients flow through.

    Args:
      x: float32, bfloat16 or float16; leading axes are batch axes.

    Returns:
      Statistics of shape [...]. All are 0 where R or C is less than 2, as one row has no others to
      stand out from, and one entry no variance.

    Raises:
      TypeError: if x holds no floats of at most 32 bits.
      ValueError: if x has fewer than two axes.
    """
    x = check_float(x)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}, but must have two axes or more, [..., R, C].")
    # Widened before anything else: what rounds to bfloat16 on the way may or may not be rounded.
    x = widen(jax.lax.stop_gradient(x))
    roots = jnp.sqrt(jnp.abs(x))
    # A sum of roots cannot overflow, so it is finite exactly where every entry is.
    finite = jnp.isfinite(jnp.sum(jnp.sum(roots, axis=-1), axis=-1))
    if min(x.shape[-2:]) < 2:
        statistics = (jnp.zeros(x.shape[:-2], jnp.float32),) * 4
    else:
        statistics = (*_variance_spreads(x), _excess(roots, -1), _excess(roots, -2))
    return TensorProfile(*(jnp.where(finite, value, jnp.nan) for value in statistics))


def _variance_spreads(x: Float[Array, "... R C"]) -> tuple[Array, Array]:
    """(cv_row, cv_col)."""
    # Variances square x and their spread squares again: a power of two brings |x| below 1, exactly.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    scaled = x * jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, -126, 126))
    spreads = []
    for axis in (-1, -2):
        variance = jnp.var(scaled, axis=axis, ddof=1)
        rounding = jnp.square(_RESOLUTION * jnp.mean(scaled, axis=axis))
        variance = jnp.where(variance > rounding, variance, 0.0)
        mean = jnp.mean(variance, axis=-1)
        std = jnp.std(variance, axis=-1, ddof=1)
        spread = jnp.where(std > _RESOLUTION * mean, std / mean, 0.0)
        spreads.append(spread / math.sqrt(2 / (x.shape[axis] - 1)))
    return spreads[0], spreads[1]


def _excess(roots: Float[Array, "... R C"], axis: int) -> Float[Array, "..."]:
    """Excess in octaves of the rows (axis -1) or columns (axis -2) of |x|, whose roots are given.

    Roots tame heavy tails. A row's standard error comes from its own entries, so a single one,
    however large, raises the mean by about one such error. The typical error is the least that
    counts, as a row of few entries may by chance show hardly any spread.
    """
    count = roots.shape[axis]
    mean = jnp.sum(roots, axis=axis) / count
    # Mean squares are the means of |x|; divided before they are summed, they cannot overflow.
    square = jnp.sum(jnp.square(roots * math.sqrt(1 / count)), axis=axis)
    variance = jnp.maximum(square - jnp.square(mean), 0.0) / (count - 1)
    error = jnp.sqrt(jnp.maximum(variance, _median(variance)[..., None]))
    largest = jnp.max(mean - _ROBUST_ERRORS * error, axis=-1)
    typical = _median(mean)
    octaves = [jnp.log2(jnp.maximum(value, _TINY)) for value in (largest, typical)]
    return 2.0 * (octaves[0] - octaves[1])


def _median(values: Float[Array, "... N"]) -> Float[Array, "..."]:
    # An axis that a mesh shards explicitly cannot be sorted; these few values may be gathered.
    sharding = jax.typeof(values).sharding
    if sharding.spec[-1] is not None:
        values = jax.reshard(values, sharding.update(spec=(*sharding.spec[:-1], None)))
    return jnp.median(values, axis=-1)


def pattern_votes(
    x: Float[Array, "... R C"] | TensorProfile, method: str = "published"
) -> Float[Array, "... 3"]:
    """One vote per matrix, as additive one-hot floats in the order (row, col, none).

    Methods:
      published: row if cv_row > 2 cv_col, col if cv_col > 2 cv_row, else none (AdaHOP, arXiv
        2604.02525). Strong rows beside strong columns count as none.
      robust: row if a row is surely twice as large as the typical row (excess_row > 1) and stands
        out more than any column does (excess_row > excess_col); col likewise, else none.

    Args:
      x: matrices, or their profile.
      method: one of METHODS.

    Returns:
      float32 [..., 3]; all three are NaN for a matrix with NaN or Inf, so that sums of votes tell.

    Raises:
      TypeError, ValueError: as `profile_tensor`; ValueError for an unknown method.
    """
    _check_method(method)
    profile = x if isinstance(x, TensorProfile) else profile_tensor(x)
    if method == "published":
        row, col = profile.cv_row, profile.cv_col
        is_row, is_col = row > _PUBLISHED_RATIO * col, col > _PUBLISHED_RATIO * row
    else:
        row, col = profile.excess_row, profile.excess_col
        is_row = (row > _ROBUST_OCTAVES) & (row > col)
        is_col = (col > _ROBUST_OCTAVES) & (col > row)
    votes = jnp.stack([is_row, is_col, ~(is_row | is_col)], axis=-1).astype(jnp.float32)
    return jnp.where(jnp.isnan(row + col)[..., None], jnp.nan, votes)


def classify(x: Any, method: str = "published") -> Pattern | list[Pattern]:
    """The pattern of a matrix, or of many matrices in one compiled call.

    Args:
      x: a matrix [R, C]; a list or tuple of matrices, whose shapes may differ; or the profile of a
        matrix or of a stack of matrices [N, R, C].
      method: one of METHODS; see `pattern_votes`.

    Returns:
      A Pattern; a list of them for a list, a tuple or the profile of a stack.

    Raises:
      TypeError: if x holds something other than concrete arrays of floats.
      ValueError: for an unknown method, an array that is no matrix, or one with NaN or Inf.
    """
    _check_method(method)
    if isinstance(x, TensorProfile):
        votes = np.asarray(pattern_votes(x, method))
        if votes.ndim > 2:
            raise ValueError(f"x has batch shape {votes.shape[:-1]}, but may have one batch axis.")
        many = votes.ndim == 2
        votes = np.atleast_2d(votes)
    else:
        many = isinstance(x, (list, tuple))
        tensors = {f"x[{i}]": t for i, t in enumerate(x)} if many else {"x": x}
        matrices = tuple(_check_matrix(t, name) for name, t in tensors.items())
        votes = np.asarray(_votes_of_each(matrices, method))
    patterns = []
    for i, vote in enumerate(votes):
        if np.isnan(vote).any():
            name = f"x[{i}]" if many else "x"
            raise ValueError(f"{name} has NaN or Inf entries, but must be finite to be classified.")
        patterns.append(VOTE_ORDER[int(np.argmax(vote))])
    return patterns if many else patterns[0]


@functools.partial(jax.jit, static_argnames="method")
def _votes_of_each(matrices: tuple[Array, ...], method: str) -> Float[Array, "N 3"]:
    # Matrices of one type are stacked: unrolled, hundreds of tensors would take long to compile.
    groups: dict[Any, list[int]] = {}
    for i, matrix in enumerate(matrices):
        groups.setdefault(jax.typeof(matrix), []).append(i)
    votes = jnp.zeros((len(matrices), 3), jnp.float32)
    for members in groups.values():
        stack = jnp.stack([matrices[i] for i in members])
        votes = votes.at[np.array(members)].set(pattern_votes(stack, method))
    return votes


def _check_matrix(x: Any, name: str) -> Array:
    if isinstance(x, Tracer):
        raise TypeError(f"{name} is traced, but must be concrete; under jit use pattern_votes.")
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} is of type {type(x).__name__}, but must be an array of floats.")
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {x.shape}, but must be a matrix [R, C].")
    return check_float(x, name)


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}.")
