"""The compiled programs of one process, kept on disk for the next: jax's persistent compilation cache, set up for jaxkv."""

import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkv.programs.options import option
from jaxkv.programs.user_folder import cache_folder
from jaxkv.programs.watched import say

_FOLDER, _ENABLED = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
# Below these jax keeps nothing: by default programs that compiled in under a second, of which a session has dozens.
_SECONDS, _BYTES = "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"
_complained: set[str] = set()


def keep_programs(folder: str | os.PathLike | None = None) -> Path | None:
    """Keep compiled programs on disk, so that the next process with the same model and sizes reads them instead of compiling.

    One line at the beginning of a program or notebook; the command line calls it by itself. It sets options of jax, for all of this
    process's programs: the folder, and thresholds below which jax would not keep a program. What was chosen by jax's own options
    or environment variables stays: `JAX_COMPILATION_CACHE_DIR` (unless `folder` is given), `JAX_ENABLE_COMPILATION_CACHE=0`, and
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`. Whoever can write to the folder can run code as you.

    Args:
      folder: where to; by default where jax was told to, else the folder "xla" in `$JAXKV_CACHE_DIR` or in the user's cache folder.

    Returns:
      The folder; None where nothing is kept, because jax's cache is switched off or the folder can be neither written nor read.
      A folder that cannot be written is no error: one line on stderr says so, and programs that it holds are used.

    Raises:
      ValueError: `folder` is no path.
    """
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
        raise ValueError(f"folder must be a path or None, got {folder!r}")
    if not option(_ENABLED):
        return None
    already = option(_FOLDER)
    if folder is None and already and "://" in str(already):  # storage elsewhere, which jax reaches by itself
        _thresholds(writable=True)
        return Path(already)
    chosen = Path(folder or already or cache_folder() / "xla").expanduser()
    writable, why = _try(chosen)
    if not writable:
        used = chosen.is_dir() and os.access(chosen, os.R_OK | os.X_OK)
        rest = (
            "the programs it holds are used, new ones compile in every process" if used else "programs compile in every process"
        )
        _complain(f"{chosen} cannot be written ({why}): {rest}. JAXKV_CACHE_DIR names another folder")
        if not used:
            if already:  # jax would warn at every program
                jax.config.update(_FOLDER, None)
                compilation_cache.reset_cache()
            return None
    _thresholds(writable=writable)
    if str(chosen) != already:
        jax.config.update(_FOLDER, str(chosen))
    compilation_cache.reset_cache()  # jax looks at its options once, and something may have been compiled before
    return chosen


def _thresholds(*, writable: bool) -> None:
    if not writable:
        jax.config.update(_SECONDS, float("inf"))
    elif _SECONDS.upper() not in os.environ:
        jax.config.update(_SECONDS, 0.0)
    if _BYTES.upper() not in os.environ:
        jax.config.update(_BYTES, -1)


def _try(folder: Path) -> tuple[bool, str]:
    """Whether a file can be written there, the folder made if need be; and why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"jaxkv")
    except OSError as error:
        return False, error.strerror or type(error).__name__
    return True, ""


def _complain(line: str) -> None:
    if line not in _complained:
        _complained.add(line)
        say(line)
