"""Rates follow from the times that are shown, and a ceiling that fails is missing, not zero."""

import jax
import pytest

from train.bench import ceilings
from train.bench.ceilings import measure_ceilings
from train.bench.timing import Plan, Timing


def test_rates(plan: Plan) -> None:
    group, found = measure_ceilings((2**16, 2**14), 64, plan)
    rows = {row["what"]: row for row in group.rows}
    assert list(rows) == [
        "copy 0.0655 MB",
        "copy 0.0164 MB",
        "BF16 product 64^3",
        "FP8 product 64^3",
        "FP8 of MXFP4 values product 64^3",
        "one queued call (host)",
    ]
    assert not group.failed
    for name, amount in (("copy 0.0655 MB", 2 * 2**16), ("BF16 product 64^3", 2 * 64**3)):
        assert rows[name]["per_second"] == amount / rows[name]["seconds"]
    assert found.copy == max(rows[n]["per_second"] for n in ("copy 0.0655 MB", "copy 0.0164 MB"))
    assert found.fp8 == max(row["per_second"] for name, row in rows.items() if "FP8" in name)
    assert found.call == pytest.approx(rows["one queued call (host)"]["seconds"])


def test_samples_are_longer_than_elsewhere(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def measure(works: list[object], plan: Plan) -> list[Timing]:
        plans.append(plan)
        return [Timing((1.0,))] * len(works)

    monkeypatch.setattr(ceilings, "measure", measure)
    measure_ceilings((2**14,), 64, plan)
    assert {p.seconds / plan.seconds for p in plans} == {5.0}


def test_a_failed_ceiling_is_none(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fp8(a: jax.Array, b: jax.Array) -> jax.Array:
        raise NotImplementedError("no FP8 here")

    monkeypatch.setattr(ceilings, "fp8_gemm", no_fp8)
    group, found = measure_ceilings((2**14,), 64, plan)
    assert group.failed and found.fp8 is None and found.copy is not None
    failed = [row["what"] for row in group.rows if "failed" in row]
    assert failed == ["FP8 product 64^3", "FP8 of MXFP4 values product 64^3"]
