"""Checkpoints on disk: a whole training state, bit for bit, or a clear refusal.

A step is a folder `<folder>/<step>` with `arrays/` (written by Orbax), `metadata.json` and
`checksums.json`. It is written under another name and renamed when complete, so a folder named by a
number is always whole, and a process killed while saving leaves its earlier steps as they were.
"""

import contextlib
import hashlib
import json
import logging
import operator
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

_ARRAYS = "arrays"
_METADATA = "metadata.json"
_CHECKSUMS = "checksums.json"
_STAGING = "incomplete-"


class CheckpointStore:
    """The checkpoints of one training run.

    Saves are synchronous: when `save` returns, the step is on disk.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Names the folder; nothing is read or written yet.

        Args:
          folder: that holds the checkpoints; made by `prepare` or the first `save`.
          keep: number of steps to keep; older ones are deleted after a save.

        Raises:
          ValueError: if keep is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}, but must be at least 1.")
        self.folder = Path(folder).expanduser().absolute()
        self._keep = keep
        # Float noise hardly compresses (8 % here), and trying doubled the time of a save.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._checkpointer = ocp.Checkpointer(handler)

    def __enter__(self) -> Self:
        """Returns the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the store."""
        self.close()

    def close(self) -> None:
        """Frees what writing needed; the store is of no use afterwards."""
        self._checkpointer.close()

    def steps(self) -> list[int]:
        """The complete steps in the folder, ascending; none if there is no folder."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())

    def latest_step(self) -> int | None:
        """The last complete step, or None."""
        return max(self.steps(), default=None)

    def prepare(self) -> None:
        """Makes the folder, and makes sure before training that it can be written.

        Raises:
          ValueError: if it cannot.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f"{_STAGING}*"):
                shutil.rmtree(leftover)
            probe = self.folder / f"{_STAGING}probe"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise ValueError(
                f"checkpoint folder is '{self.folder}', which cannot be written "
                f"({error.strerror}); give a folder you can write to."
            ) from error

    def save(self, step: int, arrays: PyTree, metadata: Mapping[str, Any]) -> None:
        """Writes a checkpoint, then deletes those beyond the last `keep`.

        Args:
          step: training steps done; beyond every step in the folder.
          arrays: pytree of JAX arrays, typed PRNG keys and NumPy arrays of numbers, of any shape.
          metadata: what JSON can hold (tuples come back as lists).

        Raises:
          TypeError: if a leaf is no array or not of numbers, or metadata does not go into JSON.
          ValueError: if the step is not beyond the latest, or the folder cannot be written, say
            because the disk is full; the earlier steps then stay as they were.
        """
        step = operator.index(step)
        latest = self.latest_step()
        if step < 0 or (latest is not None and step <= latest):
            raise ValueError(
                f"step is {step}, but must be beyond the latest checkpoint in '{self.folder}' "
                f"({latest}); resume from that one or give a new folder."
            )
        leaves = _by_path(arrays)
        for path, leaf in leaves.items():
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                raise TypeError(
                    f"arrays has a {type(leaf).__name__} at '{path}', but must hold arrays only."
                )
            if not (_is_key(leaf) or _is_storable(leaf.dtype)):
                raise TypeError(
                    f"arrays has dtype {leaf.dtype} at '{path}', but must hold numbers, booleans "
                    "or keys, in the machine's byte order."
                )
        contents = {"arrays": {p: _describe(x) for p, x in leaves.items()}, "metadata": metadata}
        try:
            text = json.dumps(contents, indent=1)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata does not go into JSON ({error}).") from error
        # Orbax takes neither typed keys nor arrays without elements, of which `text` says all.
        stored = {
            p: jax.random.key_data(x) if _is_key(x) else x for p, x in leaves.items() if x.size
        }

        self.prepare()
        self._check_room(step, sum(x.nbytes for x in stored.values()))
        try:
            self._write(step, stored, text)
        except (OSError, ValueError) as error:  # Orbax's storage raises ValueError on a full disk
            reason = " ".join(str(error).split())
            raise ValueError(
                f"checkpoint folder is '{self.folder}', where step {step} could not be written "
                f"({reason}); make room, or give another folder."
            ) from error

        for old in self.steps()[: -self._keep]:
            # Renamed first, so that a kill in between leaves no half a step under a step's name.
            doomed = (self.folder / str(old)).rename(self.folder / f"{_STAGING}{old}")
            shutil.rmtree(doomed)

    def _check_room(self, step: int, needed: int) -> None:
        # A failing write is caught too, but floods the terminal from TensorStore's threads.
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < needed:  # some mounted stores report no size at all
            raise ValueError(
                f"checkpoint folder is '{self.folder}', which has {disk.free / 1e6:.1f} MB free, "
                f"but step {step} takes {needed / 1e6:.1f} MB; make room, or give another folder."
            )

    def _write(self, step: int, stored: dict[str, Any], text: str) -> None:
        staging = self.folder / f"{_STAGING}{step}"
        staging.mkdir()
        (staging / _METADATA).write_text(text, encoding="utf-8")
        if stored:
            with _quiet():
                self._checkpointer.save(staging / _ARRAYS, ocp.args.PyTreeSave(stored))
        checksums = {name: _checksum(staging / name) for name in _files(staging)}
        (staging / _CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
        staging.rename(self.folder / str(step))

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of a step, without reading its arrays.

        Args:
          step: of the checkpoint; the latest if None.

        Raises:
          ValueError: if there is no such checkpoint, or it is damaged.
        """
        return self._read_contents(self._find(step))["metadata"]

    def restore(self, step: int | None, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """Reads a checkpoint of the same model.

        Args:
          step: of the checkpoint; the latest if None.
          like: tree of the saved structure, with arrays or `jax.ShapeDtypeStruct`s of the saved
            shapes and dtypes. A leaf that names a sharding (a struct with one, or an array
            committed to its devices) comes back with it, however many devices it was saved from;
            a NumPy leaf comes back as NumPy; any other comes back uncommitted on the default
            device.

        Returns:
          The step, the arrays in the structure of `like`, and the metadata.

        Raises:
          ValueError: if there is no such checkpoint, it is damaged, or it is of another model.
        """
        step = self._find(step)
        contents = self._read_contents(step)
        wanted = _by_path(like)
        self._check_same_model(step, contents["arrays"], wanted)
        for path, leaf in wanted.items():
            if not (isinstance(leaf, np.ndarray) or _is_key(leaf) or _fits_jax(leaf.dtype)):
                raise ValueError(
                    f"like has {leaf.dtype} at '{path}', which JAX holds only under "
                    "jax_enable_x64; give a NumPy array there."
                )
        self._verify(step)

        arguments = {path: _restore_arguments(leaf) for path, leaf in wanted.items() if leaf.size}
        loaded: dict[str, Any] = {}
        if arguments:
            request = ocp.args.PyTreeRestore(
                item=dict.fromkeys(arguments, 0), restore_args=arguments
            )
            with _quiet():
                loaded = self._checkpointer.restore(self.folder / str(step) / _ARRAYS, args=request)
        leaves = [
            # Popped, so that no leaf stays in host memory longer than it must.
            _place(loaded.pop(path, None), leaf, contents["arrays"][path])
            for path, leaf in wanted.items()
        ]
        arrays = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return step, arrays, contents["metadata"]

    def _find(self, step: int | None) -> int:
        if not self.folder.is_dir():
            raise ValueError(
                f"checkpoint folder is '{self.folder}', which is no folder; give one that a run "
                "saved to."
            )
        steps = self.steps()
        if not steps:
            raise ValueError(
                f"checkpoint folder is '{self.folder}', which holds no complete checkpoint; give "
                "one that a run saved to."
            )
        if step is None:
            return steps[-1]
        if step not in steps:
            known = ", ".join(map(str, steps))
            raise ValueError(
                f"step is {step}, but '{self.folder}' holds {known}; give one of those."
            )
        return operator.index(step)

    def _read_contents(self, step: int) -> dict[str, Any]:
        self._verify(step, [_METADATA])
        return json.loads((self.folder / str(step) / _METADATA).read_text(encoding="utf-8"))

    def _verify(self, step: int, names: list[str] | None = None) -> None:
        """Compares files, all of them by default, with their checksums."""
        folder = self.folder / str(step)
        damaged = _CHECKSUMS
        try:
            checksums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
            for damaged in names or checksums:
                if _checksum(folder / damaged) != checksums.get(damaged):
                    break
            else:
                return
        except (OSError, ValueError):  # missing, or no JSON
            pass
        earlier = ", ".join(str(other) for other in self.steps() if other < step)
        raise ValueError(
            f"checkpoint '{folder}' is damaged: its file '{damaged}' is missing, cut short or "
            "changed; "
            + (f"give an earlier step ({earlier})." if earlier else "there is no earlier one.")
        )

    def _check_same_model(
        self, step: int, saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]
    ) -> None:
        for path in [*wanted, *saved]:
            ours = _text(_describe(wanted[path])) if path in wanted else "nothing"
            theirs = _text(saved[path]) if path in saved else "nothing"
            if ours != theirs:
                raise ValueError(
                    f"checkpoint '{self.folder / str(step)}' is of another model: at '{path}' it "
                    f"has {theirs}, but this model has {ours}; give the configuration it was saved "
                    "with."
                )


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_path = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    if len(by_path) < len(leaves):
        raise ValueError("arrays has two leaves of the same path; let no name contain '/'.")
    return by_path


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_storable(dtype: Any) -> bool:
    return dtype.isnative and (jnp.issubdtype(dtype, np.number) or dtype == np.bool_)


def _fits_jax(dtype: Any) -> bool:
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def _describe(leaf: Any) -> dict[str, Any]:
    description = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        description["generator"] = str(jax.random.key_impl(leaf))
    return description


def _text(description: Mapping[str, Any]) -> str:
    return f"{description['dtype']}{tuple(description['shape'])}"


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def _restore_arguments(leaf: Any) -> ocp.RestoreArgs:
    sharding = _sharding(leaf)
    if sharding is None or _is_key(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape)


def _place(value: Any, leaf: Any, description: Mapping[str, Any]) -> Any:
    """Gives a restored value, None if it has no elements, the kind and place of `leaf`."""
    if value is None:
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        value = np.zeros(data.shape, data.dtype)
    if isinstance(leaf, np.ndarray):
        return value
    value = value if isinstance(value, jax.Array) else jnp.array(value)
    if _is_key(leaf):
        value = jax.random.wrap_key_data(value, impl=description["generator"])
    sharding = _sharding(leaf)
    return value if sharding is None else jax.device_put(value, sharding)


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's log lines off the terminal; its failures still raise."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
