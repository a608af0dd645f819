"""`jaxkv bench`: the measurements live in `jaxkv.bench`; see `jaxkv.cli` for the arguments."""

from jaxkv.bench.decode import run

__all__ = ["run"]
