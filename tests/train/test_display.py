"""The tables say the right numbers, and a pipe gets whole lines."""

import io

import pytest
from rich.console import Console

from adahop_jax import MatmulStrategies, Pattern, StrategyTable
from train.display import Display
from train.run import RunResult

TABLE = StrategyTable({"block_0/mlp/up": MatmulStrategies("iht", "iht_oe_left", "bf16", k=3)})


def make(width: int = 100, terminal: bool = False) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        highlight=False,
        force_terminal=terminal,
        color_system=None,
        # Without them rich takes its size and kind of terminal from the machine's environment.
        _environ={},
    )
    return Display(console), file


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip(" ─")]


def result(recipe: str, validation_loss: float, seconds: float | None) -> RunResult:
    return RunResult(recipe, 2.00004, validation_loss, 2.5, seconds, TABLE)


def test_results_have_gaps_to_the_first() -> None:
    display, file = make()
    display.results(
        [
            result("bf16", 2.1, 0.0124),
            result("mxfp4", 2.15006, 1.5),
            result("adahop-lv2", 2.09, None),
            result("mxfp4-iht", float("nan"), None),
        ]
    )
    assert cells(file.getvalue())[1:] == [
        ["bf16", "2.0000", "2.1000", "2.5000", "12"],
        ["mxfp4", "2.0000", "2.1501", "+0.0501", "2.5000", "1500"],
        ["adahop-lv2", "2.0000", "2.0900", "-0.0100", "2.5000"],
        ["mxfp4-iht", "2.0000", "nan", "+nan", "2.5000"],
    ]
    for title in ("recipe", "train loss", "validation loss", "gap", "bits/byte", "ms/step"):
        assert title in file.getvalue()


def test_strategies_with_patterns() -> None:
    display, file = make()
    patterns = {"block_0/mlp/up": {"x": Pattern.ROW, "w": Pattern.NONE, "g": Pattern.COL}}
    display.strategies(TABLE, patterns)
    assert cells(file.getvalue()) == [
        ["layer", "x", "W", "g", "y", "gx", "gw"],
        ["block_0/mlp/up", "row", "none", "col", "iht", "iht_oe_left", "(k=3)", "bf16"],
    ]


def test_strategies_without_patterns_have_no_columns_for_them() -> None:
    display, file = make()
    display.strategies(TABLE)
    assert cells(file.getvalue()) == [
        ["layer", "y", "gx", "gw"],
        ["block_0/mlp/up", "iht", "iht_oe_left", "(k=3)", "bf16"],
    ]


def test_the_default_has_a_row() -> None:
    display, file = make()
    display.strategies(StrategyTable(TABLE, default=MatmulStrategies.uniform("plain")))
    assert cells(file.getvalue())[1:] == [
        ["block_0/mlp/up", "iht", "iht_oe_left", "(k=3)", "bf16"],
        ["(all", "others)", "plain", "plain", "plain"],
    ]
    display, file = make()
    display.strategies(StrategyTable.uniform("iht"))
    assert cells(file.getvalue())[1:] == [["(all", "layers)", "iht", "iht", "iht"]]


def test_strategies_stay_in_their_columns_where_patterns_are_unknown() -> None:
    display, file = make()
    patterns = {"block_0/mlp/up": {"x": Pattern.ROW, "w": Pattern.NONE, "g": Pattern.COL}}
    display.strategies(StrategyTable(TABLE, default=MatmulStrategies.uniform("plain")), patterns)
    header, *_, default = [line for line in file.getvalue().splitlines() if line.strip(" ─")]
    assert default.index("plain") == header.index(" y ") + 1


def test_a_table_set_is_summarized() -> None:
    display, file = make()
    display.table_set("adahop-lv2", 30, StrategyTable({"a": TABLE["block_0/mlp/up"]} | {
        "b": MatmulStrategies("iht", "iht", "plain")
    }))  # fmt: skip
    assert file.getvalue() == (
        "adahop-lv2: step 30: strategy table set (3 iht, 1 iht_oe_left, 1 bf16, 1 plain)\n"
    )


def test_validation_loss() -> None:
    display, file = make()
    display.validated("bf16", 50, 1.23456)
    assert file.getvalue() == "bf16: step 50: validation loss 1.2346\n"


@pytest.mark.parametrize(
    "text",
    [
        "Runs are in /runs/[red]text[/red]/a: metrics.jsonl",
        "Runs are in /runs/x[/]: metrics.jsonl",
        "Runs are in /runs/a:smile:b",
        "data: " + "long/" * 50 + " (train 12 documents)",
    ],
    ids=["markup", "closing tag", "emoji", "long"],
)
def test_a_line_is_printed_as_it_is(text: str) -> None:
    display, file = make(width=80)
    display.say(text)
    assert file.getvalue() == text + "\n"


@pytest.mark.parametrize("width", [80, 100])
def test_a_strategy_table_loses_nothing_in_a_pipe(width: int) -> None:
    """Continuous integration logs are 80 columns wide as rich sees them."""
    display, file = make(width=width)
    path = "block_10/attention/q"
    table = StrategyTable({path: MatmulStrategies.uniform("iht_oe_inner", k=64)})
    patterns = {path: {"x": Pattern.ROW, "w": Pattern.NONE, "g": Pattern.COL}}
    display.strategies(table, patterns)
    assert path in file.getvalue()
    assert file.getvalue().count("iht_oe_inner") == 3


def run_bar(display: Display) -> list[float]:
    with display.progress("bf16", 1, 4) as progress:
        for loss in (3.0, 2.0, 1.0):
            with progress.step(64) as report:
                report(loss)
            progress.validated(loss / 2)
    return progress.durations


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    display, file = make()
    durations = run_bar(display)
    assert file.getvalue() == ""
    assert len(durations) == 3 and min(durations) >= 0


def test_a_terminal_shows_a_bar() -> None:
    display, file = make(terminal=True)
    run_bar(display)
    text = file.getvalue()
    assert "bf16" in text and "4/4" in text
    # The validation loss of the step before, and the loss of the last one.
    assert "loss 1.000 (validation 1.000)" in text
    assert "tokens/s" in text


def test_the_default_console_writes_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Display().say("1 2 3")
    assert capsys.readouterr() == ("1 2 3\n", "")
