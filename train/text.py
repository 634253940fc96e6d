"""Turns a path into documents: the one place that knows files, folders, archives and boundaries."""

import errno
import gzip
import lzma
import os
import re
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

MAX_SOURCE_BYTES = 4 * 2**30
"""Most bytes of text, after decompression, that one source may hold: it is kept in memory."""

MAX_FILE_DOCUMENT_BYTES = 256 * 2**10
"""A file of a folder that is longer than this is split, as a single file is."""

MIN_UNIT, MAX_UNIT, UNITS_PER_FILE = 256, 4096, 512
"""A split file gives documents of at least size / 512 bytes, but within 256 B and 4 KiB."""

_CHUNK_BYTES = 1 << 20
_PAGE = re.compile(rb"\f|\n(?:[ \t\r]*\n){2,}")
_PARAGRAPH = re.compile(rb"\f|\n(?:[ \t\r]*\n)+")
_LINE = re.compile(rb"\n")
# The longer a document already is, the weaker the boundary that ends it: (from, to) in units.
_BOUNDARIES = ((_PAGE, 1, 8), (_PARAGRAPH, 8, 16), (_LINE, 16, 64))
_LONGEST_UNITS = 64

# Tests are two thirds of the library's text, mostly tables of cases; many distributions leave
# them out, so that with them the default data would differ from one machine to the next.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# Written by the build of the interpreter: they hold its paths and compiler flags.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text that is never divided between the splits.

    Attributes:
        name: Path relative to the source, with `#i` where the file was split.
        data: The text, not decoded, never empty, without NUL bytes.
    """

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """What a path gave.

    Attributes:
        name: The path, or a name of the default source.
        documents: All documents, ordered by the path of their file and the position in it.
        skipped_files: Files of a folder that are binary (hold a NUL byte) or empty.
    """

    name: str
    documents: tuple[Document, ...]
    skipped_files: int


def read_source(path: str | os.PathLike[str] | None = None) -> Source:
    """Reads every document below a path.

    A folder is read recursively, hidden files and folders left out, symbolic links to folders
    not followed; each file is one document, or several where it is longer than
    `MAX_FILE_DOCUMENT_BYTES`. A single file is always split, see `split_text`. Files that end
    in `.xz` or `.gz` are decompressed. Text needs no particular encoding, but a file that holds
    a NUL byte is taken for binary: an error for a single file, skipped and counted in a folder.

    Args:
        path: A file or a folder; None for the sources of the running Python's standard library
            (`*.py`, without tests, installed packages and what the build wrote).

    Returns:
        The documents, in an order that does not depend on the file system.

    Raises:
        ValueError: If the path is missing, holds no text, is too large or cannot be read.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"standard library of Python {sysconfig.get_python_version()}"
        return _read_folder(root, name, _stdlib_files(root))
    if not os.fspath(path):
        raise ValueError("path='' is empty; give a text file, a folder, a .xz or a .gz file")
    # Unlike `Path.expanduser`, this leaves the name of an unknown user as it is.
    root = Path(os.path.expanduser(path))
    reason = "is neither a file nor a folder"
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        mode, reason = 0, "does not exist"
    except (OSError, ValueError) as error:  # a name too long, no permission; a name with NUL
        mode, reason = 0, f"cannot be read ({getattr(error, 'strerror', error)})"
    if stat.S_ISDIR(mode):
        return _read_folder(root, str(path), _folder_files(root))
    if stat.S_ISREG(mode):
        return _read_single(root, str(path))
    raise ValueError(f"path='{path}' {reason}; give a text file, a folder, a .xz or a .gz file")


