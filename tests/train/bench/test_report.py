"""Tables show every row, failed ones with their reason, and the file holds all figures."""

import io
import json
from pathlib import Path

import jax
import pytest
from rich.console import Console

from train.bench import report
from train.bench.report import (
    Column,
    Group,
    check_json,
    describe,
    find_backend,
    fixed,
    progress,
    show,
    significant,
    write_json,
)
from train.display import Display

GROUP = Group(
    "speeds",
    "Speeds of two",
    (Column("what", "what"), Column("rate", "GB/s", significant(1e-9))),
    [{"what": "copy", "rate": 4.2e12, "samples": [1, 2]}, {"what": "add", "rate": None}],
    notes=("Of this device.",),
)


def make(terminal: bool = False) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=terminal, color_system=None, _environ={})
    return Display(console), file


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip(" ─")]


def test_show_writes_cells_and_notes() -> None:
    display, file = make()
    show(display, GROUP)
    assert lines(file.getvalue()) == [
        ["Speeds", "of", "two"],
        ["what", "GB/s"],
        ["copy", "4,200"],
        ["add"],
        ["Of", "this", "device."],
    ]


def test_a_failed_row_has_its_reason() -> None:
    group = Group("g", "t", GROUP.columns, [{"what": "copy", "rate": 1e9}, {"what": "add"}])
    assert not group.failed
    group.rows[1]["failed"] = "MemoryError: no [room]"
    assert group.failed
    display, file = make()
    show(display, group)
    assert lines(file.getvalue())[1:] == [
        ["what", "GB/s", "failed"],
        ["copy", "1.00"],
        ["add", "MemoryError:", "no", "[room]"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.0123"), (1.5, "1.50"), (99.94, "99.9"), (123.6, "124"), (12345.6, "12,346")]
    + [(0.0, "0"), (9.999, "10.0")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(1)(value) == text


def test_fixed_digits() -> None:
    assert fixed(1, 1e3, " ms")(1.23456) == "1,234.6 ms"


def test_the_file_holds_every_figure_and_what_was_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, "kernels", {"quick": True, "json": path}, [GROUP])
    data = json.loads(path.read_text())
    assert data["groups"][0]["rows"] == GROUP.rows
    assert data["options"] == {"quick": True, "json": str(path)}
    environment = data["environment"]
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["device"] == jax.devices()[0].device_kind
    assert environment["date"].endswith("+00:00")


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    check_json(None)
    check_json(tmp_path / "new.json")
    with pytest.raises(ValueError, match="does not exist"):
        check_json(tmp_path / "none" / "new.json")
    with pytest.raises(ValueError, match="give a file"):
        check_json(tmp_path)


def test_backends_that_are_none_or_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_backend("xla").name == "xla"
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        find_backend("cuda")

    def needs_gpu(name: str) -> None:
        raise RuntimeError(f"backend {name!r} needs an NVIDIA GPU.")

    monkeypatch.setattr(report, "choose_backend", needs_gpu)
    with pytest.raises(ValueError, match=r"^backend 'triton' needs an NVIDIA GPU"):
        find_backend("triton")


def test_describe_names_device_and_versions() -> None:
    display, file = make()
    describe(display)
    assert f"jax {jax.__version__}" in file.getvalue()
    assert "its times are no GPU's speeds" in file.getvalue()


def test_progress_leaves_a_pipe_clean(capsys: pytest.CaptureFixture[str]) -> None:
    display, file = make()
    with progress(display) as say:
        say("layers: 2x2")
    assert file.getvalue() == ""
    assert capsys.readouterr().err.endswith("s  layers: 2x2\n")
    display, file = make(terminal=True)
    with progress(display) as say:
        say("layers: 2x2")
    assert capsys.readouterr().err == ""
