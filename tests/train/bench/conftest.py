"""Plans that cost next to nothing, and ceilings of round numbers."""

import pytest

from train.bench.ceilings import Ceilings
from train.bench.timing import Plan


@pytest.fixture
def plan() -> Plan:
    return Plan(seconds=1e-5, samples=2)


@pytest.fixture
def ceilings() -> Ceilings:
    return Ceilings(copy=1e12, fp8=1e15, call=0.0)
