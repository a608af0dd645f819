"""`python -m jaxkv` is the command `jaxkv`."""

import sys

from jaxkv.cli.main import main

sys.exit(main())
