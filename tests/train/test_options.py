"""Options are checked before any work, and name what a continued run must share."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import adahop_jax as adahop
from train.options import TrainOptions, read_table

FREE = {"out", "recipes", "evaluate_every", "checkpoint_every", "keep_checkpoints"}


def options(**changes: Any) -> TrainOptions:
    return dataclasses.replace(TrainOptions(), **changes)


def test_the_defaults_pass() -> None:
    TrainOptions().check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, r"^accumulate is 0, .*at least 1"),
        ({"evaluate_every": 0}, r"^evaluate_every is 0, .*at least 1"),
        ({"validation_batches": 0}, r"^validation_batches is 0, .*at least 1"),
        ({"checkpoint_every": -1}, r"^checkpoint_every is -1, .*at least 1"),
        ({"keep_checkpoints": 0}, r"^keep_checkpoints is 0, .*at least 1"),
        ({"recipes": ()}, r"^recipes is empty; name one of bf16, "),
        ({"recipes": ("bf16", "mxfp4", "bf16")}, r"^recipes is bf16 mxfp4 bf16, .*twice"),
        ({"recipes": ("bf16", "adahop-lv3")}, r"^recipe is 'adahop-lv3', .*adahop-lv2"),
        ({"model": "large"}, r"^model is 'large', .*tiny"),
        ({"attention": "flash"}, r"^attention is 'flash', .*auto, xla, cudnn"),
        ({"attention": "cudnn"}, r"^attention is 'cudnn', but cuDNN needs an NVIDIA GPU"),
        ({"k": -1}, r"^k is -1, .*at least 0"),
        ({"calibration_steps": 0}, r"^calibration_steps is 0, .*at least 1"),
        ({"steps": 0}, r"^steps is 0, "),
        ({"steps": 10, "warmup_steps": 10}, r"^warmup_steps is 10, .*below steps \(10\)"),
        ({"learning_rate": 0.0}, r"^learning_rate is 0.0, "),
        ({"learning_rate": float("nan")}, r"^learning_rate is nan, "),
        ({"weight_decay": -0.1}, r"^weight_decay is -0.1, "),
        ({"clip_norm": 0.0}, r"^clip_norm is 0.0, "),
        ({"batch_size": 0}, r"^batch_size=0 "),
        ({"seq_len": 0}, r"^seq_len=0 "),
        ({"seed": -1}, r"^seed is -1, "),
        ({"data_seed": -1}, r"^seed=-1 "),
        ({"max_bytes": 0}, r"^max_bytes=0 "),
        ({"tokenizer": "bpe", "vocab_size": 256}, r"^vocab_size=256 "),
        ({"table": Path("/nowhere/table.json")}, r"^table is '/nowhere/table.json', "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        options(**changes).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "k"),
    [("tiny", 2), ("small", 4), ("85m", 24), ("llama-3.2-1b", 64), ("llama-3.1-8b", 64)],
)
def test_k_follows_the_width_of_the_model(model: str, k: int) -> None:
    assert options(model=model).recipe("adahop-lv2").k == k
    assert options(model=model, k=7).recipe("adahop-lv2").k == 7
    assert options(model=model, k=0).recipe("adahop-lv2").k == 0


def test_parts_receive_their_options() -> None:
    given = options(
        data="text.txt",
        model="tiny",
        steps=11,
        batch_size=3,
        seq_len=5,
        learning_rate=0.25,
        warmup_steps=4,
        weight_decay=0.5,
        clip_norm=2.0,
        data_seed=9,
        tokenizer="bpe",
        vocab_size=300,
        max_bytes=999,
        calibration_steps=6,
        remat=True,
    )
    data = given.data_config()
    assert (data.path, data.seq_len, data.batch_size, data.seed) == ("text.txt", 5, 3, 9)
    assert (data.tokenizer, data.vocab_size, data.max_bytes) == ("bpe", 300, 999)
    optimizer = given.optimizer_config()
    assert (optimizer.learning_rate, optimizer.steps, optimizer.warmup_steps) == (0.25, 11, 4)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.5, 2.0)
    model = given.model_config(vocab_size=300)
    assert (model.vocab_size, model.dim, model.remat) == (300, 64, True)
    recipe = given.recipe("adahop-lv1")
    assert (recipe.level, recipe.calibration_steps) == (adahop.Level.LV1, 6)


def test_binding_is_all_but_the_free_options() -> None:
    fields = {field.name for field in dataclasses.fields(TrainOptions)}
    assert set(TrainOptions().binding()) == fields - FREE


def test_binding_survives_json() -> None:
    given = options(
        table=Path("some/table.json"), learning_rate=0.1 + 0.2, clip_norm=float("inf"), k=3
    )
    binding = given.binding()
    assert binding["table"] == "some/table.json"
    assert json.loads(json.dumps(binding)) == binding
    assert json.loads(json.dumps(TrainOptions().binding())) == TrainOptions().binding()


CHANGES: dict[str, Any] = {
    "out": Path("elsewhere"),
    "recipes": ("mxfp4",),
    "data": "text.txt",
    "model": "tiny",
    "tokenizer": "bpe",
    "max_bytes": 5,
    "k": 5,
    "table": Path("t.json"),
    "remat": True,
    "attention": "xla",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainOptions)])
def test_exactly_the_free_options_may_change(name: str) -> None:
    change = CHANGES.get(name) or getattr(TrainOptions(), name) + 1
    changed = options(**{name: change}).binding()
    differing = {key for key, value in TrainOptions().binding().items() if changed[key] != value}
    assert differing == ({name} - FREE)


TABLE = adahop.StrategyTable(
    {"block_0/mlp/up": adahop.MatmulStrategies("iht", "iht_oe_left", "bf16", k=3)},
    default=adahop.MatmulStrategies.uniform("plain"),
)


def test_a_table_is_read_from_a_file_or_a_run(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json())
    assert read_table(path) == TABLE
    assert read_table(tmp_path) == TABLE
    assert options(table=path).load_table() == TABLE
    assert options().load_table() is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "cannot be read"),
        (b"not json", "not JSON"),
        (b"{}", "no strategy table"),
        (TABLE.to_json().replace('"iht"', '"itt"').encode(), "'itt'"),
    ],
    ids=["missing", "binary", "text", "object", "strategy"],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_bad_table_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes | None, reason: str, as_folder: bool
) -> None:
    file = tmp_path / "table.json"
    if content is not None:
        file.write_bytes(content)
    path = tmp_path if as_folder else file
    with pytest.raises(ValueError, match=reason) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"table is '{path}', ")
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_after_its_calibration() -> None:
    with pytest.raises(ValueError, match=r"^calibration_steps is 25, .*below steps \(25\)"):
        options(recipes=("adahop-lv2",), steps=25, calibration_steps=25).check_calibration()
    options(recipes=("adahop-lv2",), steps=26, calibration_steps=25).check_calibration()
    options(recipes=("bf16",), steps=25, calibration_steps=25).check_calibration()
