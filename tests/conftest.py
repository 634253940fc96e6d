"""What all tests share: where the reference data lies, and a report of how much of it was read."""

import collections
import os
import pathlib

import hypothesis
import numpy as np
import pytest

# Triton reads this when it is imported: here its kernels run in its interpreter. What compiles them
# does so in a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A first call compiles, so single examples take as long as they take; CI has to be repeatable.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("ci")

_GOLDEN = pathlib.Path(__file__).parents[2] / "shared" / "golden"
_passed: collections.Counter[str] = collections.Counter()
_files: dict[str, set[str]] = collections.defaultdict(set)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Folder of the reference vectors of an independent oracle."""
    if not _GOLDEN.is_dir():
        pytest.skip(f"no reference data at {_GOLDEN}: the golden tests need it")
    return _GOLDEN


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for key, value in report.user_properties:
            if key == "golden":
                family, stem = value.split("/")
                _passed[family] += 1
                _files[family].add(stem)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for family, tests in sorted(_passed.items()):
        files = len(_files[family])
        terminalreporter.write_line(f"golden {family}: {tests} tests passed on {files} files")


_FAMILIES = {
    "quantize_file": "quantize/*.npz",
    "stochastic_file": "stochastic/*.npz",
    "hadamard_file": "hadamard/n*.npz",
    "hadamard_matrix_file": "hadamard/matrix_*.npz",
    "matmul_file": "matmul/*.npz",
    "extract_file": "extract/*.npz",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes the arguments of `_FAMILIES` over the reference files."""
    for name in metafunc.fixturenames:
        if name in _FAMILIES:
            files = sorted(_GOLDEN.glob(_FAMILIES[name]))
            missing = pytest.mark.skip(reason=f"no reference data at {_GOLDEN}")
            params = [pytest.param(f, id=f.stem) for f in files]
            metafunc.parametrize(name, params or [pytest.param(None, marks=missing)])


@pytest.fixture
def oracle(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    """The arrays of the reference file that this test is parametrized over."""
    (name,) = set(_FAMILIES) & set(request.fixturenames)
    path = request.getfixturevalue(name)
    request.node.user_properties.append(("golden", f"{path.parent.name}/{path.stem}"))
    with np.load(path, allow_pickle=False) as data:
        return dict(data)
