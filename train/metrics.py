"""The log of a run: one JSON object a line, which a resumed run continues without a seam."""

import json
import os
import pathlib
from typing import Any


class MetricsLog:
    """Appends records to a JSON Lines file.

    Every record has a 'step'. A number that is not finite is written as NaN or Infinity, as
    Python's json module reads it back: it has to stay visible.
    """

    def __init__(self, path: pathlib.Path, resume_at: int = 0) -> None:
        """Opens the log, dropping records beyond the step that a run resumes at.

        A process that was killed may have logged steps that its last checkpoint does not hold, or
        half a line.
        """
        self.path = path
        records = read_metrics(path) if resume_at else []
        kept = [record for record in records if record["step"] <= resume_at]
        staging = path.with_suffix(".tmp")
        staging.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        staging.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: Any) -> None:
        """Appends a record and hands it to the operating system."""
        self._file.write(_line({"step": step, **values}))
        self._file.flush()

    def sync(self) -> None:
        """Waits until all records are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Records of a log, in order; those of a missing file are none, and half a line is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
