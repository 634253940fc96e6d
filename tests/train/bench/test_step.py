"""`adahop bench step`: rows, ratios, tables, and recipes that fail."""

import json
from pathlib import Path
from typing import Any

import pytest

import adahop_jax as adahop
from train.bench import recipe_step
from train.bench.profile import PARTS, Event
from train.bench.recipe_step import step_table
from train.bench.step import relate
from train.cli import main
from train.options import TrainOptions

pytestmark = pytest.mark.usefixtures("hardly_compiled")
SMALL = ["bench", "step", "--seq-len=16", "--batch-size=1", "--steps=2"]


def rows(path: Path) -> dict[str, dict[str, Any]]:
    (group, *_) = json.loads(path.read_text())["groups"]
    return {row["recipe"]: row for row in group["rows"]}


def test_recipes_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main([*SMALL, "--recipes", "bf16", "adahop-lv2", f"--json={path}"]) == 0
    out = capsys.readouterr().out
    assert "Training step of tiny, 1 x 16 tokens" in out
    for name in ("bf16", "adahop-lv2"):
        assert f"No breakdown of {name}'s time: a trace of cpu holds no kernels." in out
    found = rows(path)
    assert list(found) == ["bf16", "adahop-lv2"]
    for row in found.values():
        assert row["tokens_per_second"] == pytest.approx(16 / row["seconds"])
        assert row["ratio"] == found["bf16"]["seconds"] / row["seconds"]
        assert 4 < row["loss"] < 7  # about ln 256
        assert row["program_bytes"] == (
            row["argument_bytes"] + row["output_bytes"] + row["temp_bytes"] - row["alias_bytes"]
        )
        assert row["alias_bytes"] > 0  # the state is donated
    # Inputs of 'tiny' in these tests: six of 32 channels and one of 64; k is 1.
    assert found["bf16"]["saved_bytes"] == 2 * 16 * 256
    assert found["adahop-lv2"]["saved_bytes"] == 32 * 256 * 17 // 32 + 7 * (2 * 16 + 4)
    ratio = found["bf16"]["saved_bytes"] / found["adahop-lv2"]["saved_bytes"]
    assert found["adahop-lv2"]["saved_ratio"] == pytest.approx(ratio)


def test_remat_saves_no_inputs(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main([*SMALL, "--recipes", "bf16", "--remat", f"--json={path}"]) == 0
    assert rows(path)["bf16"]["saved_bytes"] is None


def test_a_recipe_that_fails_leaves_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.json"
    table.write_text(
        adahop.StrategyTable({"block_7/mlp/up": adahop.MatmulStrategies.uniform("iht")}).to_json()
    )
    path = tmp_path / "figures.json"
    assert main([*SMALL, f"--table={table}", f"--json={path}"]) == 1
    found = rows(path)
    assert "the table names 'block_7/mlp/up'" in found["adahop-lv2"]["failed"]
    assert found["bf16"]["seconds"] > 0
    assert "block_7/mlp/up" in capsys.readouterr().out


def test_the_time_is_divided(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [Event("matmul_rows", 6e-6, "jit(step)/jvp(Llama)/block_0/mlp/up/call")]
    events += [Event("quantize_axis", 2e-6, "")]
    monkeypatch.setattr(recipe_step.profile, "device_events", lambda data, paths: events)
    path = tmp_path / "figures.json"
    assert main([*SMALL, "--recipes", "bf16", f"--json={path}"]) == 0
    assert "Where the time goes" in capsys.readouterr().out
    step, parts = json.loads(path.read_text())["groups"]
    (row,) = parts["rows"]
    # Two steps were traced.
    assert {part: row[part] for part in PARTS if row[part]} == pytest.approx(
        {"products": 3e-6, "quantizers": 1e-6}
    )
    assert row["without_path"] == pytest.approx(0.25)
    assert row["idle"] == pytest.approx(step["rows"][0]["seconds"] - 4e-6)
    assert [kernel["kernel"] for kernel in row["longest"]] == ["matmul_rows", "quantize_axis"]


def test_a_failed_trace_leaves_the_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cupti(run: Any) -> Any:
        raise OSError("no CUPTI")

    monkeypatch.setattr(recipe_step.profile, "record", no_cupti)
    path = tmp_path / "figures.json"
    assert main([*SMALL, "--recipes", "bf16", f"--json={path}"]) == 0
    assert rows(path)["bf16"]["seconds"] > 0
    assert "No breakdown of bf16's time: OSError: no CUPTI." in capsys.readouterr().out


def test_ratios_need_bf16() -> None:
    found: list[dict[str, Any]] = [
        {"recipe": "mxfp4", "seconds": 1.0, "saved_bytes": 5},
        {"recipe": "bf16", "seconds": 2.0, "saved_bytes": 20},
        {"recipe": "mxfp4-iht", "failed": "MemoryError"},
    ]
    relate(found)
    assert (found[0]["ratio"], found[0]["saved_ratio"]) == (2.0, 4.0)
    assert "ratio" not in found[2]
    alone: list[dict[str, Any]] = [{"recipe": "mxfp4", "seconds": 1.0, "saved_bytes": 5}]
    relate(alone)
    assert "ratio" not in alone[0]


def test_tables(tmp_path: Path) -> None:
    options = TrainOptions(model="tiny")
    usual = adahop.MatmulStrategies("iht", "iht", "iht_oe_right", k=1)
    for name in ("adahop-lv1", "adahop-lv2"):
        assert step_table(options, options.recipe(name)) == adahop.StrategyTable.uniform(usual)
    plain = adahop.StrategyTable.uniform("plain")
    assert step_table(options, options.recipe("mxfp4")) == plain
    file = tmp_path / "table.json"
    file.write_text(plain.to_json())
    given = TrainOptions(model="tiny", table=file)
    assert step_table(given, options.recipe("adahop-lv2")) == plain
    assert step_table(given, options.recipe("bf16")) == adahop.StrategyTable.uniform("bf16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps is 0, but must be at least 1"),
        (["--model", "tinny"], "close: tiny"),
        (["--recipes", "fp8"], "recipe is 'fp8'"),
        (["--recipes"], "recipes is empty"),
        (["--backend", "cuda"], "backend is 'cuda'"),
        (["--seq-len", "0"], "seq_len=0 must be at least 1"),
        (["--table", "/nowhere.json"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "step", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
