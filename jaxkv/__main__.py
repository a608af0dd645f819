"""`python -m jaxkv` is the command `jaxkv`."""

import sys

from jaxkv.cli import main

sys.exit(main())
