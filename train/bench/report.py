"""Tables of measurements: on the terminal and as JSON."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import rich.box
from rich.table import Table
from rich.text import Text

from adahop_jax.backends import Backend, choose_backend
from train.display import Display

_PACKAGES = ("jax", "jaxlib", "flax", "triton", "jax-triton")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: the key of its values in a row, its title, and how a value is written."""

    key: str
    title: str
    write: Callable[[Any], str] = str


@dataclasses.dataclass
class Group:
    """A table of measurements.

    Attributes:
      name: by which it is chosen.
      title: one line above it.
      columns: what is shown. A row may hold more, for the JSON file.
      rows: values by key; a row that failed has its reason under 'failed'.
      notes: lines below it.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether a row is missing something."""
        return any(row.get("failed") for row in self.rows)

    def table(self) -> Table:
        """The table as rich draws it."""
        view = Table(box=rich.box.SIMPLE_HEAD, title=Text(self.title), title_justify="left")
        for i, column in enumerate(self.columns):
            left = all(isinstance(row.get(column.key, ""), str) for row in self.rows)
            justify = "left" if left or not i else "right"
            view.add_column(column.title, justify=justify, overflow="fold")
        if self.failed:
            view.add_column("failed", overflow="fold")
        for row in self.rows:
            cells = [
                "" if row.get(column.key) is None else column.write(row[column.key])
                for column in self.columns
            ]
            cells += [row.get("failed") or ""] if self.failed else []
            view.add_row(*(Text(cell) for cell in cells))  # not str: rich would look for markup
        return view

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "title": self.title,
            "notes": list(self.notes),
            "rows": self.rows,
        }


def environment() -> dict[str, Any]:
    """Device, versions and date of a measurement."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "devices": jax.device_count(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(
    path: pathlib.Path, command: str, options: dict[str, Any], groups: Sequence[Group]
) -> None:
    """Writes every figure of a command, with what it was measured on."""
    data = {
        "format": "adahop-bench",
        "version": 1,
        "command": command,
        "environment": environment(),
        "options": options,
        "groups": [group.to_dict() for group in groups],
    }
    path.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")


def check_json(path: pathlib.Path | None) -> None:
    """Checks that a file can be written there, before anything is measured.

    Raises:
      ValueError: if its folder does not exist, or it is a folder itself.
    """
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"json is '{path}', but its folder does not exist; create it.")
    if path is not None and path.is_dir():
        raise ValueError(f"json is '{path}', which is a folder; give a file.")


def find_backend(name: str) -> Backend:
    """The backend of this name, 'auto' included.

    Raises:
      ValueError: if there is none, or it cannot run here.
    """
    try:
        return choose_backend(name)[0]
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def describe(display: Display) -> None:
    """Prints what is measured on."""
    found = environment()
    versions = ", ".join(f"{name} {v}" for name, v in found["versions"].items() if v is not None)
    display.say(f"{found['device']} ({versions})")
    if found["platform"] == "cpu":
        display.say("On a CPU this shows that everything runs; its times are no GPU's speeds.")


def show(display: Display, group: Group) -> None:
    """Prints a table and its notes."""
    display.console.print(group.table())
    for note in group.notes:
        display.say(note)


@contextlib.contextmanager
def progress(display: Display) -> Iterator[Callable[[str], None]]:
    """Says what is being measured: on a terminal in place, elsewhere on standard error."""
    if not display.console.is_terminal:
        started = time.monotonic()
        yield lambda text: print(f"{time.monotonic() - started:5.0f} s  {text}", file=sys.stderr)
        return
    with display.console.status("") as status:
        yield status.update


def fixed(digits: int, scale: float = 1.0, unit: str = "") -> Callable[[float], str]:
    """Writes numbers with so many digits after the point."""
    return lambda value: f"{value * scale:,.{digits}f}{unit}"


def significant(scale: float) -> Callable[[float], str]:
    """Writes numbers with three significant digits, and whole ones in full."""

    def write(value: float) -> str:
        value = float(f"{value * scale:.3g}") if abs(value * scale) < 100 else value * scale
        digits = 2 - math.floor(math.log10(value)) if 0 < value < 100 else 0
        return f"{value:,.{digits}f}"

    return write


MILLISECONDS = fixed(3, 1e3)
MICROSECONDS = fixed(1, 1e6)
PERCENT = fixed(0, 1e2, " %")
TIMES = fixed(2, 1, "x")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
