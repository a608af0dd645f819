"""Pictures of one cache, and of a run that was recorded step by step; see `jaxkv.viz`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.report import Bookkeeping, cache_stats
from jaxkv.decode.generate import stream
from jaxkv.decode.outputs import GenerateOutput
from jaxkv.model.decoder import Decoder
from jaxkv.viz.cache_picture import AFTER, LABEL, LINE, WIDTH, Picture, colour, picture, svg, text


class Frame(NamedTuple):
    """A cache after one turn: `requests` i32[seqs] says which request (prompt * num_samples + sample) a row has, -1 for none."""

    cache: Bookkeeping
    requests: np.ndarray

    @property
    def names(self) -> list[str]:
        """What to call the rows: by their requests."""
        return [f"request {r}" if r >= 0 else "idle" for r in self.requests.tolist()]


class Recording(NamedTuple):
    """What `generate` returned, and its cache after every turn.

    Attributes:
      output: see `jaxkv.GenerateOutput`.
      frames: one for each turn, in order.
    """

    output: GenerateOutput
    frames: tuple[Frame, ...]

    @property
    def fullest(self) -> Frame:
        """The frame with the most pages in use, the last one of these."""
        return max(reversed(self.frames), key=lambda f: cache_stats(f.cache).pages_used)

    def _repr_html_(self) -> str:
        return timeline(self).html


def page_map(cache: PagedKVCache | Bookkeeping | Frame) -> Picture:
    """The page map, the block tables, and waste and sharing in numbers.

    Args:
      cache: a cache outside jit, its `bookkeeping()`, or a frame of a recording.

    Raises:
      ValueError: the cache was donated, as `extend` does; go on with the one it returned.

    Examples:
      >>> tables = np.array([[1, 2], [1, 3]])  # two rows that share page 1
      >>> cache = Bookkeeping(tables, np.array([6, 8]), np.array([0, 2, 1, 1]), np.array([0, 0, 0, 0]), 0, page_size=4)
      >>> print(page_map(cache))
      3 of 3 pages used, 0 free, 1 shared
      12 slots, 17% of them empty; 14 tokens (a shared one counts in every row); sharing saves 1 pages
      <BLANKLINE>
        page map: x null, . free, a letter for each row, # shared by several
           0 x#ab
      <BLANKLINE>
        block tables: * shared
      a row 0      6 tokens [1* 2] (last 2/4)
      b row 1      8 tokens [1* 3] (last 4/4)
    """
    if isinstance(cache, Frame):
        return picture(cache.cache, names=cache.names)
    return picture(cache.bookkeeping() if isinstance(cache, PagedKVCache) else cache)


def record(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]],
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None,
    **options,
) -> Recording:
    """`generate` with its block tables recorded after every step; it runs step by step from the host, with the same tokens.

    Args:
      model, prompts, prompt_lengths: as for `jaxkv.generate`.
      **options: those of `jaxkv.stream`.

    Raises:
      ValueError: as for `jaxkv.generate`.
    """
    frames: list[Frame] = []
    turns = stream(model, prompts, prompt_lengths, on_turn=lambda cache, rows: frames.append(Frame(cache, rows)), **options)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return Recording(end.value, tuple(frames))


def timeline(recording: Recording | Sequence[Frame], *, max_frames: int = 40) -> Picture:
    """A slider over a recorded run.

    Args:
      recording: from `record`, or frames of one.
      max_frames: pictures at most, evenly taken from all.

    Raises:
      ValueError: there is no frame, or `max_frames` is below 1.
    """
    frames = recording.frames if isinstance(recording, Recording) else tuple(recording)
    if not frames or max_frames < 1:
        raise ValueError(f"a timeline needs at least one frame, got {len(frames)} and max_frames={max_frames}")
    steps = np.unique(np.linspace(0, len(frames) - 1, min(max_frames, len(frames))).round().astype(int))
    pictures = [picture(frames[i].cache, names=frames[i].names, salt=nth) for nth, i in enumerate(steps)]
    fullest = max(range(len(steps)), key=lambda n: cache_stats(frames[steps[n]].cache).pages_used)
    titled = [(f"step {i + 1} of {len(frames)}", p) for i, p in zip(steps.tolist(), pictures)]
    return Picture(_slider(titled, fullest), "\n\n".join(f"{title}: {p.text}" for title, p in titled))


def _slider(titled: Sequence[tuple[str, Picture]], first: int) -> str:
    """Pictures of which one is shown at a time, and what chooses it; without scripts it is the first to be shown."""
    switch = (  # it needs nothing but the slider it stands in, so that a page may have several
        "const all = this.closest('.jaxkv-timeline').querySelectorAll('[data-step]');"
        "all.forEach((e, i) => e.style.display = i == this.value ? 'block' : 'none');"
        "this.nextElementSibling.textContent = all[this.value].dataset.step"
    )
    shown = "".join(
        f'<div data-step="{title}" style="display:{"block" if nth == first else "none"}">{p.html}</div>'
        for nth, (title, p) in enumerate(titled)
    )
    head = (
        f'<input type="range" min="0" max="{len(titled) - 1}" value="{first}" style="width:480px;max-width:65%" '
        f'aria-label="step" oninput="{switch}"> <span>{titled[first][0]}</span>'
    )
    return f'<div class="jaxkv-timeline" style="max-width:{WIDTH}px;font:12px system-ui,sans-serif">{head}{shown}</div>'


def compare(recording: Recording | Frame) -> Picture:
    """Contiguous allocation beside the paged one, at a recording's fullest moment or in one frame.

    Contiguous means what it means in most decoders: every row has room for the longest sequence from its first token on.

    Args:
      recording: from `record`, or one of its frames.

    Raises:
      ValueError: the recording has no frames.
    """
    frame = recording.fullest if isinstance(recording, Recording) else recording
    cache, stats = frame.cache, cache_stats(frame.cache)
    longest = cache.block_tables.shape[1] * cache.page_size
    reserved, paged = len(cache.lengths) * longest, stats.pages_used * cache.page_size
    lines = [
        f"contiguous: {reserved} slots reserved, {1 - stats.tokens / reserved:.0%} of them empty",
        f"paged:      {paged} slots taken, {stats.waste:.0%} of them empty; {reserved / max(paged, 1):.1f} times less memory",
    ]
    parts, top = _bars(frame, longest, 22)
    parts = [text(0, 12, lines[0]), *parts, text(0, top + LINE, " ".join(lines[1].split()))]
    below = picture(cache, names=frame.names)
    drawing = svg(parts, top + LINE + 8, "; ".join(lines))
    return Picture(f"<div>{drawing}{below.html}</div>", "\n".join([*lines, "", below.text]))


def _bars(frame: Frame, longest: int, top: int) -> tuple[list[str], int]:
    """A bar for each row, as wide as the longest sequence and filled as far as it holds tokens; and where they end."""
    rows, room = min(len(frame.cache.lengths), 64), WIDTH - LABEL - AFTER
    pitch = 14 if rows <= 16 else 10
    size = 11 if pitch > 12 else 8
    parts = []
    for row, (name, length) in enumerate(zip(frame.names[:rows], frame.cache.lengths.tolist())):
        y = top + row * pitch
        parts += [
            text(0, y + pitch - 5, name, size=size),
            f'<rect x="{LABEL}" y="{y}" width="{room}" height="{pitch - 3}" fill="{colour(row)}" fill-opacity="0.3"/>',
            f'<rect x="{LABEL}" y="{y}" width="{room * length / longest:.4g}" height="{pitch - 3}" fill="{colour(row)}"/>',
            text(WIDTH - 2, y + pitch - 5, f"{length} of {longest}", anchor="end", size=size),
        ]
    return parts, top + rows * pitch