def split_text(data: bytes) -> Iterator[bytes]:
    r"""Splits a text into documents, losing nothing: the pieces concatenate to `data`.

    With a unit of 4 KiB (less for a file below 2 MiB: size / 512, at least 256 bytes), a document
    ends at the first of

    - a form feed or two blank lines (`\n\n\n`), once it is 1 unit long,
    - a blank line, once it is 8 units long,
    - a line end, once it is 16 units long,
    - 64 units, before a UTF-8 character rather than within it.

    The boundary itself stays with the document that it ends, and a rest of less than one unit
    joins the last document.

    Args:
        data: The text, in any encoding that extends ASCII.

    Yields:
        The documents, in order; nothing for an empty text.
    """
    unit = min(MAX_UNIT, max(MIN_UNIT, len(data) // UNITS_PER_FILE))
    start = 0
    while start < len(data):
        end = _document_end(data, start, unit)
        if len(data) - end < unit:
            end = len(data)
        yield data[start:end]
        start = end


def truncate_utf8(data: bytes, length: int) -> bytes:
    """Returns the first `length` bytes, less those of a UTF-8 character that they would cut.

    Args:
        data: The text; where it is not UTF-8, at most three bytes more are lost.
        length: Number of bytes, not negative.

    Returns:
        At most `length` bytes.
    """
    end = length
    if length < len(data):
        while end > max(0, length - 3) and data[end] & 0xC0 == 0x80:
            end -= 1
    return data[:end]


def _document_end(data: bytes, start: int, unit: int) -> int:
    for boundary, first, last in _BOUNDARIES:
        match = boundary.search(data, start + first * unit, start + last * unit)
        if match:
            return match.end()
    longest = _LONGEST_UNITS * unit
    return start + len(truncate_utf8(data[start : start + longest + 1], longest))


def _read_single(path: Path, name: str) -> Source:
    data = _read_text(path, MAX_SOURCE_BYTES, name)
    if data is None:
        raise ValueError(
            f"path='{name}' holds a NUL byte, so it is taken for a binary file; give text (UTF-16 "
            "must be made UTF-8, and an archive of several files unpacked, first)"
        )
    if not data:
        raise ValueError(f"path='{name}' is empty; give a file with text in it")
    return Source(name, tuple(_documents(path.name, data, longest=0)), skipped_files=0)


def _read_folder(root: Path, name: str, files: Iterator[Path]) -> Source:
    documents: list[Document] = []
    skipped = total = 0
    for relative, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        data = _read_text(path, MAX_SOURCE_BYTES - total, name)
        if not data:
            skipped += 1
            continue
        total += len(data)
        documents += _documents(relative, data, longest=MAX_FILE_DOCUMENT_BYTES)
    if not documents:
        raise ValueError(
            f"path='{name}' ({root}) is a folder without text files ({skipped} files are binary "
            "or empty); give a folder with text files in it"
        )
    return Source(name, tuple(documents), skipped)


def _documents(name: str, data: bytes, longest: int) -> Iterator[Document]:
    if len(data) <= longest:
        yield Document(name, data)
        return
    for i, piece in enumerate(split_text(data)):
        yield Document(f"{name}#{i}", piece)


def _folder_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_raise_unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from filter(_is_file, paths)


def _stdlib_files(root: Path) -> Iterator[Path]:
    for path in _folder_files(root):
        parts = path.relative_to(root).parts
        if path.suffix == ".py" and not (
            _STDLIB_SKIPPED_FOLDERS.intersection(parts)
            or parts[0].startswith(_STDLIB_SKIPPED_PREFIXES)
        ):
            yield path


def _is_file(path: Path) -> bool:
    """As `Path.is_file`, which raises or says no, by the version of Python, without permission."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a link to nothing, or to itself
            return False
        _raise_unreadable(error)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"path='{error.filename}' cannot be read: {error.strerror}") from error


def _open(path: Path) -> IO[bytes]:
    openers = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(path.suffix.lower(), open)(path, "rb")


def _read_text(path: Path, limit: int, source: str) -> bytes | None:
    """Reads a whole file; None if it holds a NUL byte, found without reading further."""
    chunks: list[bytes] = []
    total = 0
    try:
        with _open(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                if b"\0" in chunk:
                    return None
                total += len(chunk)
                if total > limit:
                    raise ValueError(
                        f"path='{source}' holds more than {MAX_SOURCE_BYTES:,} bytes of text "
                        f"(reached in {path.name}), the most that is read; give a part of it"
                    )
                chunks.append(chunk)
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(
            f"path='{path}' is damaged or incomplete ({error}); make the archive anew"
        ) from error
    except OSError as error:
        raise ValueError(f"path='{path}' cannot be read: {error.strerror or error}") from error
    return b"".join(chunks)
