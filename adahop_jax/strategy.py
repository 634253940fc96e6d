"""Strategies and the table that holds them: how each matmul of each layer is computed.

Everything here is static: hashable, compared by value, without arrays. As pytrees these objects
have no leaves, so they live in a train state, cross `jit` as part of the tree's structure, and cost
one retrace when they change.
"""

import dataclasses
import difflib
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from adahop_jax.patterns import Pattern

# What a profile adds to its table's JSON.
_EXTRAS = ("patterns", "votes")

DEFAULT_K = 64
"""Rows, columns or channels extracted by default."""


class Strategy(enum.StrEnum):
    """How one matmul A [M, K] x B [K, N] is computed.

    PLAIN quantizes both operands along K; IHT, the inner Hadamard transform, rotates them along K
    first. With outlier extraction (OE) the k largest rows of A (left) or columns of B (right) go
    through BF16 and overwrite their rows or columns of the product; OE_INNER takes k channels of K
    out of both operands and adds their BF16 product. BF16 quantizes nothing.
    """

    PLAIN = "plain"
    IHT = "iht"
    IHT_OE_LEFT = "iht_oe_left"
    IHT_OE_RIGHT = "iht_oe_right"
    IHT_OE_INNER = "iht_oe_inner"
    BF16 = "bf16"

    @property
    def extracts(self) -> bool:
        """Whether k rows, columns or channels take the BF16 path."""
        return self in (Strategy.IHT_OE_LEFT, Strategy.IHT_OE_RIGHT, Strategy.IHT_OE_INNER)

    @property
    def transforms(self) -> bool:
        """Whether operands are rotated before quantization."""
        return self not in (Strategy.PLAIN, Strategy.BF16)

    @property
    def mirrored(self) -> "Strategy":
        """The same strategy for the transposed product B^T A^T: left and right change places."""
        swap = {
            Strategy.IHT_OE_LEFT: Strategy.IHT_OE_RIGHT,
            Strategy.IHT_OE_RIGHT: Strategy.IHT_OE_LEFT,
        }
        return swap.get(self, self)


class Level(enum.IntEnum):
    """The two published tables. They differ where A's columns meet B's: BF16 in level 2."""

    LV1 = 1
    LV2 = 2


_BY_PATTERNS = {
    (Pattern.ROW, Pattern.ROW): Strategy.IHT,
    (Pattern.ROW, Pattern.NONE): Strategy.IHT_OE_LEFT,
    (Pattern.ROW, Pattern.COL): Strategy.IHT_OE_RIGHT,
    (Pattern.NONE, Pattern.ROW): Strategy.IHT,
    (Pattern.NONE, Pattern.NONE): Strategy.IHT,
    (Pattern.NONE, Pattern.COL): Strategy.IHT_OE_RIGHT,
    (Pattern.COL, Pattern.ROW): Strategy.IHT,
    (Pattern.COL, Pattern.NONE): Strategy.IHT,
    (Pattern.COL, Pattern.COL): Strategy.IHT_OE_RIGHT,
}


