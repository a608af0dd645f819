"""What `generate` returned, as SVG: a line for each sample, a cell for each token, darker the less probable. NumPy only."""

import numpy as np

from jaxkv.viz.cache_picture import LINE, WIDTH, svg, text

MAX_SAMPLES = 64
LABEL, AFTER, TOP = 132, 150, 34


def output_svg(lengths: np.ndarray, logprobs: np.ndarray, finished: np.ndarray, figures: str) -> str:
    """One drawing of a run's samples.

    Args:
      lengths: int[num_prompts, num_samples], tokens of each sample.
      logprobs: float[num_prompts, num_samples, max_new], in nats.
      finished: bool[num_prompts, num_samples], ended by an end token.
      figures: the line above the samples.
    """
    num_samples, max_new = logprobs.shape[1:]
    counts, values, ended = lengths.reshape(-1), logprobs.reshape(-1, max_new), finished.reshape(-1)
    shown = min(len(counts), MAX_SAMPLES)
    height, pitch = (14, 18) if shown <= 16 else (9, 11)
    step = min(16.0, (WIDTH - LABEL - AFTER) / max_new)
    parts = [text(0, 12, figures), text(0, 27, "a cell for each token, the darker the less probable")]
    for nth in range(shown):
        y, prompt, sample = TOP + nth * pitch, *divmod(nth, num_samples)
        name = f"prompt {prompt}" + (f", sample {sample}" if num_samples > 1 else "")
        parts.append(text(0, y + height / 2 + 3.5, name, size=11 if height > 12 else 9))
        levels = np.clip(-values[nth, : counts[nth]] / 5, 0, 1)
        looks = np.rint(levels * 8).astype(int)  # nine shades: one path each
        for look in np.unique(looks):
            boxes = "".join(
                f"M{LABEL + i * step:.4g} {y:g}h{step * 0.9:.3g}v{height}h-{step * 0.9:.3g}z"
                for i in np.flatnonzero(looks == look)
            )
            parts.append(f'<path d="{boxes}" fill="hsl(265 50% {80 - 5.5 * look:g}%)"/>')
        mean = float(values[nth, : counts[nth]].mean()) if counts[nth] else 0.0
        words = f"{counts[nth]} tokens, {mean:.2f} nats" + (", end" if ended[nth] else "")
        parts.append(text(WIDTH - 2, y + height / 2 + 3.5, words, anchor="end", size=11 if height > 12 else 9))
    top = TOP + shown * pitch
    if len(counts) > shown:
        parts.append(text(0, top + 12, f"and {len(counts) - shown} more samples"))
        top += LINE
    return svg(parts, top + 4, f"{len(counts)} samples: {figures}")
