"""`adahop bench kernels`: quantizers, products and whole layers on the device at hand."""

import dataclasses
import pathlib
import re
from typing import Literal

import jax

from adahop_jax.backends import Backend
from train.bench.ceilings import measure_ceilings
from train.bench.layers import DEFAULT_STRATEGIES, measure_layers, parse_strategies
from train.bench.products import measure_products
from train.bench.quantizers import measure_quantizers
from train.bench.report import Group, check_json, describe, find_backend, progress, show, write_json
from train.bench.timing import Plan
from train.display import Display
from train.llama import LlamaConfig

GroupName = Literal["ceilings", "quantizers", "products", "layers"]

_SHAPES = (
    (2048, 2048),
    (2048, 8192),
    (8192, 2048),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
)


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """Sizes where none are given."""

    tokens: int
    width: int
    shapes: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]
    product: int


_ACCELERATOR = _Defaults(16_384, 8192, _SHAPES, (2**30, 2**27), 8192)
_QUICK = _Defaults(16_384, 8192, ((4096, 4096),), (2**30,), 8192)
_CPU = _Defaults(256, 256, ((128, 128), (128, 256)), (2**24,), 256)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Measures quantizers, products and linear layers against what the device can do.

    Both sides of every ratio, and the rates they are held against, come from the same run.

    Attributes:
      groups: what to measure, besides the ceilings.
      backends: by name; by default the fastest one here, and xla too for quantizers.
      strategies: of the layers: iht, iht_oe_left, ..., three of them as y/gx/gw, or lv2.
      tokens: of products and layers; 16,384 by default, 256 on a CPU.
      width: of the matrix that is quantized.
      shapes: of layers, as INxOUT.
      model: take the layer shapes of this model instead.
      k: rows, columns or channels extracted.
      samples: of each time; the median counts.
      quick: one shape and short samples.
      json: file for all figures.
    """

    groups: tuple[GroupName, ...] = ("ceilings", "quantizers", "products", "layers")
    backends: tuple[str, ...] = ()
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    tokens: int | None = None
    width: int | None = None
    shapes: tuple[str, ...] = ()
    model: str | None = None
    k: int = 64
    samples: int = 5
    quick: bool = False
    json: pathlib.Path | None = None

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        on_cpu = jax.default_backend() == "cpu"
        defaults = _CPU if on_cpu else _QUICK if self.quick else _ACCELERATOR
        tokens = defaults.tokens if self.tokens is None else self.tokens
        width = defaults.width if self.width is None else self.width
        shapes = self._shapes() or defaults.shapes
        self._check(tokens, width)
        plan = Plan(0.005 if self.quick or on_cpu else 0.02, self.samples)
        fast, quantizing = self._backends()
        describe(display)
        groups: list[Group] = []

        def finish(group: Group) -> None:
            groups.append(group)
            show(display, group)
            if self.json is not None:
                write_json(self.json, "kernels", dataclasses.asdict(self), groups)

        with progress(display) as report:
            report("ceilings")
            group, ceilings = measure_ceilings(defaults.copies, defaults.product, plan)
            finish(group)
            if "quantizers" in self.groups:
                finish(measure_quantizers(quantizing, tokens, width, ceilings, plan, report))
            if "products" in self.groups:
                finish(measure_products(fast, shapes, tokens, plan, report))
            if "layers" in self.groups:
                finish(
                    measure_layers(
                        fast, self.strategies, shapes, tokens, self.k, ceilings, plan, report
                    )
                )
        return 1 if any(group.failed for group in groups) else 0

    def _check(self, tokens: int, width: int) -> None:
        for name, value in (("tokens", tokens), ("width", width), ("samples", self.samples)):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        if self.k < 0:
            raise ValueError(f"k is {self.k}, but must be at least 0.")
        for text in self.strategies:
            parse_strategies(text, self.k)
        check_json(self.json)

    def _backends(self) -> tuple[list[Backend], list[Backend]]:
        """Those of products and layers, and those of quantizers."""
        if self.backends:
            named = [find_backend(name) for name in self.backends]
            return named, named
        fast, reference = find_backend("auto"), find_backend("xla")
        return [fast], [fast] if fast.name == reference.name else [fast, reference]

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        if self.model is not None and self.shapes:
            raise ValueError(
                f"model is {self.model!r} and shapes is {' '.join(self.shapes)}; give one of them."
            )
        if self.model is not None:
            return layer_shapes(LlamaConfig.preset(self.model))
        return tuple(_parse_shape(text) for text in self.shapes)


def layer_shapes(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    """(in, out) of the linear layers of a model, each once."""
    dim, ffn = config.dim, config.ffn_dim
    outputs = (config.heads * config.head_dim, config.kv_heads * config.head_dim, dim, ffn)
    return tuple(dict.fromkeys([*((dim, size) for size in outputs), (ffn, dim)]))


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"shapes has {text!r}, but must be like 4096x14336 (in x out).")
    return int(match[1]), int(match[2])
