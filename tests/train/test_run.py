"""A run that was stopped at any moment ends as if it never was, or says why it cannot go on."""

import dataclasses
import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import adahop_jax as adahop
import train.run
from train.checkpoint import CheckpointStore
from train.data import Dataset, load_data
from train.display import Display
from train.metrics import read_metrics
from train.options import TrainOptions
from train.run import RunResult, RunStoppedError, run_recipe
from train.step import StepMetrics, TrainState, build_model, init_state

ROOT = Path(__file__).parents[2]
LV2 = "adahop-lv2"
STEPS, CALIBRATION, SAVE_EVERY, VALIDATE_EVERY = 12, 4, 2, 6

_SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of compiled programs, which the processes started here share with this one."""
    folder = tmp_path_factory.mktemp("compiled")
    values = {"jax_compilation_cache_dir": str(folder)}
    values |= {name.lower(): int(value) for name, value in _SETTINGS.items()}
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def shared_programs(compiled: Path) -> Iterator[None]:
    """Runs of equal options share their jitted steps: tracing is what these tests would wait for.

    A step is pure, so that a run sees no difference.
    """
    steps: dict[Any, Any] = {}

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        def cached(model: Any, *rest: Any) -> Any:
            key = (make, model.config, *rest)
            if key not in steps:
                steps[key] = make(model, *rest)
            return steps[key]

        return cached

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.run, "make_optimizer", functools.cache(train.run.make_optimizer))
        for name in ("make_train_step", "make_eval_step"):
            patch.setattr(train.run, name, shared(getattr(train.run, name)))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["row", "column", "scale", "block", "outlier", "tensor", "gradient", "\n"]
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(words, 120)))
    return folder


@pytest.fixture(scope="module")
def options(corpus: Path) -> TrainOptions:
    return TrainOptions(
        recipes=(LV2,),
        data=str(corpus),
        model="tiny",
        steps=STEPS,
        batch_size=2,
        seq_len=32,
        warmup_steps=2,
        max_bytes=25_000,
        calibration_steps=CALIBRATION,
        evaluate_every=VALIDATE_EVERY,
        validation_batches=2,
        checkpoint_every=SAVE_EVERY,
    )


@pytest.fixture(scope="module")
def dataset(options: TrainOptions) -> Dataset:
    return load_data(options.data_config())


def silent() -> Display:
    return Display(Console(file=io.StringIO()))


@dataclasses.dataclass(frozen=True)
class Finished:
    """An uninterrupted run."""

    folder: Path
    result: RunResult
    shown: str


@pytest.fixture(scope="module")
def reference(
    options: TrainOptions, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    out = tmp_path_factory.mktemp("reference")
    file = io.StringIO()
    display = Display(Console(file=file, width=200, highlight=False))
    result = run_recipe(dataclasses.replace(options, out=out), LV2, dataset, display)
    return Finished(out / LV2, result, file.getvalue())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files of a folder, and when they were written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def command(options: TrainOptions, out: Path) -> list[str]:
    arguments = ["train", "--recipes", LV2, "--out", str(out)]
    for name in ("data", "model", "steps", "batch_size", "seq_len", "warmup_steps", "max_bytes"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    for name in ("calibration_steps", "evaluate_every", "validation_batches", "checkpoint_every"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return arguments


def in_process(
    options: TrainOptions, out: Path, compiled: Path, signal_name: str, moment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command in another process, which gets a signal just after it logs `moment`."""
    code = f"""
        import os, signal, sys
        from train.metrics import MetricsLog
        write = MetricsLog.write
        def write_and_signal(self, step, **values):
            write(self, step, **values)
            if {moment}:
                if {signal_name == "SIGKILL"}:
                    self._file.write('{{"step": 99, "lo')
                    self._file.flush()
                os.kill(os.getpid(), signal.{signal_name})
        MetricsLog.write = write_and_signal
        from train.cli import main
        sys.exit(main({command(options, out)!r}))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | _SETTINGS | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def arrays(options: TrainOptions, dataset: Dataset, folder: Path) -> tuple[int, Any, Any]:
    """Step, arrays and metadata of the last checkpoint."""
    recipe = options.recipe(LV2)
    model = build_model(options.model_config(dataset.vocab_size), recipe)
    optimizer, _ = train.run.make_optimizer(options.optimizer_config())
    like = jax.eval_shape(lambda: init_state(model, optimizer, recipe, options.seed))
    with CheckpointStore(folder / "checkpoints") as store:
        return store.restore(None, train.run._arrays(like))


def assert_equal_to_reference(
    options: TrainOptions, dataset: Dataset, folder: Path, result: RunResult, reference: Finished
) -> None:
    assert dataclasses.replace(result, seconds_per_step=None) == dataclasses.replace(
        reference.result, seconds_per_step=None
    )
    for name in ("metrics.jsonl", "table.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (reference.folder / name).read_bytes(), name
    step, ours, metadata = arrays(options, dataset, folder)
    _, theirs, metadata_wanted = arrays(options, dataset, reference.folder)
    assert step == STEPS
    assert metadata == metadata_wanted
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    ours["key"], theirs["key"] = map(jax.random.key_data, (ours["key"], theirs["key"]))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def test_a_run_leaves_a_complete_and_ordered_log(
    reference: Finished, options: TrainOptions
) -> None:
    records = read_metrics(reference.folder / "metrics.jsonl")
    kinds = [
        (r["step"], next(k for k in ("loss", "event", "validation_loss") if k in r))
        for r in records
    ]
    expected: list[tuple[int, str]] = []
    for step in range(1, STEPS + 1):
        expected.append((step, "loss"))
        expected += [(step, "event")] * (step == CALIBRATION)
        expected += [(step, "validation_loss")] * (step % VALIDATE_EVERY == 0)
    assert kinds == expected
    _, schedule = train.run.make_optimizer(options.optimizer_config())
    for record in records:
        if "loss" in record:
            assert set(record) == {"step", "loss", "gradient_norm", "learning_rate", "tokens"}
            assert record["tokens"] == record["step"] * 2 * 32
            # Of the update that this step made; the schedule counts from 0.
            np.testing.assert_allclose(record["learning_rate"], schedule(record["step"] - 1))
            assert math.isfinite(record["loss"]) and record["gradient_norm"] > 0


def test_a_run_reports_what_it_logged(
    reference: Finished, options: TrainOptions, dataset: Dataset
) -> None:
    result = reference.result
    records = read_metrics(reference.folder / "metrics.jsonl")
    losses = [r["loss"] for r in records if "loss" in r]
    validations = [r for r in records if "validation_loss" in r]
    assert result.recipe == LV2
    assert result.train_loss == np.mean(losses[-2:])  # a tenth of 12, rounded up
    assert losses[-1] < losses[0]
    assert result.validation_loss == validations[-1]["validation_loss"]
    bits = result.validation_loss / math.log(2) / dataset.bytes_per_token
    assert result.bits_per_byte == validations[-1]["validation_bits_per_byte"] == bits
    assert result.seconds_per_step is not None and result.seconds_per_step > 0
    assert len(result.table) == 14
    table = (reference.folder / "table.json").read_text()
    assert adahop.StrategyTable.from_json(table) == result.table
    with CheckpointStore(reference.folder / "checkpoints") as store:
        assert store.steps() == [STEPS - SAVE_EVERY, STEPS]
    shown = reference.shown.splitlines()
    assert [line.split(":")[1] for line in shown] == [" step 4", " step 6", " step 12"]


def test_validation_is_in_the_precision_of_training(
    reference: Finished, options: TrainOptions, dataset: Dataset
) -> None:
    _, leaves, _ = arrays(options, dataset, reference.folder)
    recipe = options.recipe(LV2)
    model = build_model(options.model_config(dataset.vocab_size), recipe)
    batches = dataset.validation_batches(options.validation_batches)
    losses = {}
    for name, table in (
        ("own", reference.result.table),
        ("bf16", adahop.StrategyTable.uniform("bf16")),
    ):
        evaluate = train.run.make_eval_step(model, recipe)
        state = TrainState(**leaves, table=table)
        losses[name] = np.mean([float(evaluate(state, batch)) for batch in batches])
    np.testing.assert_allclose(reference.result.validation_loss, losses["own"], rtol=1e-7)
    assert abs(reference.result.validation_loss - losses["bf16"]) > 1e-5


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ("step == 3", 2),
        ("values.get('event') == 'table'", 2),
        ("step == 5", 4),
        ("step == 9", 8),
    ],
    ids=["calibrating", "table just set", "table just saved", "later"],
)
def test_a_killed_run_ends_as_if_it_never_was(
    tmp_path: Path,
    compiled: Path,
    options: TrainOptions,
    dataset: Dataset,
    reference: Finished,
    moment: str,
    last: int,
) -> None:
    stopped = in_process(options, tmp_path, compiled, "SIGKILL", moment)
    assert stopped.returncode == -signal.SIGKILL, stopped.stderr
    with CheckpointStore(tmp_path / LV2 / "checkpoints") as store:
        assert store.latest_step() == last
    result = run_recipe(dataclasses.replace(options, out=tmp_path), LV2, dataset, silent())
    assert_equal_to_reference(options, dataset, tmp_path / LV2, result, reference)


def test_an_interrupted_run_saves_and_says_so(
    tmp_path: Path,
    compiled: Path,
    options: TrainOptions,
    dataset: Dataset,
    reference: Finished,
) -> None:
    stopped = in_process(options, tmp_path, compiled, "SIGINT", "step == 7 and 'loss' in values")
    assert stopped.returncode == 1
    store = tmp_path / LV2 / "checkpoints"
    assert stopped.stderr == (
        f"adahop: {LV2}: interrupted at step 7; the last checkpoint, step 7, is in '{store}'.\n"
    )
    again = subprocess.run(
        [sys.executable, "-m", "train", *command(options, tmp_path)],
        cwd=ROOT,
        env=os.environ | _SETTINGS | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{LV2}: continuing at step 7\n" in again.stdout
    # Started once more, it has nothing left to do and reports the same.
    result = run_recipe(dataclasses.replace(options, out=tmp_path), LV2, dataset, silent())
    assert_equal_to_reference(options, dataset, tmp_path / LV2, result, reference)


def test_a_finished_run_trains_no_more(
    options: TrainOptions,
    dataset: Dataset,
    reference: Finished,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a step was taken")

    monkeypatch.setattr(train.run, "make_train_step", lambda *_: refuse)
    monkeypatch.setattr(train.run, "make_eval_step", lambda *_: refuse)
    before = contents(reference.folder / "checkpoints")
    log = (reference.folder / "metrics.jsonl").read_bytes()
    out = reference.folder.parent
    result = run_recipe(dataclasses.replace(options, out=out), LV2, dataset, silent())
    assert result == dataclasses.replace(reference.result, seconds_per_step=None)
    assert contents(reference.folder / "checkpoints") == before
    assert (reference.folder / "metrics.jsonl").read_bytes() == log


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-3),
        ("batch_size", 4),
        ("steps", 24),
        ("seed", 1),
        ("k", 3),
        ("remat", True),
        ("calibration_steps", 5),
        ("table", Path("some.json")),
    ],
)
def test_another_option_is_refused(
    options: TrainOptions, dataset: Dataset, reference: Finished, name: str, value: Any
) -> None:
    before = contents(reference.folder)
    changed = dataclasses.replace(options, out=reference.folder.parent, **{name: value})
    with pytest.raises(ValueError) as caught:
        run_recipe(changed, LV2, dataset, silent())
    shown, started = (str(v) if isinstance(v, Path) else v for v in (value, getattr(options, name)))
    assert str(caught.value) == (
        f"{name} is {shown!r}, but the run in '{reference.folder}' was started with "
        f"{started!r}; give that, or another out."
    )
    assert contents(reference.folder) == before


def test_changed_data_is_refused(
    tmp_path: Path, options: TrainOptions, corpus: Path, reference: Finished
) -> None:
    before = contents(reference.folder)
    for file in corpus.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("row", "raw"))
    other = load_data(dataclasses.replace(options.data_config(), path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"^data is .*was started with"):
        run_recipe(dataclasses.replace(options, out=reference.folder.parent), LV2, other, silent())
    assert contents(reference.folder) == before


class Fake:
    """A training step that costs nothing: its loss is 1 / step, and the first pattern gets votes.

    Attributes:
      edit: changes what a step returns, by the number of the step.
    """

    def __init__(self) -> None:
        self.edit: dict[int, Callable[[TrainState, StepMetrics], Any]] = {}
        self.evaluated: list[tuple[int, int, bool]] = []

    def step(self, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, StepMetrics]:
        step = int(state.step) + 1
        votes = jax.tree.map(lambda leaf: leaf.at[:, 0].add(1), state.votes)
        state = dataclasses.replace(state, step=jnp.int32(step), votes=votes)
        metrics = StepMetrics(jnp.float32(1 / step), jnp.float32(1))
        return self.edit.get(step, lambda *out: out)(state, metrics)

    def evaluate(self, state: TrainState, tokens: np.ndarray) -> float:
        self.evaluated.append((int(state.step), len(tokens), state.table is not None))
        return float(len(tokens))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(train.run, "make_train_step", lambda *_: fake.step)
    monkeypatch.setattr(train.run, "make_eval_step", lambda *_: fake.evaluate)
    return fake


def poison(state: TrainState) -> TrainState:
    return dataclasses.replace(state, params=jax.tree.map(lambda p: p * jnp.nan, state.params))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake, bad: float
) -> None:
    """At a step that would save: the last good checkpoint has to stay the latest."""
    fake.edit[6] = lambda state, metrics: (
        poison(state),
        StepMetrics(jnp.float32(bad), jnp.float32(bad)),
    )
    folder = tmp_path / LV2
    with pytest.raises(RunStoppedError) as caught:
        run_recipe(dataclasses.replace(options, out=tmp_path), LV2, dataset, silent())
    assert str(caught.value) == (
        f"{LV2}: the loss is {bad} at step 6; the last checkpoint, step 4, is in "
        f"'{folder / 'checkpoints'}'."
    )
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert last["step"] == 6 and repr(last["loss"]) == repr(bad)
    with CheckpointStore(folder / "checkpoints") as store:
        assert store.steps() == [2, 4]


def test_a_loss_that_is_not_finite_before_any_checkpoint(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real step, on a model that holds a NaN."""
    real = train.run.init_state
    monkeypatch.setattr(train.run, "init_state", lambda *args: poison(real(*args)))
    with pytest.raises(RunStoppedError, match=r"the loss is nan at step 1; no checkpoint was kept"):
        run_recipe(dataclasses.replace(options, out=tmp_path), LV2, dataset, silent())
    (record,) = read_metrics(tmp_path / LV2 / "metrics.jsonl")
    assert math.isnan(record["loss"])
    with CheckpointStore(tmp_path / LV2 / "checkpoints") as store:
        assert store.steps() == []


