"""The Triton backend against the oracle, its kernels in Triton's interpreter."""

from golden_suite import GoldenSuite


class TestTriton(GoldenSuite):
    backend = "triton"
    # Each draw is a run of the interpreter.
    draws = 8
