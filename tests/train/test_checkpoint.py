"""A checkpoint comes back bit for bit, or is refused in one sentence."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "run", keep=2) as store:
        yield store


def state() -> dict[str, Any]:
    """Every kind of leaf that a training state may have."""
    bits = np.random.default_rng(0).integers(0, 2**16, 4096, dtype=np.uint16)
    params = {"up": {"kernel": jnp.arange(12.0).reshape(3, 4)}, "norm": {"scale": jnp.ones(3)}}
    return {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        # All kinds of bit patterns: subnormals, infinities, NaNs with payloads, negative zeros.
        "bf16": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16),
        "f16": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float16),
        "f32": jnp.array([-0.0, jnp.nan, -jnp.inf, 1e-45, 3.4e38], jnp.float32),
        "negative_zero": jnp.full((8, 8), -0.0),
        "codes": jnp.arange(256, dtype=jnp.uint8),
        "votes": jnp.array([[1, 2**32 - 1]], jnp.uint32),
        "flag": jnp.array(True),
        "step": jnp.int32(7),
        "empty": jnp.zeros((0, 64), jnp.bfloat16),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)),
        "no_keys": jax.random.split(jax.random.key(5), 4)[:0],
        "position": np.array([2**40, -1], np.int64),
        "name.with.dots": [jnp.zeros(1), (jnp.ones(1), None)],
    }


def structs(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype), tree
    )


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves_with_path(expected), strict=True)
    for ours, (path, theirs) in pairs:
        assert isinstance(ours, np.ndarray) == isinstance(theirs, np.ndarray), path
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(ours) == jax.random.key_impl(theirs), path
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), path


@pytest.mark.parametrize("like", [lambda x: x, structs], ids=["arrays", "structs"])
def test_round_trip_is_bit_for_bit(store: CheckpointStore, like: Callable[[Any], Any]) -> None:
    expected = state()
    metadata = {"table": {"block_0/up": ["iht", 64]}, "text": "ä\n", "loss": 1.1714000000000002}
    store.save(7, expected, metadata)
    step, arrays, found = store.restore(None, like(state()))
    assert step == 7
    assert_same_bits(arrays, expected)
    assert found == store.read_metadata() == store.read_metadata(7) == metadata


def test_restored_arrays_draw_and_step_as_the_saved_ones(store: CheckpointStore) -> None:
    expected = state()
    store.save(1, expected, {})
    _, arrays, _ = store.restore(1, structs(expected))
    for path in ("key", "keys"):
        draws = [jax.vmap(jax.random.bits)(jnp.ravel(tree[path])) for tree in (arrays, expected)]
        np.testing.assert_array_equal(draws[0], draws[1])

    # Donated, hence overwritten: a restored array must own its memory.
    again = store.restore(1, structs(expected))[1]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    np.testing.assert_array_equal(step(again["codes"]), step(arrays["codes"]))


def test_no_file_is_a_pickle(store: CheckpointStore) -> None:
    store.save(1, state(), {})
    for path in store.folder.rglob("*"):
        if path.is_file():
            assert not path.read_bytes().startswith(b"\x80"), path
            assert path.suffix not in (".pkl", ".pickle", ".npy"), path


def test_only_static_leaves_and_no_elements(store: CheckpointStore) -> None:
    store.save(0, {"empty": jnp.zeros((0,))}, {"a": 1})
    assert store.restore(None, {"empty": jnp.zeros((0,))})[1]["empty"].shape == (0,)


def test_a_64_bit_array_is_not_cut_to_32(store: CheckpointStore) -> None:
    store.save(1, {"n": np.array(2**40)}, {})
    with pytest.raises(ValueError, match="like has int64 at 'n', which JAX holds only under"):
        store.restore(1, {"n": jax.ShapeDtypeStruct((), np.int64)})


def test_keeps_the_last_steps(store: CheckpointStore) -> None:
    assert store.latest_step() is None
    assert store.steps() == []
    for step in (2, 9, 10):
        store.save(step, {"x": jnp.full(2, step)}, {"step": step})
    assert store.steps() == [9, 10]
    assert store.latest_step() == 10
    assert sorted(p.name for p in store.folder.iterdir()) == ["10", "9"]
    assert int(store.restore(9, {"x": jnp.zeros(2, jnp.int32)})[1]["x"][0]) == 9
    assert store.read_metadata() == {"step": 10}


@pytest.mark.parametrize("step", [3, 5])
def test_a_step_not_beyond_the_latest_is_refused(store: CheckpointStore, step: int) -> None:
    store.save(5, {"x": jnp.zeros(2)}, {})
    with pytest.raises(ValueError, match=rf"step is {step}, but must be beyond the latest .*\(5\)"):
        store.save(step, {"x": jnp.ones(2)}, {})
    assert float(store.restore(5, {"x": jnp.zeros(2)})[1]["x"][0]) == 0.0


def test_interrupted_save_is_ignored_and_cleared(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever point a save stops at, the step before stays and the next save succeeds."""
    store.save(1, {"x": jnp.ones(2)}, {})
    for name in ("_checksum", "_files"):

        def stop(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(f"train.checkpoint.{name}", stop)
            with pytest.raises(KeyboardInterrupt):
                store.save(2, {"x": jnp.zeros(2)}, {})
        assert store.steps() == [1]
        assert len(list(store.folder.iterdir())) == 2
    assert float(store.restore(None, {"x": jnp.zeros(2)})[1]["x"][0]) == 1.0
    store.save(2, {"x": jnp.zeros(2)}, {})
    assert sorted(p.name for p in store.folder.iterdir()) == ["1", "2"]


def test_interrupted_deletion_leaves_no_half_step(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        store.save(step, {"x": jnp.ones(2)}, {})

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        store.save(3, {"x": jnp.ones(2)}, {})
    assert store.steps() == [2, 3]


WRITER = """
    import sys
    import jax.numpy as jnp
    from train.checkpoint import CheckpointStore

    store = CheckpointStore(sys.argv[1], keep=2)
    for step in range(1, 10_000):
        store.save(step, {"x": jnp.full((400, 1000), step), "n": jnp.int32(step)}, {"step": step})
        print(step, flush=True)
"""


@contextlib.contextmanager
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    """SIGKILL at several moments of a loop that does nothing but save; then each run goes on."""
    like = {"x": jax.ShapeDtypeStruct((400, 1000), jnp.int32), "n": jnp.int32(0)}
    halves = 0
    for trial, delay in enumerate((0.0, 0.003, 0.01, 0.02)):
        folder = tmp_path / str(trial)
        with writer(folder) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(3)][-1]
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert errors == ""
        seen = max([seen, *map(int, rest.split())])
        halves += any(not path.name.isdecimal() for path in folder.iterdir())
        with CheckpointStore(folder, keep=2) as store:
            step, arrays, metadata = store.restore(None, like)
            # The step reported last, or one renamed just before it could be reported.
            assert step in (seen, seen + 1)
            assert metadata == {"step": step}
            assert int(arrays["n"]) == step
            assert np.all(np.asarray(arrays["x"]) == step)
            store.save(step + 1, arrays, {})
            assert all(path.name.isdecimal() for path in folder.iterdir())
    assert halves, "no kill came in the middle of a save: this test showed nothing"


def _files_of(store: CheckpointStore) -> list[Path]:
    return sorted(p for p in (store.folder / "2").rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", ["cut short", "one bit", "missing"])
def test_damaged_files_are_refused(store: CheckpointStore, damage: str) -> None:
    """Any file of the checkpoint, in turn."""
    arrays = {"x": jax.random.normal(jax.random.key(0), (64, 64)), "n": jnp.int32(2)}
    store.save(1, arrays, {})
    store.save(2, arrays, {"a": 1})
    files = _files_of(store)
    assert len(files) > 4
    for path in files:
        original = path.read_bytes()
        if damage == "missing":
            path.unlink()
        elif damage == "cut short":
            path.write_bytes(original[: len(original) // 2] if original else b"x")
        else:
            middle = len(original) // 2
            flipped = bytes([original[middle] ^ 4]) if original else b"x"
            path.write_bytes(original[:middle] + flipped + original[middle + 1 :])
        with pytest.raises(ValueError, match=r"/2' is damaged: .*earlier step \(1\)") as caught:
            store.restore(None, arrays)
        assert "\n" not in str(caught.value)
        if path.name == "metadata.json":
            with pytest.raises(ValueError, match="is damaged"):
                store.read_metadata()
        path.write_bytes(original)
    assert store.restore(None, arrays)[0] == 2
    assert store.restore(1, arrays)[0] == 1


def test_another_model_is_refused(store: CheckpointStore) -> None:
    saved = {"block_0": {"up": jnp.zeros((4, 8))}, "block_1": {"up": jnp.zeros((4, 8))}}
    store.save(1, saved, {})
    other = {"up": jnp.zeros((4, 8))}
    cases: list[tuple[Any, str]] = [
        (
            {"block_0": other, "block_1": {"up": jnp.zeros((8, 8))}},
            r"at 'block_1/up' it has float32\(4, 8\), but this model has float32\(8, 8\)",
        ),
        (
            {"block_0": other, "block_1": {"up": jnp.zeros((4, 8), jnp.bfloat16)}},
            r"at 'block_1/up' it has float32\(4, 8\), but this model has bfloat16\(4, 8\)",
        ),
        (
            {"block_0": other},
            r"at 'block_1/up' it has float32\(4, 8\), but this model has nothing",
        ),
        (
            {"block_0": other, "block_1": other, "block_2": other},
            r"at 'block_2/up' it has nothing, but this model has float32\(4, 8\)",
        ),
    ]
    for like, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            store.restore(None, like)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match=message):
            store.restore(None, structs(like))


def test_another_kind_of_key_is_refused(store: CheckpointStore) -> None:
    store.save(1, {"key": jax.random.key(0, impl="rbg")}, {})
    with pytest.raises(ValueError, match=r"'key' it has key<rbg>\(\), but this .* key<urbg>\(\)"):
        store.restore(1, {"key": jax.random.key(0, impl="unsafe_rbg")})
    with pytest.raises(ValueError, match=r"'key' it has key<rbg>\(\), but this .* uint32\(4,\)"):
        store.restore(1, {"key": jax.random.key_data(jax.random.key(0, impl="rbg"))})


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    calls: list[Callable[[CheckpointStore], Any]] = [
        lambda store: store.read_metadata(),
        lambda store: store.restore(None, {}),
    ]
    for call in calls:
        with CheckpointStore(tmp_path / "none") as store:
            with pytest.raises(ValueError, match=r"folder is '.*none', which is no folder"):
                call(store)
            assert not store.folder.exists()
        with (
            CheckpointStore(tmp_path) as store,
            pytest.raises(ValueError, match="which holds no complete checkpoint"),
        ):
            call(store)
    with CheckpointStore(tmp_path) as store:
        store.save(4, {"x": jnp.zeros(1)}, {})
        with pytest.raises(ValueError, match=r"step is 3, but '.*' holds 4; give one of those"):
            store.restore(3, {"x": jnp.zeros(1)})


def test_bad_arguments_are_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="keep is 0, but must be at least 1"):
        CheckpointStore(store.folder, keep=0)
    with pytest.raises(TypeError, match="arrays has a int at 'a/0', but must hold arrays only"):
        store.save(1, {"a": [3]}, {})
    with pytest.raises(TypeError, match=r"metadata does not go into JSON .*ndarray"):
        store.save(1, {}, {"x": np.zeros(2)})
    with pytest.raises(ValueError, match="two leaves of the same path"):
        store.save(1, {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}, {})
    for leaf in (np.array([{}]), np.array(["a"]), np.zeros(2, [("a", "f4")]), np.array(1, ">i4")):
        with pytest.raises(TypeError, match=r"arrays has dtype .* at 'x', but must hold numbers"):
            store.save(1, {"x": leaf}, {})
    assert not store.folder.exists()


def test_too_little_room_is_named_before_anything_is_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for all but the last byte; a disk that reports no size at all is tried."""
    arrays = {"x": jnp.zeros(250_000), "empty": jnp.zeros(0), "key": jax.random.key(0)}
    usage = type(shutil.disk_usage(store.folder.parent))
    store.save(1, arrays, {})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, 1_000_007))
    with pytest.raises(ValueError, match=r"has 1\.0 MB free, but step 2 takes 1\.0 MB; make room"):
        store.save(2, arrays, {})
    assert [p.name for p in store.folder.iterdir()] == ["1"]
    for step, (total, free) in enumerate(((10**9, 1_000_008), (0, 0)), start=2):
        monkeypatch.setattr("shutil.disk_usage", lambda _, a=(total, 0, free): usage(*a))
        store.save(step, arrays, {})
    assert store.latest_step() == 3


FULL_DISK = """
    import resource, signal, sys
    import jax, jax.numpy as jnp
    from train.checkpoint import CheckpointStore

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with CheckpointStore(sys.argv[1]) as store:
        store.save(1, {"x": jnp.ones(2)}, {})
        for size, metadata in (20_000, {}), (0, {}):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                store.save(2, {"x": jax.random.normal(jax.random.key(0), (100, 1000))}, metadata)
            except ValueError as error:
                print(error)
            assert store.steps() == [1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert store.restore(None, {"x": jnp.zeros(2)})[0] == 1
        store.save(2, {"x": jnp.ones(2)}, {})
        assert store.steps() == [1, 2]
"""


def test_a_full_disk_is_named_and_costs_no_earlier_step(tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: in the arrays, then in the metadata."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"checkpoint folder is '{tmp_path}', where step 2 could not be ")
        assert "File too large" in line
        assert line.endswith("; make room, or give another folder.")


def test_prepare_finds_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with CheckpointStore(folder) as store, pytest.raises(ValueError, match="cannot be written"):
            store.prepare()
    with CheckpointStore(tmp_path / "new" / "run") as store:
        store.prepare()
        assert list(store.folder.iterdir()) == []


def test_a_leaf_without_sharding_comes_back_uncommitted(store: CheckpointStore) -> None:
    """Else it could not meet arrays spread over a mesh in one computation."""
    device = jax.devices()[0]
    arrays = {"free": jnp.ones(2), "fixed": jax.device_put(jnp.ones(2), device)}
    store.save(1, arrays, {})
    _, restored, _ = store.restore(1, arrays)
    assert not restored["free"].committed
    assert restored["fixed"].committed
    assert not store.restore(1, structs(arrays))[1]["fixed"].committed


SHARDED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from train.checkpoint import CheckpointStore

    mesh = jax.make_mesh((4,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jnp.arange(32.0).reshape(8, 4)
    key = jax.random.key(9)
    arrays = {"x": jax.device_put(x, split), "key": jax.device_put(key, everywhere)}
    with CheckpointStore(sys.argv[1]) as store:
        store.save(1, arrays, {})
        for like in arrays, jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), arrays
        ):
            found = store.restore(1, like)[1]
            assert found["x"].sharding == split, found["x"].sharding
            assert found["key"].sharding.is_equivalent_to(everywhere, 0), found["key"].sharding
            np.testing.assert_array_equal(found["x"], x)
            assert found["key"] == key
"""


def test_saved_from_four_devices_restored_on_four_and_on_one(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
    }
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""
    like = {
        "x": jax.device_put(jnp.zeros((8, 4)), jax.devices()[0]),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
    }
    with CheckpointStore(tmp_path) as store:
        arrays = store.restore(None, like)[1]
    np.testing.assert_array_equal(arrays["x"], np.arange(32.0).reshape(8, 4))
    assert arrays["x"].devices() == {jax.devices()[0]}
    assert arrays["key"] == jax.random.key(9)


def test_files_are_readable(store: CheckpointStore) -> None:
    store.save(3, {"x": jnp.zeros((2, 3))}, {"loss": 1.5})
    contents = json.loads((store.folder / "3" / "metadata.json").read_text())
    assert contents["metadata"] == {"loss": 1.5}
    assert contents["arrays"] == {"x": {"shape": [2, 3], "dtype": "float32"}}
