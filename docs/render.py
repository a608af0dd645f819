"""Pictures of caches, small and large, on light and dark ground: rendered to PNG in headless Chromium, and measured for overflow.

    python docs/render.py FOLDER [FILE.html ...]

Without files it draws made-up caches of 4 and 4,096 pages with 1 and 64 rows. Exit status 1 when something sticks out.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

import numpy as np

from jaxkv.cache.report import Bookkeeping
from jaxkv.viz.cache_picture import picture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
)
MEASURE = """<script>addEventListener("load", () => {
  const out = [], page = document.documentElement;
  if (page.scrollWidth > innerWidth) out.push(`the page is ${page.scrollWidth} px wide in a window of ${innerWidth}`);
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    for (const part of svg.querySelectorAll("text, path, rect")) {
      const b = part.getBoundingClientRect();
      if (b.width && !part.closest("pattern") &&
          (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1))
        out.push(`${part.tagName} ${part.textContent} sticks out of its drawing`);
    }
    const texts = [...svg.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
    texts.sort((a, b) => a[1].top - b[1].top);
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length && texts[j][1].top < texts[i][1].bottom - 4; j++) {
        const a = texts[i][1], b = texts[j][1];
        if (a.left < b.right - 1 && b.left < a.right - 1)
          out.push(`"${texts[i][0].textContent}" and "${texts[j][0].textContent}" overlap`);
      }
  }
  const pre = document.createElement("pre");
  pre.id = "overflow"; pre.textContent = JSON.stringify([out, page.scrollHeight]); document.body.append(pre);
});</script>"""


def made_up_cache(num_pages: int, rows: int, *, page_size: int = 16, seed: int = 0) -> Bookkeeping:
    """A consistent cache in which every third row lends pages to the two after it, and free pages are left."""
    random = np.random.default_rng(seed)
    tables = np.zeros((rows, max(2, 2 * num_pages // rows)), np.int32)
    lengths, free = np.zeros(rows, np.int32), list(range(num_pages - 1, 0, -1))
    for row in range(rows):
        shared = int(lengths[row - row % 3]) // page_size // 2 if row % 3 else 0
        tables[row, :shared] = tables[row - row % 3, :shared]
        taken = min(int(random.integers(1, max(2, 1.4 * num_pages // rows))), len(free), tables.shape[1] - shared)
        for i in range(taken):
            tables[row, shared + i] = free.pop()
        held = shared + taken
        lengths[row] = held * page_size - int(random.integers(0, page_size)) if held else 0
    counts = np.bincount(tables.reshape(-1), minlength=num_pages).astype(np.int32)
    counts[0] = 0
    stack = np.zeros(num_pages, np.int32)
    stack[: len(free)] = free
    return Bookkeeping(tables, lengths, counts, stack, len(free), page_size)


def chromium(*arguments: str) -> str:
    """Run it, and return what it prints.

    Raises:
      RuntimeError: there is no Chromium, or it ends with an error.
    """
    if CHROMIUM is None:
        raise RuntimeError("needs Chromium (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments], capture_output=True, text=True, timeout=120
        )
    if done.returncode:
        raise RuntimeError(f"{CHROMIUM} ended with status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def measure(path: Path, *, width: int = 800) -> tuple[list[str], int]:
    """What sticks out or overlaps in an HTML file, in words, and the page's height in px."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(path.read_text().replace("</body>", MEASURE + "</body>"))
        page = chromium(f"--window-size={width},600", "--virtual-time-budget=5000", "--dump-dom", copy.as_uri())
    (found,) = re.findall(r'<pre id="overflow">(.*?)</pre>', page, re.DOTALL)
    faults, height = json.loads(unescape(found))
    return faults, int(height)


def render(path: Path, png: Path, *, width: int = 800) -> list[str]:
    """An HTML file as PNG; returns what sticks out or overlaps."""
    faults, height = measure(path, width=width)
    chromium(f"--window-size={width},{min(height + 16, 8000)}", f"--screenshot={png.resolve()}", path.resolve().as_uri())
    return faults


def main(folder: str, *files: str) -> int:
    """The script; returns its exit status."""
    out, paths = Path(folder), [Path(f) for f in files]
    out.mkdir(parents=True, exist_ok=True)
    if not paths:
        for pages, rows in ((4, 1), (4, 64), (64, 4), (4096, 1), (4096, 64)):
            for theme in ("light", "dark"):
                paths.append(out / f"pages_{pages}_rows_{rows}_{theme}.html")
                picture(made_up_cache(pages, rows)).save(paths[-1], theme=theme)
    faults = []
    for path in paths:
        found = render(path, out / f"{path.stem}.png")
        print(f"{out / path.stem}.png: {'; '.join(found) or 'nothing sticks out'}")
        faults += found
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
