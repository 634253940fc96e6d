"""Makes the virtual environment .venv of this clone: python3 .ci/setup.py train (or dev).

Runs under any Python 3, so that an old one gets a sentence instead of a resolver's report.
"""

import os
import subprocess
import sys

OLDEST = (3, 12)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main():
    """Returns the exit code."""
    if sys.argv[1:] not in (["train"], ["dev"]):
        return "usage: python3 .ci/setup.py train|dev"
    if sys.version_info < OLDEST:
        return (
            "AdaHOP-JAX needs Python %d.%d or newer, but this is Python %d.%d (%s); install "
            "one and run this again with it, for example as python3.12."
            % (OLDEST + tuple(sys.version_info[:2]) + (sys.executable,))
        )
    environment = os.path.join(ROOT, ".venv")
    python = os.path.join(environment, "bin", "python")
    if not os.path.exists(python) and subprocess.call([sys.executable, "-m", "venv", environment]):
        return "Python's venv module made no environment; on Debian, install python3-venv."
    pins = os.path.join(ROOT, ".ci", "constraints.txt")
    install = ["install", "-q", "--disable-pip-version-check", "-c", pins]
    command = [python, "-m", "pip"] + install + ["-e", "%s[%s]" % (ROOT, sys.argv[1])]
    return subprocess.call(command)


sys.exit(main())
