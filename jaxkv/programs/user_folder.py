"""Where what was fetched or compiled is kept for this user."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`$JAXKV_CACHE_DIR`, or the platform's cache folder for this user."""
    if chosen := os.environ.get("JAXKV_CACHE_DIR"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "jaxkv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxkv"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "jaxkv"
    return Path.home() / ".cache" / "jaxkv"