def strategy_for(a: Pattern, b: Pattern, level: Level | int = Level.LV2) -> Strategy:
    """The published strategy for a product A x B, from the patterns of A [M, K] and B [K, N]."""
    if Level(level) is Level.LV2 and (a, b) == (Pattern.COL, Pattern.COL):
        return Strategy.BF16
    return _BY_PATTERNS[Pattern(a), Pattern(b)]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MatmulStrategies:
    """Strategies of the three matmuls of a linear layer y = x W^T, with W [out, in].

    Attributes:
      y: forward, x [tokens, in] x W^T [in, out].
      gx: gradient of x, g [tokens, out] x W [out, in].
      gw: gradient of W, g^T [out, tokens] x x [tokens, in].
      k: rows, columns or channels that a strategy with extraction takes out; one number, or one
        each for (y, gx, gw). Stored as three, with 0 where nothing is extracted. Clipped to the
        size of the tensor at hand.
    """

    y: Strategy
    gx: Strategy
    gw: Strategy
    k: int | tuple[int, int, int] = DEFAULT_K

    def __post_init__(self) -> None:
        """Normalizes strings and k."""
        k = (self.k,) * 3 if isinstance(self.k, int) else tuple(self.k)
        if len(k) != 3 or not all(isinstance(n, int) and n >= 0 for n in k):
            raise ValueError(f"k is {self.k!r}, but must be one or three non-negative integers.")
        for name in ("y", "gx", "gw"):
            object.__setattr__(self, name, _as_strategy(name, getattr(self, name)))
        strategies = (self.y, self.gx, self.gw)
        kept = tuple(n if s.extracts else 0 for n, s in zip(k, strategies, strict=True))
        object.__setattr__(self, "k", kept)

    @classmethod
    def uniform(cls, strategy: Strategy | str, k: int = DEFAULT_K) -> "MatmulStrategies":
        """One strategy for all three matmuls."""
        return cls(*(_as_strategy("strategy", strategy),) * 3, k=k)

    @classmethod
    def from_patterns(
        cls, x: Pattern, w: Pattern, g: Pattern, level: Level | int = Level.LV2, k: int = DEFAULT_K
    ) -> "MatmulStrategies":
        """The published choice.

        Args:
          x: pattern of the activations [tokens, in].
          w: pattern of the weight in the layout [out, in], the transpose of a Flax kernel.
          g: pattern of the gradient of y, [tokens, out].
          level: 1 or 2.
          k: extracted rows or columns.
        """
        x, w, g = Pattern(x), Pattern(w), Pattern(g)
        return cls(
            y=strategy_for(x, w.opposite, level),
            gx=strategy_for(g, w, level),
            gw=strategy_for(g.opposite, x, level),
            k=k,
        )

    @property
    def all_bf16(self) -> bool:
        """Whether the layer computes as a plain layer does."""
        return self.y == self.gx == self.gw == Strategy.BF16

    def items(self) -> Iterator[tuple[str, Strategy, int]]:
        """(name, strategy, k) of y, gx and gw."""
        assert isinstance(self.k, tuple)
        yield from zip(("y", "gx", "gw"), (self.y, self.gx, self.gw), self.k, strict=True)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: {"y": "iht", "gx": {"strategy": "iht_oe_left", "k": 64}, ...}."""
        return {
            name: {"strategy": str(strategy), "k": k} if strategy.extracts else str(strategy)
            for name, strategy, k in self.items()
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "strategies") -> "MatmulStrategies":
        """Reads the form that `to_dict` writes; errors name `where`."""
        if not isinstance(data, dict) or set(data) != {"y", "gx", "gw"}:
            raise ValueError(f"{where} is {data!r}, but must be an object with y, gx and gw.")
        names, ks = {}, []
        for matmul in ("y", "gx", "gw"):
            entry = data[matmul] if isinstance(data[matmul], dict) else {"strategy": data[matmul]}
            _check_keys(entry, ("strategy", "k"), f"{where}.{matmul}")
            names[matmul] = _as_strategy(f"{where}.{matmul}", entry.get("strategy"))
            ks.append(entry.get("k", DEFAULT_K))
        return cls(**names, k=tuple(ks))


@jax.tree_util.register_static
class StrategyTable(Mapping[str, MatmulStrategies]):
    """An immutable, hashable map from layer path ('block_0/mlp/up') to strategies.

    As a pytree it has no leaves: two states with different tables have different structures.
    """

    def __init__(
        self,
        layers: Mapping[str, MatmulStrategies] | None = None,
        *,
        default: MatmulStrategies | None = None,
    ) -> None:
        """Makes a table.

        Args:
          layers: strategies by module path, joined with '/'.
          default: for layers that are not named; without it, binding a model that has other layers
            fails.

        Raises:
          TypeError: if a path is not a string or an entry is not a MatmulStrategies.
        """
        for path, entry in (layers or {}).items():
            if not isinstance(path, str) or not isinstance(entry, MatmulStrategies):
                raise TypeError(f"layers[{path!r}] is {entry!r}, but must be a MatmulStrategies.")
        if default is not None and not isinstance(default, MatmulStrategies):
            raise TypeError(f"default is {default!r}, but must be a MatmulStrategies or None.")
        self._layers = dict(sorted((layers or {}).items()))
        self._default = default
        self._hash = hash((tuple(self._layers.items()), default))

    @classmethod
    def uniform(cls, strategies: MatmulStrategies | Strategy | str) -> "StrategyTable":
        """The same strategies for every layer."""
        if not isinstance(strategies, MatmulStrategies):
            strategies = MatmulStrategies.uniform(strategies)
        return cls(default=strategies)

    @property
    def default(self) -> MatmulStrategies | None:
        """Strategies of the layers that are not named."""
        return self._default

    def __getitem__(self, path: str) -> MatmulStrategies:
        """Strategies of a layer: its own or the default; KeyError where there are neither."""
        entry = self._layers.get(path, self._default)
        if entry is None:
            raise KeyError(f"{path!r} is not in the table{_close_names(path, self._layers)}.")
        return entry

    def __iter__(self) -> Iterator[str]:
        """Named paths, sorted."""
        return iter(self._layers)

    def __len__(self) -> int:
        """Number of named layers."""
        return len(self._layers)

    def __bool__(self) -> bool:
        """True, also for a table of a default alone: it is not the absence of a table."""
        return True

    def __hash__(self) -> int:
        """Hash by value."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Equality by value."""
        if not isinstance(other, StrategyTable):
            return NotImplemented
        return (self._layers, self._default) == (other._layers, other._default)

    def __repr__(self) -> str:
        """Shows named layers and the default."""
        return f"StrategyTable({self._layers!r}, default={self._default!r})"

    def resolve(self, paths: Mapping[str, Any] | list[str]) -> dict[str, MatmulStrategies]:
        """Strategies of exactly these layers.

        Raises:
          ValueError: if the table names a layer that is not among them (a typo would otherwise
            leave that layer as it was), or lacks one of them.
        """
        known = list(paths)
        for path in self._layers:
            if path not in known:
                raise ValueError(
                    f"the table names {path!r}, which the model lacks{_close_names(path, known)}."
                )
        missing = [path for path in known if path not in self._layers]
        if missing and self._default is None:
            raise ValueError(
                f"the table lacks {missing[0]!r} and {len(missing) - 1} other layers of the model; "
                "add them, or give the table a default."
                if len(missing) > 1
                else f"the table lacks {missing[0]!r}; add it, or give the table a default."
            )
        return {path: self[path] for path in known}

    def to_json(self) -> str:
        """Readable JSON; `from_json` reads it back to an equal table."""
        data = {
            "format": "adahop-strategy-table",
            "version": 1,
            "default": self._default and self._default.to_dict(),
            "layers": {path: entry.to_dict() for path, entry in self._layers.items()},
        }
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "StrategyTable":
        """Reads a table.

        Raises:
          ValueError: if the text is not JSON, is another format or version, or names an unknown
            strategy.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the strategy table is not JSON: {error}.") from error
        if not isinstance(data, dict) or data.get("format") != "adahop-strategy-table":
            raise ValueError(
                'the text is no strategy table: it lacks "format": "adahop-strategy-table".'
            )
        if data.get("version") != 1:
            raise ValueError(
                f"the strategy table has version {data.get('version')!r}, but must be 1."
            )
        _check_keys(
            data, ("format", "version", "default", "layers", *_EXTRAS), "the strategy table"
        )
        layers, default = data.get("layers", {}), data.get("default")
        if not isinstance(layers, dict):
            raise ValueError(f"layers is {layers!r}, but must be an object.")
        return cls(
            {path: MatmulStrategies.from_dict(entry, path) for path, entry in layers.items()},
            default=None if default is None else MatmulStrategies.from_dict(default, "default"),
        )


def _as_strategy(name: str, value: Any) -> Strategy:
    try:
        return Strategy(value)
    except ValueError:
        known = ", ".join(Strategy)
        raise ValueError(f"{name} is {value!r}, but must be one of {known}.") from None


def _check_keys(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """A misspelt key would otherwise be a setting that is silently not made."""
    for key in data:
        if key not in known:
            raise ValueError(f"{where} has the unknown key {key!r}{_close_names(key, known)}.")


def _close_names(path: str, known: Any) -> str:
    close = difflib.get_close_matches(path, list(known), n=3)
    return f" (close: {', '.join(close)})" if close else ""
