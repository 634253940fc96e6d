"""The reference backend against the oracle."""

from golden_suite import GoldenSuite


class TestXLA(GoldenSuite):
    backend = "xla"
