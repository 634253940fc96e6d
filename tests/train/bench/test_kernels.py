"""`adahop bench kernels`: options, tables, the file, and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from train.bench import kernels, layers
from train.bench.kernels import layer_shapes
from train.cli import main
from train.llama import LlamaConfig

pytestmark = pytest.mark.usefixtures("hardly_compiled")
SMALL = ["--tokens=32", "--width=32", "--shapes", "32x64", "--samples=1", "--strategies", "iht"]


@pytest.fixture(autouse=True)
def tiny_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = kernels._Defaults(32, 32, ((32, 32),), (2**12,), 32)
    monkeypatch.setattr(kernels, "_CPU", defaults)


def test_all_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main(["bench", "kernels", *SMALL, f"--json={path}"]) == 0
    out = capsys.readouterr().out
    titles = ["Ceilings", "Quantizers on bfloat16 [32, 32]", "Products", "Linear layer"]
    assert sorted(titles, key=out.index) == titles
    data = json.loads(path.read_text())
    assert [group["name"] for group in data["groups"]] == [
        "ceilings",
        "quantizers",
        "products",
        "layers",
    ]
    assert data["groups"][3]["rows"][0]["shape"] == "32x64"


def test_chosen_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *SMALL, "--groups", "layers", "--backends", "xla"]) == 0
    out = capsys.readouterr().out
    assert "Ceilings" in out and "Linear layer" in out
    assert "Quantizers on" not in out and "Products of" not in out


def test_a_failed_row_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: Any, **rest: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(layers.adahop, "dot", broken)
    path = tmp_path / "figures.json"
    arguments = ["bench", "kernels", *SMALL, "--groups", "layers", f"--json={path}"]
    assert main(arguments) == 1
    assert "MemoryError: no room" in capsys.readouterr().out
    assert json.loads(path.read_text())["groups"][1]["rows"][0]["failed"] == "MemoryError: no room"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "32by64"], "shapes has '32by64', but must be like 4096x14336"),
        (["--shapes", "0x64"], "shapes has '0x64'"),
        (["--shapes", "32x64", "--model", "tiny"], "give one of them"),
        (["--model", "tinny"], "close: tiny"),
        (["--tokens", "0"], "tokens is 0, but must be at least 1"),
        (["--samples", "0"], "samples is 0, but must be at least 1"),
        (["--k=-1"], "k is -1, but must be at least 0"),
        (["--strategies", "iht/iht"], "one strategy, or three"),
        (["--backends", "cuda"], "backend is 'cuda'"),
        (["--json", "/nowhere/at/all.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "kernels", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_layer_shapes_of_a_model() -> None:
    assert layer_shapes(LlamaConfig.preset("llama-3.2-1b")) == (
        (2048, 2048),
        (2048, 512),
        (2048, 8192),
        (8192, 2048),
    )