def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    """The loss is of the parameters before the update; the update already poisoned them."""
    fake.edit[4] = lambda state, metrics: (
        poison(state),
        StepMetrics(metrics.loss, jnp.float32(jnp.nan)),
    )
    with pytest.raises(RunStoppedError, match="at step 4; the last checkpoint, step 2, "):
        run_recipe(dataclasses.replace(options, out=tmp_path), LV2, dataset, silent())
    with CheckpointStore(tmp_path / LV2 / "checkpoints") as store:
        assert store.steps() == [2]


def test_validation_weighs_a_short_last_batch_by_its_rows(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    windows = dataset.summary["validation"].windows
    size = next(n for n in range(2, windows) if 0 < windows % n < n - 1)
    given = dataclasses.replace(
        options, out=tmp_path, batch_size=size, validation_batches=windows, steps=1, warmup_steps=0
    )
    odd = load_data(given.data_config())
    rows = [len(batch) for batch in odd.validation_batches()]
    assert rows[-1] == windows % size and len(rows) > 1
    result = run_recipe(given, "bf16", odd, silent())
    np.testing.assert_allclose(result.validation_loss, sum(r * r for r in rows) / sum(rows))


def test_a_run_shorter_than_calibration_ends_with_a_table(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    given = dataclasses.replace(options, out=tmp_path, calibration_steps=100)
    result = run_recipe(given, LV2, dataset, silent())
    assert len(result.table) == 14
    # The last validation is in the precision of the table that the run reports.
    assert fake.evaluated == [(6, 2, False)] * 2 + [(12, 2, True)] * 2


def test_each_recipe_has_a_folder_of_its_own(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    given = dataclasses.replace(options, out=tmp_path)
    run_recipe(given, "adahop-lv1", dataset, silent())
    before = contents(tmp_path / "adahop-lv1")
    run_recipe(given, "bf16", dataset, silent())
    assert contents(tmp_path / "adahop-lv1") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adahop-lv1", "bf16"]
    table = adahop.StrategyTable.from_json((tmp_path / "bf16" / "table.json").read_text())
    assert table == adahop.StrategyTable.uniform("bf16")


def test_free_options_may_change(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    def interrupt(*out: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return out

    fake.edit[5] = interrupt
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunStoppedError, match="interrupted at step 5"):
        run_recipe(dataclasses.replace(options, out=tmp_path / "a"), LV2, dataset, silent())
    assert signal.getsignal(signal.SIGINT) is before
    (tmp_path / "a").rename(tmp_path / "b")
    changed = dataclasses.replace(
        options,
        out=tmp_path / "b",
        recipes=("bf16", LV2),
        evaluate_every=5,
        checkpoint_every=3,
        keep_checkpoints=1,
    )
    run_recipe(changed, LV2, dataset, silent())
    steps = [r["step"] for r in read_metrics(tmp_path / "b" / LV2 / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 10, 11, 12, 12]
    with CheckpointStore(tmp_path / "b" / LV2 / "checkpoints") as store:
        assert store.steps() == [12]


def test_a_finished_run_without_its_log_is_refused_in_one_sentence(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    given = dataclasses.replace(options, out=tmp_path)
    run_recipe(given, "bf16", dataset, silent())
    (tmp_path / "bf16" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        run_recipe(given, "bf16", dataset, silent())


def test_a_table_that_names_an_unknown_layer_is_refused_before_step_1(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    file = tmp_path / "table.json"
    entry = adahop.MatmulStrategies.uniform("iht")
    file.write_text(adahop.StrategyTable({"block_2/mlp/up": entry}, default=entry).to_json())
    given = dataclasses.replace(options, out=tmp_path / "out", table=file)
    with pytest.raises(ValueError, match="block_2/mlp/up"):
        run_recipe(given, LV2, dataset, silent())
    assert read_metrics(tmp_path / "out" / LV2 / "metrics.jsonl") == []


def test_a_given_table_replaces_calibration(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, fake: Fake
) -> None:
    file = tmp_path / "table.json"
    table = adahop.StrategyTable.uniform("iht")
    file.write_text(table.to_json())
    given = dataclasses.replace(options, out=tmp_path / "out", table=file)
    assert run_recipe(given, LV2, dataset, silent()).table == table
    records = read_metrics(tmp_path / "out" / LV2 / "metrics.jsonl")
    assert not any("event" in record for record in records)
    assert all(with_table for *_, with_table in fake.evaluated)


@pytest.mark.parametrize("place", ["file", "unwritable"])
def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, options: TrainOptions, dataset: Dataset, place: str
) -> None:
    # Nobody can make a folder in /proc, not even root, whom permissions do not stop.
    out = tmp_path / "out" if place == "file" else Path("/proc/out")
    if place == "file":
        out.write_text("")
    with pytest.raises(ValueError, match="cannot be written") as caught:
        run_recipe(dataclasses.replace(options, out=out), LV2, dataset, silent())
    assert str(out) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_goes_through_json(reference: Finished, options: TrainOptions) -> None:
    with CheckpointStore(reference.folder / "checkpoints") as store:
        metadata = store.read_metadata()
    assert metadata["recipe"] == LV2
    assert metadata["options"] == json.loads(json.dumps(options.binding()))
    assert metadata["table"] == reference.result.table.to_json()
