"""How many pages fit into the memory that is free."""

import logging
import os
from pathlib import Path
from typing import Any

from jaxkv.cache.pages import page_bytes
from jaxkv.config import CacheConfig, ModelConfig, pages_for

CPU_CAP = 4 * 2**30
"""Bytes of pages on a CPU, at most: its memory is everybody's. As much as vLLM takes there."""

TEMPORARY = 512 * 2**20
"""Bytes of an accelerator's memory that a step's activations and logits may need."""

logger = logging.getLogger("jaxkv")


def pages_that_fit(config: ModelConfig, one_page: CacheConfig, device: Any, utilization: float, most: int) -> int:
    """Pages of a pool that takes a share of the memory that is free now, the null page included.

    Args:
      config: of the model, whose weights are in memory already.
      one_page: page size and dtype.
      device: where the pages will be.
      utilization: the share, in (0, 1]; on an accelerator of all its memory, of which the weights have theirs.
      most: pages that can be in use at most; a CPU keeps no more, and an accelerator as many as fit.

    Raises:
      ValueError: not even two pages fit; the message has the numbers.
    """
    each = page_bytes((config,), one_page.page_size, one_page.dtype)
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        room = int(stats["bytes_limit"] * utilization) - stats.get("bytes_in_use", 0) - TEMPORARY
        pages = room // each
    else:
        room = min(int(available_memory() * utilization), CPU_CAP)
        pages = min(room // each, most)
    if pages < 2:
        raise ValueError(
            f"there is no room for pages: one of {one_page.page_size} tokens takes {each:,} bytes, and {max(room, 0):,} are free for them. "
            "Free some, or raise gpu_memory_utilization"
        )
    return int(pages)


def log_pool(sizes: CacheConfig, config: ModelConfig) -> None:
    """Say how large the pool is, and how many sequences of full length it holds."""
    each, full = page_bytes((config,), sizes.page_size, sizes.dtype), pages_for(sizes.max_seq_len, sizes.page_size)
    logger.info(
        "%d pages of %d tokens (%.2f GB), enough for %.1f sequences of %d tokens",
        sizes.num_pages - 1,
        sizes.page_size,
        sizes.num_pages * each / 1e9,
        (sizes.num_pages - 1) / full,
        sizes.max_seq_len,
    )


def available_memory() -> int:
    """Bytes of the machine's memory that are free, or of the container's where that has a limit."""
    free = [_free_of_machine(), *_free_of_containers()]
    return min(free)


def _free_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_of_containers() -> list[int]:
    """What cgroups, of version 2 and 1, leave free; nothing where they set no limit."""
    files = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)
    files += (("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),)
    free = []
    for limit, used in files:
        try:
            free.append(max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # there is none, or the limit is "max"
            continue
    return free
