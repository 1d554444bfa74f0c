"""`python -m areal_async` is `areal-async`."""

import sys

from areal_async.cli import main

sys.exit(main())
