"""The pictures of README and documentation, drawn anew into docs/pictures; bookkeeping alone decides what they look like.

python docs/pictures.py [FOLDER]
"""

import sys
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv import viz

CONFIG = jaxkv.ModelConfig(
    "llama", 64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, max_seq_len=128,
    rope=jaxkv.Rope(rotary_dim=16),
)  # fmt: skip


def grown(cache: jaxkv.PagedKVCache, *num_tokens: int) -> jaxkv.PagedKVCache:
    """The cache with so many more tokens in its rows, as `extend` leaves it; no model runs."""
    more = jnp.array(num_tokens)
    return cache.allocate(more).advance(more)


def draw(folder: Path) -> list[Path]:
    """Write all pictures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    cache = jaxkv.PagedKVCache.create(CONFIG, num_pages=26, page_size=8, max_seqs=4, max_seq_len=128)
    pictures = {}
    pictures["pages"] = viz.page_map(cache := grown(cache, 37, 20, 0, 0))
    pictures["fork"] = viz.page_map(cache := cache.fork(0, 2))
    pictures["copy_on_write"] = viz.page_map(cache := grown(cache, 6, 3, 1, 0))
    page_map = viz.page_map(grown(cache.fork(1, 3), 12, 0, 5, 30))
    model = jaxkv.Decoder(CONFIG, rngs=nnx.Rngs(0))
    recording = viz.record(
        model, jnp.zeros((6, 20), jnp.int32), max_new_tokens=24, token_limits=jnp.array([24, 4, 18, 9, 24, 6]), max_seqs=3,
        num_pages=18, page_size=8,
    )  # fmt: skip
    pictures["contiguous"] = viz.compare(recording)
    pictures["timeline"] = viz.timeline(recording, max_frames=16)
    for name, made in pictures.items():
        (folder / f"{name}.inline.html").write_text(made.html + "\n")  # takes the page's text colour
    for theme in ("light", "dark"):
        page_map.save(folder / f"page_map_{theme}.svg", theme=theme)
    return sorted(folder.iterdir())


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"):
        print(path)
