"""Calibration: the outlier patterns of a model's tensors, voted on inside the training step.

Each layer adds a *probe*, an array of zeros, whose cotangent carries the votes on x, W and g out of
the backward pass. A cotangent is additive, so micro-batches, scanned layers, shared layers, `vmap`
and sharded devices all add up by construction, and the functions stay pure. The votes do not depend
on the scale of the loss.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from adahop_jax.patterns import VOTE_ORDER, Pattern, pattern_votes
from adahop_jax.recipe import Recipe
from adahop_jax.strategy import MatmulStrategies, StrategyTable

PROBES = "adahop_probes"
"""Linen collection of the probes, nested like 'params'."""

PROBE_NAME = "votes"
TENSORS = ("x", "w", "g")
_SWAP_ROW_COL = np.array([1, 0, 2])


def new_probe() -> Float[Array, "3 3"]:
    """A probe of zeros; its cotangent counts votes, a row each for x, W and g: (row, col, none)."""
    return jnp.zeros((len(TENSORS), len(VOTE_ORDER)), jnp.float32)


def observe(
    y: Float[Array, "... N"],
    x: Float[Array, "... K"],
    w: Float[Array, "K N"],
    probe: Float[Array, "3 3"],
    method: str = "published",
) -> Float[Array, "... N"]:
    """Returns y; the probe's cotangent becomes the votes of this layer.

    Args:
      y: the layer's product x w, before a bias.
      x: its input; all leading axes are tokens.
      w: its kernel [in, out]. The vote is on W [out, in], the layout of the strategy table.
      probe: from `new_probe`.
      method: of `adahop_jax.classify`.
    """
    x, w = jax.lax.stop_gradient((x, w))
    return _observe(method, y, x, w, probe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(method: str, y: Array, x: Array, w: Array, probe: Array) -> Array:
    return y


def _observe_forward(
    method: str, y: Array, x: Array, w: Array, probe: Array
) -> tuple[Array, tuple[Array, Array]]:
    # Voting on x here keeps x itself out of the residuals.
    votes_w = pattern_votes(w, method)[_SWAP_ROW_COL]
    return y, (pattern_votes(_matrix(x), method), votes_w)


def _observe_backward(
    method: str, votes: tuple[Array, Array], g: Array
) -> tuple[Array, None, None, Array]:
    return g, None, None, jnp.stack([*votes, pattern_votes(_matrix(g), method)])


_observe.defvjp(_observe_forward, _observe_backward)


def _matrix(x: Array) -> Array:
    return x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])


def probe_paths(probes: Any) -> list[str]:
    """Paths of the layers of a probes (or votes) tree, such as 'block_0/mlp/up'."""
    return list(votes_by_layer(probes))


def votes_by_layer(tree: Any) -> dict[str, Any]:
    """{'block_0/up': votes} from the nested {'block_0': {'up': {'votes': votes}}}.

    Raises:
      ValueError: for a tree that adahop_jax layers did not make.
    """
    found: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if not isinstance(node, Mapping):
            name = "/".join(path)
            raise ValueError(f"probes has a leaf at {name!r} that no adahop_jax layer made.")
        for name, child in node.items():
            if name == PROBE_NAME and not isinstance(child, Mapping):
                found["/".join(path)] = child
            else:
                walk(child, (*path, name))

    walk(tree, ())
    return found


def patterns_from_votes(votes: Any) -> dict[str, dict[str, Pattern]]:
    """The pattern with most votes, for 'x', 'w' and 'g' of every layer.

    Args:
      votes: a tree like the probes, summed (or averaged) over steps and micro-batches. The entries
        of a scanned layer, stacked, count together.

    Returns:
      {path: {'x': pattern, 'w': pattern, 'g': pattern}}; a tie counts as none.

    Raises:
      ValueError: if there are no votes, or votes on a tensor that held a NaN or an infinity.
    """
    patterns = {}
    if not votes:
        raise ValueError(
            "votes is empty: the model has no adahop_jax layers, or init made no probes."
        )
    for path, array in votes_by_layer(votes).items():
        counts = np.asarray(array, np.float64).reshape(-1, 3, 3).sum(axis=0)
        for tensor, row in zip(TENSORS, counts, strict=True):
            if np.isnan(row).any():
                raise ValueError(
                    f"calibration met a NaN or an infinity in {tensor} of layer {path!r}; a table "
                    "from such votes would be meaningless."
                )
            if not row.any():
                raise ValueError(
                    f"layer {path!r} has no votes: run at least one calibration step that uses it."
                )
        patterns[path] = {
            tensor: _majority(row) for tensor, row in zip(TENSORS, counts, strict=True)
        }
    return patterns


def table_from_votes(votes: Any, recipe: Recipe) -> StrategyTable:
    """The strategy table that a recipe's level gives for votes, see `patterns_from_votes`."""
    if recipe.level is None:
        return recipe.initial_table()
    return StrategyTable(
        {
            path: MatmulStrategies.from_patterns(**of_layer, level=recipe.level, k=recipe.k)
            for path, of_layer in patterns_from_votes(votes).items()
        }
    )


def calibrate(
    loss_fn: Callable[..., Any],
    params: Any,
    probes: Any,
    batches: Iterable[Any],
    recipe: Recipe,
    *,
    has_aux: bool = False,
) -> tuple[StrategyTable, Any]:
    """Makes a strategy table from a fixed model: one jitted gradient a batch, no parameter moves.

    In a training loop of your own take the votes from the step's gradient instead, add them up, and
    call `table_from_votes`.

    Args:
      loss_fn: loss_fn(params, probes, batch) -> loss (or (loss, aux)).
      params: the model's parameters.
      probes: the 'adahop_probes' collection that `model.init` made.
      batches: the first `recipe.calibration_steps` are used.
      recipe: level, k and classifier.
      has_aux: whether loss_fn returns (loss, aux).

    Returns:
      The table, and the summed votes.

    Raises:
      ValueError: if there are no batches, or a tensor held a NaN.
    """
    gradient = jax.jit(jax.grad(loss_fn, argnums=1, has_aux=has_aux))
    votes = jax.tree.map(jnp.zeros_like, probes)
    steps = 0
    for _, batch in zip(range(recipe.calibration_steps), batches, strict=False):
        out = gradient(params, probes, batch)
        votes = jax.tree.map(jnp.add, votes, out[0] if has_aux else out)
        steps += 1
    if not steps:
        raise ValueError("batches is empty: calibration needs at least one.")
    return table_from_votes(votes, recipe), votes


def _majority(counts: np.ndarray) -> Pattern:
    winners = np.flatnonzero(counts == counts.max())
    return VOTE_ORDER[winners[0]] if len(winners) == 1 else Pattern.NONE
