"""`jaxkv inspect`: generates, and draws the cache as plain text; see `jaxkv.cli` for its arguments."""

import argparse
import shutil
import sys
from pathlib import Path

import jax
import numpy as np

from jaxkv import viz
from jaxkv.cli.model import check_pool, open_with_tokenizer
from jaxkv.cli.prompts import read_prompts, token_rows
from jaxkv.decode.sampling import Sampling
from jaxkv.programs import keep_programs
from jaxkv.viz.cache_text import cache_text


def run(args: argparse.Namespace) -> int:
    """The command; see `jaxkv inspect --help`."""
    if args.html and not args.html.endswith(".html"):
        raise ValueError(f"--html writes an .html file, got {args.html!r}")
    if args.html and not Path(args.html).parent.is_dir():
        raise ValueError(f"--html {args.html}: there is no folder {Path(args.html).parent}")
    sampling, key = Sampling(args.temperature), jax.random.key(args.seed)
    texts = read_prompts(args.prompts, sys.stdin)
    keep_programs()
    opened = open_with_tokenizer(args.model)
    check_pool(opened.config, args.page_size, args.num_pages)
    prompts = token_rows(opened.tokenizer, texts, raw=True)
    model = opened.decoder(dtype=args.dtype)
    recording = viz.record(
        model, prompts, max_new_tokens=args.max_new_tokens, num_samples=args.num_samples, max_seqs=args.max_seqs,
        num_pages=args.num_pages, page_size=args.page_size, sampling=sampling, key=key,
        eos_token_id=model.config.eos_token_ids or None,
    )  # fmt: skip
    frames, width = recording.frames, shutil.get_terminal_size().columns
    chosen = [next(i for i, frame in enumerate(frames) if frame is recording.fullest)]
    if args.moments > 1:
        chosen = np.unique(np.linspace(0, len(frames) - 1, args.moments + 2)[1:-1].round().astype(int)).tolist()
    for i in chosen:
        title = f"after step {i + 1} of {len(frames)}"
        print(f"{title}\n{cache_text(frames[i].cache, names=frames[i].names, width=width)}\n")
    contiguous = viz.compare(recording).text.split("\n\n")[0]
    print(f"at the fullest moment\n{contiguous}")
    if args.html:
        viz.timeline(recording).save(Path(args.html))
    return 0
