"""Lets the tests of this folder import its helpers by name."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
