"""Pictures of a cache's bookkeeping as SVG: the page map, and the block tables as rows. NumPy only; contents are never read.

    page map        one cell a page, in the order of the pool    a row's colour; stripes where several rows share the page;
    block tables    one line a row, its pages in order           filled from below by the share of its slots that hold tokens

Text takes the colour of its surroundings (`currentColor`), so that one picture reads on light and on dark ground.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from jaxkv.cache.report import Bookkeeping, page_fill
from jaxkv.viz.cache_text import cache_text, numbers

Number = int | float
WIDTH = 720
MAX_ROWS, MAX_PAGES = 64, 8192
LABEL, AFTER, LINE = 80, 92, 16  # px: a row's name on the left, its tokens on the right, a line of text
GROUND = {"light": ("#1f2328", "#ffffff"), "dark": ("#e6edf3", "#0d1117")}


@dataclasses.dataclass(frozen=True, repr=False)
class Picture:
    """Something to look at: shown in a notebook, printed in a terminal, saved to a file.

    Attributes:
      html: a fragment without dependencies, at most 720 px wide; text takes the colour of its surroundings.
      text: the same as plain text.
    """

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path, *, theme: str | None = None) -> None:
        """Write it to a file; its name's end says how.

        Args:
          path: ends with .html (any picture), .svg (a picture that is one drawing) or .txt.
          theme: "light" or "dark" ground, or None for what the reader's system prefers; without meaning for .txt.

        Raises:
          ValueError: the theme or the name's end is none of these, or the picture is more than one drawing.
        """
        path = Path(path)
        if theme not in (None, *GROUND):
            raise ValueError(f"theme must be 'light', 'dark' or None, got {theme!r}")
        if path.suffix == ".txt":
            path.write_text(self.text + "\n", encoding="utf-8")
        elif path.suffix == ".html":
            style = f"<style>{_ground('body', theme)} body {{margin: 16px}}</style>"
            page = f'<!doctype html><html><head><meta charset="utf-8">{style}</head><body>{self.html}</body></html>\n'
            path.write_text(page, encoding="utf-8")
        elif path.suffix == ".svg":
            if self.html.count("<svg") != 1 or not self.html.startswith("<svg"):
                raise ValueError(f"this picture is more than one drawing: save it as .html, not as {path.name}")
            drawing = self.html.replace(">", f"><style>{_ground('svg', theme)}</style>", 1)
            path.write_text(drawing + "\n", encoding="utf-8")
        else:
            raise ValueError(f"a picture is saved as .svg, .html or .txt, got {path.name}")


def _ground(element: str, theme: str | None) -> str:
    def rule(name: str) -> str:
        return "{} {{color: {}; background: {}}}".format(element, *GROUND[name])

    return rule(theme) if theme else f"{rule('light')} @media (prefers-color-scheme: dark) {{{rule('dark')}}}"


def picture(cache: Bookkeeping, *, names: Sequence[str] | None = None, salt: int = 0) -> Picture:
    """The page map, the block tables and the numbers of a cache.

    Args:
      cache: from `PagedKVCache`, read back to the host.
      names: of the rows, by default "row 0" and so on.
      salt: another number for each picture of a page of which some are hidden: they must not share definitions.

    Raises:
      ValueError: the number of names is not that of the rows.
    """
    rows = len(cache.lengths)
    if names is not None and len(names) != rows:
        raise ValueError(f"there are {len(names)} names for {rows} rows")
    names = [f"row {i}" for i in range(rows)] if names is None else names
    pen = _Pen(cache, salt)
    top = _legend(pen)
    top = _page_map(pen, top + 12)
    top = _block_tables(pen, top + 10, names)
    return Picture(
        svg(pen.parts, top, "page map and block tables: " + "; ".join(numbers(cache))), cache_text(cache, names=names)
    )


def svg(parts: Sequence[str], height: Number, label: str) -> str:
    """One drawing, 720 px wide."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(label)}" style="max-width:100%;height:auto;display:block" '
        f'font-family="system-ui,sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def text(x: Number, y: Number, words: str, *, anchor: str = "start", size: Number = 11, fill: str = "currentColor") -> str:
    """A line of text on its baseline."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def colour(row: int) -> str:
    """A row's colour: neighbours differ, and black text reads on all of them."""
    return f"hsl({(205 + row * 137.508) % 360:.0f} 60% 66%)"


