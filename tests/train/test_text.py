"""Tests of the documents that a path gives."""

import gzip
import lzma
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train import text
from train.text import Document, Source, read_source, split_text, truncate_utf8

PROSE = b"".join(b"Line %d of some prose.\n%s" % (i, b"\n" * (i % 3)) for i in range(4000))


def write(path: Path, data: bytes = b"some text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_folder_gives_one_document_per_file_in_path_order(tmp_path: Path):
    for name in ("b.txt", "a/z.py", "a/b/c.md", "a.txt"):
        write(tmp_path / name, name.encode())
    source = read_source(tmp_path)
    names = ["a.txt", "a/b/c.md", "a/z.py", "b.txt"]
    assert source == Source(str(tmp_path), tuple(Document(n, n.encode()) for n in names), 0)


def test_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(20):
        write(tmp_path / f"{i % 3}" / f"{i}.txt", b"%d" % i)
    expected = read_source(tmp_path)
    walk = os.walk

    def reversed_walk(*args, **kwargs):
        return ((f, d, n[::-1]) for f, d, n in reversed(list(walk(*args, **kwargs))))

    monkeypatch.setattr(text.os, "walk", reversed_walk)
    assert read_source(tmp_path) == expected


def test_folder_skips_and_counts_binary_and_empty_files_but_not_hidden_ones(tmp_path: Path):
    write(tmp_path / "good.txt", b"latin-1: \xe9\xff\n")
    write(tmp_path / "late.bin", b"x" * 3_000_000 + b"\0")
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / ".git" / "config")
    write(tmp_path / ".hidden")
    source = read_source(tmp_path)
    assert source.documents == (Document("good.txt", b"latin-1: \xe9\xff\n"),)
    assert source.skipped_files == 2


def test_links_to_folders_are_not_followed_and_dangling_ones_ignored(tmp_path: Path):
    write(tmp_path / "a.txt")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert [d.name for d in read_source(tmp_path).documents] == ["a.txt"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".xz", lzma.compress), (".gz", gzip.compress), (".GZ", gzip.compress)]
)
def test_archive_equals_the_plain_file(tmp_path: Path, suffix: str, compress):
    plain = read_source(write(tmp_path / "plain.txt", PROSE))
    packed = read_source(write(tmp_path / f"packed{suffix}", compress(PROSE)))
    assert [d.data for d in packed.documents] == [d.data for d in plain.documents]
    assert len(plain.documents) > 100


def test_archive_of_several_streams_is_read_to_its_end(tmp_path: Path):
    for name, compress in (("a.xz", lzma.compress), ("a.gz", gzip.compress)):
        source = read_source(write(tmp_path / name, compress(b"first ") + compress(b"second")))
        assert source.documents[0].data == b"first second"


def test_long_file_of_a_folder_is_split_and_a_shorter_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text, "MAX_FILE_DOCUMENT_BYTES", len(PROSE))
    write(tmp_path / "exact.txt", PROSE)
    write(tmp_path / "long.txt", PROSE + b"\n")
    documents = read_source(tmp_path).documents
    assert [d.name for d in documents[:3]] == ["exact.txt", "long.txt#0", "long.txt#1"]
    assert b"".join(d.data for d in documents[1:]) == PROSE + b"\n"


def test_default_is_the_standard_library_without_tests():
    source = read_source()
    names = {d.name for d in source.documents}
    root = Path(sysconfig.get_path("stdlib"))
    assert {"argparse.py", "json/decoder.py"} <= names
    assert (root / "argparse.py").read_bytes() in {d.data for d in source.documents}
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert all(name.split("#")[0].endswith(".py") for name in names)
    assert not any(name.startswith(("_sysconfigdata", "config-")) for name in names)
    assert 3e6 < sum(len(d.data) for d in source.documents) < 60e6


# Boundaries. A file below 128 KiB has a unit of 256 bytes: 8 units are 2048, 16 are 4096.
FILL = b"x" * 255


@pytest.mark.parametrize(
    ("gap", "size"),
    [
        (b"\n\n\n", 300),  # two blank lines, at once
        (b"\n \t\n\r\n", 300),  # blank lines may hold white space
        (b"\r\n\r\n\r\n", 300),
        (b"\f", 300),
        (b"\n\n", 2100),  # one blank line, in a document of 8 units
        (b"\n", 4200),  # a line end, in one of 16
    ],
)
def test_a_boundary_ends_a_document_of_its_size(gap: bytes, size: int):
    first, second = b"a" * size + gap, b"b" * size
    assert list(split_text(first + second)) == [first, second]


@pytest.mark.parametrize(("gap", "size"), [(b"\n\n\n", 250), (b"\n\n", 2000), (b"\n", 4000)])
def test_a_boundary_does_not_end_a_shorter_document(gap: bytes, size: int):
    data = b"a" * size + gap + b"b" * 600
    assert list(split_text(data)) == [data]


def test_boundary_after_exactly_one_unit_counts_and_a_short_rest_joins_the_last():
    page = b"a" * 256 + b"\f"
    assert list(split_text(page + b"b" * 256)) == [page, b"b" * 256]
    assert list(split_text(page + b"b" * 255)) == [page + b"b" * 255]


