"""A cache's bookkeeping as plain text, for terminals: the page map, the block tables, the numbers. NumPy only."""

from collections.abc import Sequence

import numpy as np

from jaxkv.cache.report import Bookkeeping, cache_stats, page_fill

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_ROWS, MAX_LINES = 64, 64


def numbers(cache: Bookkeeping) -> list[str]:
    """Waste and sharing, in two lines."""
    stats = cache_stats(cache)
    saved = int((cache.block_tables != 0).sum()) - stats.pages_used
    sharing = f" (a shared one counts in every row); sharing saves {saved} pages" if saved else ""
    return [
        f"{stats.pages_used} of {stats.pages_total} pages used, {stats.pages_free} free, {stats.pages_shared} shared",
        f"{stats.pages_used * cache.page_size} slots, {stats.waste:.0%} of them empty; {stats.tokens} tokens{sharing}",
    ]


def letter(row: int) -> str:
    """The letter of a row: a to z, then A to Z, then again from a."""
    return (LETTERS + LETTERS.upper())[row % 52]


def cache_text(cache: Bookkeeping, *, names: Sequence[str] | None = None, width: int = 80) -> str:
    """The page map, one character a page, the block tables and the numbers.

    Args:
      cache: from `PagedKVCache`, read back to the host.
      names: of the rows, by default "row 0" and so on.
      width: characters a line, at least 40.
    """
    width = max(width, 40)
    names = [f"row {i}" for i in range(len(cache.lengths))] if names is None else names
    lines = [*numbers(cache), "", *_page_map(cache, width), "", *_block_tables(cache, names, width)]
    return "\n".join(line.rstrip() for line in lines)


def _page_map(cache: Bookkeeping, width: int) -> list[str]:
    """x null page, . free, a row's letter, # shared; 64 pages a line, in groups of 8, where the width allows."""
    marks = np.full(len(cache.ref_counts), ".")
    rows, entries = np.nonzero(cache.block_tables)
    marks[cache.block_tables[rows, entries]] = [letter(row) for row in rows.tolist()]
    marks[cache.ref_counts > 1], marks[0] = "#", "x"
    groups = max(g for g in (1, 2, 4, 8, 16) if 7 + 9 * g <= max(width, 16))
    lines = [
        f"{first:>6} " + " ".join("".join(marks[i : i + 8]) for i in range(first, min(first + 8 * groups, len(marks)), 8))
        for first in range(0, len(marks), 8 * groups)
    ]
    more = [f"       and {len(lines) - MAX_LINES} lines more"] if len(lines) > MAX_LINES else []
    legend = "  page map: x null, . free, a letter for each row, # shared by several"
    return [legend, *lines[:MAX_LINES], *more]


def _block_tables(cache: Bookkeeping, names: Sequence[str], width: int) -> list[str]:
    """A row's letter, name, tokens and pages; * at a shared page; how full the last page is."""
    fill, lines = page_fill(cache), []
    wide = min(max(map(len, names)), 20)
    for row, name in enumerate(names[:MAX_ROWS]):
        pages = [p for p in cache.block_tables[row].tolist() if p]
        shown = [f"{p}*" if cache.ref_counts[p] > 1 else str(p) for p in pages]
        head = f"{letter(row)} {name[:wide]:<{wide}} {cache.lengths[row]:>6} tokens "
        last = f" (last {fill[pages[-1]]}/{cache.page_size})" if pages else ""
        table = "[" + " ".join(shown) + "]"
        if len(head) + len(last) + 12 > width:
            last = ""
        room = max(width - len(head) - len(last), 5)
        if len(table) > room:
            table = (table[: room - 2].rpartition(" ")[0] or "[") + " …]"
        lines.append(head + table + last)
    more = [f"and {len(names) - MAX_ROWS} more rows"] if len(names) > MAX_ROWS else []
    return ["  block tables: * shared", *lines, *more]