class _Pen:
    """What is drawn so far, and how each page looks. Cells of one look are one path: 4,096 pages make a small file."""

    def __init__(self, cache: Bookkeeping, salt: int):
        self.cache, self.fill = cache, page_fill(cache) / cache.page_size
        self.parts: list[str] = []
        rows, entries = np.nonzero(cache.block_tables)
        self.owners: dict[int, list[int]] = {}
        for row, page in zip(rows.tolist(), cache.block_tables[rows, entries].tolist()):
            self.owners.setdefault(page, []).append(row)
        mark = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in (cache.block_tables, cache.lengths)))
        self.mark = f"kv{mark.hexdigest()[:10]}-{salt}"
        self.paints: dict[tuple[int, ...], str] = {}

    def paint(self, owners: Sequence[int]) -> str:
        """A colour, or stripes in the colours of the first four owners; these are defined at first use."""
        key = tuple(owners[:4])
        if key not in self.paints:
            self.paints[key] = colour(key[0])
            if len(key) > 1:
                name, wide = f"{self.mark}-{'-'.join(map(str, key))}", 3
                stripes = "".join(
                    f'<rect x="{i * wide}" width="{wide}" height="9" fill="{colour(row)}"/>' for i, row in enumerate(key)
                )
                self.parts.append(
                    f'<pattern id="{name}" width="{wide * len(key)}" height="9" patternUnits="userSpaceOnUse" '
                    f'patternTransform="rotate(45)">{stripes}</pattern>'
                )
                self.paints[key] = f"url(#{name})"
        return self.paints[key]

    def cells(self, places: Sequence[tuple[int, Number, Number, Number, Number]]) -> None:
        """Draw pages (page, x, y, width, height): free, null, or in their owners' paint up to the fill level."""
        looks: dict[tuple[str, Number], list[str]] = {}
        for page, x, y, w, h in places:
            if page == 0:
                looks.setdefault(("null", 0), []).append(f"{_box(x, y, w, h)}m{w:g} 0l-{w:g} {h:g}m0-{h:g}l{w:g} {h:g}")
            elif page not in self.owners:
                looks.setdefault(("free", 0), []).append(_box(x, y, w, h))
            else:
                paint, filled = self.paint(self.owners[page]), h * self.fill[page]
                looks.setdefault((paint, 0.3), []).append(_box(x, y, w, h))
                if filled:
                    looks.setdefault((paint, 1), []).append(_box(x, y + h - filled, w, filled))
        for (paint, opacity), paths in looks.items():
            line = 'fill="none" stroke="currentColor" stroke-width="0.7" stroke-opacity="0.45"'
            look = line if paint in ("null", "free") else f'fill="{paint}" fill-opacity="{opacity:g}"'
            self.parts.append(f'<path d="{"".join(paths)}" {look}/>')

    def number(self, page: int, x: Number, y: Number, w: Number, h: Number) -> None:
        """A page's number in its cell: in the filled part in black, or in the empty part where that is larger."""
        filled = h * float(self.fill[page])
        most = filled >= h / 2
        middle = y + h - filled / 2 if most else y + (h - filled) / 2
        self.parts.append(
            text(x + w / 2, middle + 3.2, str(page), anchor="middle", size=9, fill="#000" if most else "currentColor")
        )


def _box(x: Number, y: Number, w: Number, h: Number) -> str:
    return f"M{x:.4g} {y:.4g}h{w:.4g}v{h:.4g}h-{w:.4g}z"