def test_the_unit_grows_with_the_file_to_4_kib():
    line = b"x" * 61 + b"\n\n\n"
    sizes = [
        {len(piece) for piece in list(split_text(line * count))[:-1]}
        for count in (1024, 16 * 1024, 64 * 1024)  # 64 KiB, 1 MiB, 4 MiB
    ]
    # The first boundary after 256, 2048 and 4096 bytes, itself included.
    assert sizes == [{320}, {2112}, {4160}]


def test_text_without_line_ends_is_cut_between_characters():
    data = "é€𝄞".encode() * 10_000  # 9 bytes each time: cuts fall into characters
    pieces = list(split_text(data))
    assert b"".join(pieces) == data
    assert len(pieces) > 3
    assert {len(piece) for piece in pieces[:-1]} <= set(range(64 * 256 - 3, 64 * 256 + 1))
    for piece in pieces:
        piece.decode()


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [b"\n", b"\n\n", b"\n\n\n", b"\f", b" \n", b"\r\n", FILL, b"\xff" * 99]
            ),
            st.integers(1, 20_000).map(lambda n: b"y" * n),
        ),
        max_size=30,
    )
)
def test_split_loses_nothing_and_keeps_its_sizes(parts: list[bytes]):
    data = b"".join(parts)
    pieces = list(split_text(data))
    assert b"".join(pieces) == data
    unit = min(4096, max(256, len(data) // 512))
    assert all(pieces)
    assert all(len(piece) <= 65 * unit for piece in pieces)
    if len(pieces) > 1:
        assert min(map(len, pieces)) >= unit


@given(st.text(max_size=20), st.integers(0, 90))
def test_truncate_utf8_keeps_whole_characters(string: str, length: int):
    data = string.encode()
    cut = truncate_utf8(data, length)
    assert data.startswith(cut)
    assert cut.decode() == string[: len(cut.decode())]
    assert min(length, len(data)) - 3 <= len(cut) <= length


def test_truncate_utf8_of_other_bytes_loses_at_most_three():
    assert truncate_utf8(b"\x80" * 100, 50) == b"\x80" * 47
    assert truncate_utf8(b"\x80" * 100, 2) == b""
    assert truncate_utf8(b"\x80" * 100, 100) == b"\x80" * 100


# Errors: one sentence each.


def assert_refuses(path: str | Path, *fragments: str):
    with pytest.raises(ValueError) as caught:
        read_source(path)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in (f"path='{path}", *fragments):
        assert fragment in message


def test_missing_path_and_empty_path():
    assert_refuses("/no/such/folder", "does not exist", "give a text file, a folder")
    assert_refuses("", "is empty", "give a text file, a folder")
    assert_refuses("~no-such-user/text", "does not exist")


def test_path_that_the_system_refuses(tmp_path: Path):
    assert_refuses("x" * 300, "cannot be read (File name too long)", "give a text file, a folder")
    assert_refuses("a\0b", "cannot be read (", "null", "give a text file, a folder")
    assert_refuses(write(tmp_path / "a.txt") / "b", "cannot be read (Not a directory)")


def test_device_is_neither_file_nor_folder():
    assert_refuses(os.devnull, "neither a file nor a folder")


def test_empty_file_and_empty_archive(tmp_path: Path):
    assert_refuses(write(tmp_path / "empty.txt", b""), "is empty")
    assert_refuses(write(tmp_path / "empty.xz", lzma.compress(b"")), "is empty")


def test_binary_file(tmp_path: Path):
    assert_refuses(write(tmp_path / "a.bin", b"abc\0def"), "NUL byte", "binary")
    assert_refuses(write(tmp_path / "a.txt", "abc".encode("utf-16")), "UTF-16 must be made UTF-8")


def test_folder_without_text(tmp_path: Path):
    write(tmp_path / "a.bin", b"\0")
    assert_refuses(tmp_path, "folder without text files", "1 files are binary or empty")


@pytest.mark.parametrize(("suffix", "compress"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_truncated_damaged_or_misnamed_archive(tmp_path: Path, suffix: str, compress):
    packed = compress(PROSE)
    for data in (packed[: len(packed) // 2], packed[:-4], packed[:200] + packed[260:], PROSE):
        assert_refuses(write(tmp_path / f"a{suffix}", data), "damaged or incomplete")


def test_too_much_text_is_refused_after_decompression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text, "MAX_SOURCE_BYTES", 100_000)
    bomb = write(tmp_path / "bomb.xz", lzma.compress(b"a" * 100_001))
    assert bomb.stat().st_size < 1000
    assert_refuses(bomb, "more than 100,000 bytes")
    bomb.unlink()
    write(tmp_path / "1.txt", b"a" * 60_000)
    write(tmp_path / "2.txt.gz", gzip.compress(b"a" * 40_000))
    assert len(read_source(tmp_path).documents) == 2  # exactly the limit
    write(tmp_path / "3.txt", b"a")
    assert_refuses(tmp_path, "more than 100,000 bytes")


def test_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.txt")

    def refuse(path: Path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(text, "_open", refuse)
    assert_refuses(path, "cannot be read: Permission denied")


def test_folder_that_may_be_listed_but_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "closed" / "a.txt")
    write(tmp_path / "b.txt")
    real = Path.stat

    # By a stand-in, since a superuser, as which containers run, is refused nothing.
    def refuse(self: Path, **options: bool) -> os.stat_result:
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ValueError) as caught:
        read_source(tmp_path)
    assert str(caught.value) == f"path='{path}' cannot be read: Permission denied"
