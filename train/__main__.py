"""`python -m train` is the `adahop` command."""

import sys

from train.cli import main

sys.exit(main())