def _legend(pen: _Pen) -> Number:
    shown = [
        ("null page", 'fill="none" stroke="currentColor" stroke-opacity="0.45"', "M0 0h11v11h-11zm0 0l11 11m0-11l-11 11"),
        ("free", 'fill="none" stroke="currentColor" stroke-opacity="0.45"', "M0 0h11v11h-11z"),
        ("a row's, full", f'fill="{colour(0)}"', "M0 0h11v11h-11z"),
        ("partly filled", f'fill="{colour(0)}"', "M0 6h11v5h-11z"),
        ("shared", None, ""),
    ]
    x = 1.0
    for words, look, path in shown:
        if look is None:
            stripe = "".join(f'<path d="M{i * 3 - 1} 0h3v11h-3z" fill="{colour(i % 2)}"/>' for i in range(4))
            pen.parts.append(f'<g transform="translate({x + 1:g} 2)">{stripe}</g>')
        else:
            back = f'<path d="M0 0h11v11h-11z" fill="{colour(0)}" fill-opacity="0.3"/>' if "partly" in words else ""
            pen.parts.append(f'<g transform="translate({x:g} 2)">{back}<path d="{path}" {look}/></g>')
        pen.parts.append(text(x + 17, 11.5, words))
        x += 32 + 6 * len(words)
    lines = numbers(pen.cache)
    for i, words in enumerate(lines):
        pen.parts.append(text(0, 30 + LINE * i, words))
    return 30 + LINE * (len(lines) - 1)


def _page_map(pen: _Pen, top: Number) -> Number:
    total = len(pen.cache.ref_counts)
    shown = min(total, MAX_PAGES)
    size, gap = next(((s, g) for limit, s, g in _CELLS if shown <= limit), (7, 0.8))
    columns = int((WIDTH - 2) // (size + gap))
    places = [(p, 1 + p % columns * (size + gap), top + p // columns * (size + gap), size, size) for p in range(shown)]
    pen.cells(places)
    if size >= 20:
        for place in places:
            if place[0] in pen.owners:
                pen.number(*place)
    top += -(-shown // columns) * (size + gap)
    if total > shown:
        used = int((pen.cache.ref_counts[shown:] > 0).sum())
        pen.parts.append(text(0, top + 12, f"and {total - shown} more pages, {used} of them used"))
        top += LINE
    return top


_CELLS = ((96, 24, 3), (384, 15, 2), (1600, 11, 1.5), (4096, 8, 1))  # up to so many pages: size of a cell and gap, px


def _block_tables(pen: _Pen, top: Number, names: Sequence[str]) -> Number:
    cache, rows = pen.cache, min(len(names), MAX_ROWS)
    held = (cache.block_tables != 0).sum(1)
    room = WIDTH - LABEL - AFTER
    step = min(27.0, room / max(1, int(held.max())))
    height, pitch = (18, 22) if rows <= 16 else (10, 12)
    wide = max(step - (3 if step > 12 else 1 if step > 4 else 0), 0.5)
    places = []
    for row in range(rows):
        y, middle = top + row * pitch, top + row * pitch + height / 2 + 3.5
        small = 11 if height > 12 else 9
        name = names[row] if len(names[row]) <= 11 else names[row][:10] + "…"
        pen.parts.append(f'<rect x="0" y="{y:g}" width="4" height="{height}" fill="{colour(row)}"/>')
        pen.parts.append(text(8, middle, name, size=small))
        places += [
            (int(page), LABEL + i * step, y, wide, height) for i, page in enumerate(cache.block_tables[row, : held[row]])
        ]
        pen.parts.append(text(WIDTH - 2, middle, f"{cache.lengths[row]} tokens", anchor="end", size=small))
    pen.cells(places)
    if step >= 18 and height > 12:
        for place in places:
            pen.number(*place)
    top += rows * pitch
    if len(names) > rows:
        pen.parts.append(text(8, top + 12, f"and {len(names) - rows} more rows"))
        top += LINE
    return top + 4
