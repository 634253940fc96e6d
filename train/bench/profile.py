"""Where a step's time goes: kernels from a profiler trace, sorted by what they compute."""

import collections
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

PARTS: tuple[str, ...] = (
    "quantizers",
    "products",
    "attention",
    "head and loss",
    "optimizer",
    "rest",
)
"""What a kernel may belong to, see `classify`."""

_ATTENTION_KERNEL = re.compile(r"sdpa|fmha|flash|mha_graph", re.IGNORECASE)
_QUANTIZER_KERNEL = re.compile(r"quantize|encode|decode|hadamard", re.IGNORECASE)
_PRODUCT_KERNEL = re.compile(
    r"gemm|gemv|cutlass|nvjet|cublas|xmma|wgmma|matmul|split_?k|_dot|dot_", re.IGNORECASE
)
_TRANSFER = re.compile(r"memcpy|memset", re.IGNORECASE)

# What JAX calls the operations of `train.step.make_train_step` over `train.llama.Llama`.
_LAYER = re.compile(r"/(attention/[qkvo]|mlp/(gate|up|down))(/|$)")
_HEAD = re.compile(r"/(embedding\.attend|head)(/|$)")

_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"', re.MULTILINE
)


class Event(NamedTuple):
    """One kernel: its name, how long it ran, and the path of the operation that it came from.

    The path is JAX's, such as 'jit(step)/jvp(Llama)/block_0/mlp/up/dot_general', or '' where the
    trace has none.
    """

    name: str
    seconds: float
    path: str


def classify(name: str, path: str) -> str:
    """The part of a training step that a kernel belongs to, one of `PARTS`.

    'products' are those of the blocks' linear layers, extraction's among them; 'quantizers' is all
    else in these layers: quantization, casts, and picking outliers. 'attention' has the rotary
    positions, 'head and loss' their own products. A kernel without a path is judged by its name.
    """
    if _ATTENTION_KERNEL.search(name):
        return "attention"
    if not path:
        if _QUANTIZER_KERNEL.search(name):
            return "quantizers"
        return "products" if _PRODUCT_KERNEL.search(name) else "rest"
    if _LAYER.search(path):
        if _PRODUCT_KERNEL.search(name) and not _QUANTIZER_KERNEL.search(name):
            return "products"
        return "rest" if _TRANSFER.search(name) else "quantizers"
    if "/attention/" in path:
        return "attention"
    if "jvp(" not in path:
        # All of the loss and its gradient is traced under jvp; what is not comes after it.
        return "optimizer"
    # The loss is no module: its operations lie outside of jvp(Llama).
    return "head and loss" if _HEAD.search(path) or "jvp(Llama)" not in path else "rest"


def breakdown(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each of `PARTS`."""
    total = dict.fromkeys(PARTS, 0.0)
    for event in events:
        total[classify(event.name, event.path)] += event.seconds
    return total


def longest(events: Iterable[Event], count: int) -> list[dict[str, Any]]:
    """The kernels that take most, each with its part, number of launches and one of its paths."""
    grouped: dict[tuple[str, str], list[Event]] = collections.defaultdict(list)
    for event in events:
        grouped[event.name, classify(event.name, event.path)].append(event)
    rows = [
        {
            "kernel": kernel,
            "part": part,
            "seconds": sum(event.seconds for event in launches),
            "launches": len(launches),
            "path": launches[0].path,
        }
        for (kernel, part), launches in grouped.items()
    ]
    return sorted(rows, key=lambda row: row["seconds"], reverse=True)[:count]


def op_paths(hlo: str) -> dict[str, str]:
    """Path of each instruction of a compiled module's text, by the instruction's name."""
    # An instruction that was merged from several lists their paths with semicolons.
    return {name: path.split(";")[0] for name, path in _INSTRUCTION.findall(hlo)}


def device_events(data: Any, paths: Mapping[str, str]) -> list[Event]:
    """Kernels of the GPUs in a trace (`ProfileData`); none for a trace of a CPU.

    Args:
      data: the trace.
      paths: of the traced program's instructions, see `op_paths`.
    """
    # Kernels of XLA's own bear the name of their instruction, but for its punctuation.
    by_kernel = {re.sub(r"[^\w]", "_", name): path for name, path in paths.items()}
    return [
        Event(name, seconds, _path(name, stats, paths, by_kernel))
        for name, seconds, stats in _kernels(data)
    ]


def record(run: Callable[[], object]) -> Any:
    """Runs something under JAX's profiler, up to its last result; returns a `ProfileData`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        return ProfileData.from_file(file)


def _kernels(data: Any) -> Iterator[tuple[str, float, dict[str, object]]]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            # Other lines sum up what the streams' lines hold.
            if line.name.startswith("Stream"):
                for event in line.events:
                    yield event.name, event.duration_ns * 1e-9, dict(event.stats)


def _path(
    name: str, stats: Mapping[str, object], paths: Mapping[str, str], by_kernel: Mapping[str, str]
) -> str:
    instruction = str(stats.get("hlo_op", ""))
    return paths.get(instruction) or str(stats.get("name", "")) or by_kernel.get(name, "")
