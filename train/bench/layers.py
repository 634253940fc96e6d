"""A whole linear layer, forward and backward, under each strategy, against XLA's BF16."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

import adahop_jax as adahop
from adahop_jax import Level, MatmulStrategies, Pattern, Recipe, Strategy
from adahop_jax.backends import Backend
from train.bench.ceilings import Ceilings
from train.bench.inputs import normal
from train.bench.report import MILLISECONDS, PERCENT, TIMES, Column, Group
from train.bench.timing import Plan, Timing, Work, attempt, measure

USUAL = "lv2"
"""Name of `usual_strategies`."""

DEFAULT_STRATEGIES = (
    Strategy.IHT,
    Strategy.IHT_OE_LEFT,
    Strategy.IHT_OE_RIGHT,
    Strategy.IHT_OE_INNER,
    USUAL,
)


def usual_strategies(k: int) -> MatmulStrategies:
    """What level 2 gives a layer whose activations have outlier channels, and nothing else."""
    return MatmulStrategies.from_patterns(Pattern.COL, Pattern.NONE, Pattern.NONE, Level.LV2, k)


def parse_strategies(text: str, k: int) -> tuple[str, MatmulStrategies]:
    """Reads 'iht' (all three products), 'iht/iht/iht_oe_right' (y, gx, gw) or 'lv2'.

    Returns:
      The name of its rows, and the strategies.

    Raises:
      ValueError: for an unknown strategy, or another number of them.
    """
    if text == USUAL:
        found = usual_strategies(k)
        return f"{USUAL} ({'/'.join(s for _, s, _ in found.items())})", found
    names: list[Any] = text.split("/")
    if len(names) not in (1, 3):
        raise ValueError(
            f"strategies has {text!r}, but must be {USUAL}, one strategy, or three (y/gx/gw)."
        )
    return text, MatmulStrategies(*(names if len(names) == 3 else names * 3), k=k)


def measure_layers(
    backends: Sequence[Backend],
    strategies: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    tokens: int,
    k: int,
    ceilings: Ceilings,
    plan: Plan,
    report: Callable[[str], None],
) -> Group:
    """Times y, gx and gw of layers [in, out], all three kept, in one program."""
    group = Group(
        "layers",
        f"Linear layer, y + gx + gw, {tokens} tokens, bfloat16 x, w and g, k={k}",
        (
            Column("shape", "in x out"),
            Column("backend", "backend"),
            Column("strategies", "strategies"),
            Column("bf16", "BF16 ms", MILLISECONDS),
            Column("seconds", "ours ms", MILLISECONDS),
            Column("ratio", "BF16 / ours", TIMES),
            Column("floor", "floor ms", MILLISECONDS),
            Column("gap", "ours / floor", TIMES),
            Column("spread", "spread", PERCENT),
            Column("difference", "from BF16", lambda d: f"{d:.3f}"),
        ),
        notes=(
            "Floor: three products at the FP8 rate above, and one pass that reads x, w and g and "
            "writes both 4-bit forms of each at the rate of the copy.",
            "From BF16: the largest relative difference (Frobenius) of y, gx and gw from BF16's; "
            "normal values in 4 bits differ by about 0.15.",
            "lv2 (y/gx/gw): what level 2 gives a layer with outlier channels in x and no others.",
        ),
    )
    named = [parse_strategies(text, k) for text in strategies]
    for shape in shapes:
        report(f"layers: {shape[0]}x{shape[1]}")
        rows = attempt(lambda s=shape: _rows(backends, named, s, tokens, ceilings, plan))
        if isinstance(rows, str):
            rows = [{"shape": f"{shape[0]}x{shape[1]}", "failed": rows}]
        group.rows += rows
    return group


def layer_floor(shape: tuple[int, int], tokens: int, ceilings: Ceilings) -> float | None:
    """Seconds that no implementation with FP8 products goes below on this device."""
    if ceilings.fp8 is None or ceilings.copy is None:
        return None
    flops = 3 * 2 * tokens * shape[0] * shape[1]
    values = tokens * shape[0] + shape[0] * shape[1] + tokens * shape[1]
    return flops / ceilings.fp8 + values * (2 + 2 * 17 / 32) / ceilings.copy


def _rows(
    backends: Sequence[Backend],
    named: Sequence[tuple[str, MatmulStrategies]],
    shape: tuple[int, int],
    tokens: int,
    ceilings: Ceilings,
    plan: Plan,
) -> list[dict[str, Any]]:
    """A row for each backend and strategy, all measured in turns."""
    keys = [jax.random.split(key, 3) for key in jax.random.split(jax.random.key(4), 2)]
    inputs = [
        (
            normal(x, (tokens, shape[0])),
            normal(w, shape),
            normal(g, (tokens, shape[1])),
        )
        for x, w, g in keys
    ]
    pairs = [(backend, *entry) for backend in backends for entry in named]
    works = [Work(_layer(_bf16), inputs)]
    works += [Work(_layer(_ours(backend, entry)), inputs) for backend, _, entry in pairs]
    bf16, *timings = measure(works, plan)
    floor = layer_floor(shape, tokens, ceilings)
    rows = []
    for (backend, name, _), work, timing in zip(pairs, works[1:], timings, strict=True):
        row: dict[str, Any] = {"shape": f"{shape[0]}x{shape[1]}", "backend": backend.name}
        row |= {"strategies": name, "floor": floor}
        if isinstance(bf16, Timing):
            row |= {"bf16": bf16.seconds, "bf16_spread": bf16.spread}
        if isinstance(timing, Timing):
            row |= {"seconds": timing.seconds, "spread": timing.spread}
            row["gap"] = timing.seconds / floor if floor else None
        if isinstance(timing, Timing) and isinstance(bf16, Timing):
            row["ratio"] = bf16.seconds / timing.seconds
            row["difference"] = attempt(lambda work=work: _difference(works[0], work))
        failures = [v for v in (bf16, timing, row.get("difference")) if isinstance(v, str)]
        if failures:
            row["failed"] = "; ".join(failures)
            row["difference"] = None
        rows.append(row)
    return rows


def _layer(product: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array, Array]]:
    """The jitted (x, w, g) -> (y, gx, gw) of a product."""

    @jax.jit
    def run(x: Array, w: Array, g: Array) -> tuple[Array, Array, Array]:
        y, pull_back = jax.vjp(product, x, w)
        return y, *pull_back(g)

    return run


def _bf16(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def _ours(backend: Backend, strategies: MatmulStrategies) -> Callable[[Array, Array], Array]:
    recipe = Recipe(backend=backend.name)
    return functools.partial(adahop.dot, strategies=strategies, recipe=recipe)


def _difference(reference: Work, work: Work) -> float:
    """The largest relative difference of an output."""
    outputs = zip(work.function(*work.inputs[0]), reference.function(*work.inputs[0]), strict=True)
    return max(float(_relative(ours, theirs)) for ours, theirs in outputs)


@jax.jit
def _relative(a: Array, b: Array) -> Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
