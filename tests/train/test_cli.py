"""The command does what it says, and answers bad input with one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import adahop_jax as adahop
from train import cli
from train.cli import main
from train.metrics import read_metrics
from train.options import TrainOptions
from train.run import RunStoppedError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("hardly_compiled")


@pytest.fixture(scope="module", autouse=True)
def wide_terminal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def small(small_corpus: Path) -> list[str]:
    """Options of `train` and `profile` alike."""
    return [f"--data={small_corpus}", "--model=tiny", "--batch-size=2", "--seq-len=16"]


@pytest.fixture(scope="module")
def short() -> list[str]:
    """Options of `train`."""
    return ["--steps=4", "--warmup-steps=1", "--calibration-steps=2", "--validation-batches=1"]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The run of two recipes."""

    code: int
    out: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def trained(
    small: list[str], short: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    out = tmp_path_factory.mktemp("runs")
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(["train", "--recipes", "bf16", "adahop-lv2", f"--out={out}", *small, *short])
    return Trained(code, out, stdout.getvalue(), stderr.getvalue())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that a command is refused with."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("adahop: ")
    return captured.err.removeprefix("adahop: ").rstrip("\n")


def test_train_compares_the_recipes(trained: Trained) -> None:
    assert (trained.code, trained.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in trained.stdout.splitlines() if line.strip()}
    losses = {}
    for recipe in ("bf16", "adahop-lv2"):
        folder = trained.out / recipe
        assert {p.name for p in folder.iterdir()} == {
            "checkpoints", "metrics.jsonl", "table.json", "tokenizer.json"
        }  # fmt: skip
        records = read_metrics(folder / "metrics.jsonl")
        losses[recipe] = records[-1]["validation_loss"]
        assert rows[recipe][1:3] == [f"{records[-2]['loss']:.4f}", f"{losses[recipe]:.4f}"]
    gap = losses["adahop-lv2"] - losses["bf16"]
    assert rows["adahop-lv2"][3] == f"{gap:+.4f}"
    assert trained.stdout.startswith("data: ")
    assert f"Runs are in {trained.out}: metrics.jsonl, table.json, checkpoints." in trained.stdout


def test_both_recipes_start_from_the_same_weights_and_data(trained: Trained) -> None:
    bf16, lv2 = (
        read_metrics(trained.out / name / "metrics.jsonl") for name in ("bf16", "adahop-lv2")
    )
    first = [[r["loss"] for r in log if r["step"] <= 2 and "loss" in r] for log in (bf16, lv2)]
    np.testing.assert_allclose(*first, rtol=1e-4)  # calibration computes in BF16
    assert bf16[-1]["validation_loss"] != lv2[-1]["validation_loss"]


def test_table_show_takes_a_run_and_a_file(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained.out / "adahop-lv2"
    table = adahop.StrategyTable.from_json((folder / "table.json").read_text())
    shown = []
    for path in (folder, folder / "table.json"):
        assert main(["table", "show", str(path)]) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1] and shown[0].err == ""
    lines = {line.split()[0]: line for line in shown[0].out.splitlines() if line.strip()}
    for path, entry in table.items():
        words = [
            f"{strategy} (k={k})" if strategy.extracts else str(strategy)
            for _, strategy, k in entry.items()
        ]
        assert lines[path].split() == " ".join([path, *words]).split()


def test_table_show_json_is_the_table(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.out / "adahop-lv2"
    assert main(["table", "show", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == (folder / "table.json").read_text() + "\n"


def test_the_table_of_a_uniform_run(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "show", str(trained.out / "bf16")]) == 0
    assert "(all layers)" in capsys.readouterr().out


def test_train_takes_the_table_of_profile(
    small: list[str], short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "table.json", tmp_path / "runs"
    assert main(["profile", "--steps=2", f"--json={file}", *small]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    data = json.loads(file.read_text())
    assert len(data["layers"]) == len(data["patterns"]) == len(data["votes"]) == 7
    for path, patterns in data["patterns"].items():
        (line,) = (line for line in shown.out.splitlines() if path in line)
        assert line.split()[1:4] == [patterns[name] for name in ("x", "w", "g")]
    assert f"Written to {file}" in shown.out

    arguments = ["--recipes", "adahop-lv2", f"--out={out}", f"--table={file}", *small, *short]
    assert main(["train", *arguments]) == 0
    capsys.readouterr()
    assert main(["table", "show", str(out / "adahop-lv2"), "--json"]) == 0
    used = capsys.readouterr().out
    assert adahop.StrategyTable.from_json(used) == adahop.StrategyTable.from_json(file.read_text())
    records = read_metrics(out / "adahop-lv2" / "metrics.jsonl")
    assert not any("event" in record for record in records)


def test_bad_options_of_train(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'out'}"
    (tmp_path / "table.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([*small, "--data=/nowhere/at-all"], "path='/nowhere/at-all' does not exist"),
        ([*small, "--recipes", "adahop"], "recipe is 'adahop'"),
        ([*small, "--model=huge"], "model is 'huge'"),
        ([*small, f"--table={tmp_path}"], "no strategy table"),
        ([*small, "--steps=0"], "steps is 0"),
        ([*small, "--tokenizer=/nowhere/tokenizer.json"], "/nowhere/tokenizer.json"),
        ([*small, "--max-bytes=10"], "max_bytes"),
    ):
        sentence = refused(capsys, "train", out, *arguments)
        assert words in sentence
        assert not (tmp_path / "out").exists()
    sentence = refused(capsys, "train", f"--out={tmp_path / 'file'}", *small)
    assert str(tmp_path / "file") in sentence and "cannot be written" in sentence


def test_a_changed_option_is_refused(
    trained: Trained, small: list[str], short: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(
        capsys, "train", "--recipes", "bf16", f"--out={trained.out}", *small, *short, "--steps=5"
    )
    assert sentence.startswith("steps is 5, but the run in ") and "started with 4" in sentence


def test_a_bad_table_is_refused_before_any_recipe_is_trained(
    small: list[str], short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = adahop.MatmulStrategies.uniform("iht")
    file, out = tmp_path / "table.json", tmp_path / "out"
    file.write_text(adahop.StrategyTable({"block_9/mlp/up": entry}, default=entry).to_json())
    arguments = ["--recipes", "bf16", "adahop-lv2", f"--out={out}", f"--table={file}"]
    assert "block_9/mlp/up" in refused(capsys, "train", *arguments, *small, *short)
    assert read_metrics(out / "bf16" / "metrics.jsonl") == []


def test_bad_options_of_profile(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--recipe=bf16"], "recipe is 'bf16', which has no table to calibrate"),
        (["--recipe=lv2"], "recipe is 'lv2'"),
        ([f"--json={tmp_path / 'no' / 'table.json'}"], "its folder does not exist"),
        (["--steps=0"], "steps is 0"),
        (["--data=/nowhere/at-all"], "/nowhere/at-all"),
    ):
        assert words in refused(capsys, "profile", *small, *arguments)


def test_profile_refuses_a_folder_as_json_before_any_work(
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was trained")

    monkeypatch.setattr(cli, "profile_model", refuse)
    assert str(tmp_path) in refused(capsys, "profile", f"--json={tmp_path}", *small)


def test_bad_paths_of_table_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("row\ncolumn\n")
    for path, words in (
        (tmp_path / "missing.json", "cannot be read"),
        (tmp_path, "cannot be read"),
        (tmp_path / "text.json", "not JSON"),
    ):
        sentence = refused(capsys, "table", "show", str(path))
        assert sentence.startswith(f"table is '{path}', ") and words in sentence


def test_a_run_that_stops_early_gives_1(
    small: list[str],
    short: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise RunStoppedError("bf16: the loss is nan at step 3; no checkpoint was kept in 'a'.")

    monkeypatch.setattr(cli, "run_recipe", stop)
    assert main(["train", f"--out={tmp_path}", *small, *short]) == 1
    assert capsys.readouterr().err == (
        "adahop: bf16: the loss is nan at step 3; no checkpoint was kept in 'a'.\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--epochs=3"],
        ["train", "--steps=many"],
        ["profile", "--table=x"],
        ["table", "print", "x"],
        ["table", "show"],
        ["tables"],
        [],
    ],
    ids=" ".join,
)
def test_what_is_no_command_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err and not captured.out


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_help_lists_every_option_and_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    top = help_of(capsys)
    assert all(name in top for name in ("train", "profile", "table"))
    for command, options in (("train", TrainOptions), ("profile", cli.Profile)):
        text = " ".join(help_of(capsys, command).replace("│", " ").split())
        explained = str(options.__doc__).split("Attributes:")[1]
        for field in dataclasses.fields(options):
            assert f"--{field.name.replace('_', '-')}" in text, field.name
            (line,) = (
                line.strip().removeprefix(f"{field.name}: ")
                for line in explained.splitlines()
                if line.strip().startswith(f"{field.name}: ")
            )
            assert " ".join(line.split()[:4]).rstrip(".;") in text, field.name
    assert "--json" in help_of(capsys, "table")


def python_m_train(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "train", *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        **({"stdout": subprocess.PIPE} | options),  # pyright: ignore[reportArgumentType]
    )


def test_python_m_train_is_the_command(tmp_path: Path) -> None:
    shown = python_m_train("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "adahop" in shown.stdout and "profile" in shown.stdout
    bad = python_m_train("table", "show", str(tmp_path / "missing.json"))
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("how", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_that_has_gone_gets_no_traceback(trained: Trained, how: list[str]) -> None:
    """As of `adahop table show PATH | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        path = str(trained.out / "adahop-lv2")
        shown = python_m_train("table", "show", path, *how, stdout=writer)
    finally:
        os.close(writer)
    assert (shown.returncode, shown.stderr) == (1, "")


def test_main_raises_what_is_no_ones_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours must not pass for bad input."""

    def fail(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "read_table", fail)
    with pytest.raises(KeyError):
        main(["table", "show", "x"])
