"""``python -m kvxfer`` is the command ``kvxfer``."""

import sys

from kvxfer.cli import main

sys.exit(main())
