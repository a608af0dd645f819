"""Day one on a GPU machine, within ten minutes: parity, compute-sanitizer where present, then the bench.

    python -m pallas_kernels.tools.gpu_check          from the root of a checkout, with jax's CUDA build and pytest installed

Every step has its own time limit and is reported even when an earlier one fails; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

PARITY = "tests/pallas_kernels/test_paged_attention.py"
SANITIZED = (
    "import jax, jax.numpy as jnp, pallas_kernels as p\n"
    "pages = jnp.ones((9, 2, 16, 64), jnp.bfloat16)\n"
    "tables = jnp.arange(1, 9, dtype=jnp.int32).reshape(2, 4)\n"
    "q = jnp.ones((2, 8, 64), jnp.bfloat16)\n"
    "out = p.paged_attention(q, pages, pages, tables, jnp.array([64, 17], jnp.int32), implementation='triton')\n"
    "assert bool(jnp.all(out == 1)), out\n"
)


def steps(sanitizer: str | None) -> list[tuple[str, list[str] | None, int]]:
    """(name, command or None where it cannot run, seconds allowed): 570 seconds in all."""
    python = sys.executable
    check = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1", python, "-c", SANITIZED] if sanitizer else None
    return [
        ("parity", [python, "-m", "pytest", "-n0", "-q", "-k", "triton-gpu", PARITY], 270),
        ("compute-sanitizer", check, 100),
        ("bench", [python, "-m", "pallas_kernels.tools.bench"], 200),
    ]


def main() -> int:
    """Runs the steps; returns 0 when none failed."""
    environment = dict(os.environ, JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    outcome = {}
    for name, command, limit in steps(shutil.which("compute-sanitizer")):
        start = time.monotonic()
        if command is None:
            outcome[name] = "not installed"
        else:
            try:
                status = subprocess.run(command, env=environment, timeout=limit).returncode
                outcome[name] = "passed" if status == 0 else f"failed with status {status}"
            except subprocess.TimeoutExpired:
                outcome[name] = f"ran past {limit} s"
        print(f"== {name}: {outcome[name]} ({time.monotonic() - start:.0f} s)", flush=True)
    print(json.dumps(outcome))
    return 0 if all(x in ("passed", "not installed") for x in outcome.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
