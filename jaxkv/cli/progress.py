"""The figures of a run, said after it."""

import time
from typing import Any

import jax

from jaxkv.programs.progress import COMPILES


class Clock:
    """Separates compilation, prefill and decode of one `generate`, by its compiler events and its tokens' times."""

    def __init__(self):
        self.start = self.ready = self.end = time.perf_counter()
        self.times: list[float] = []
        self.first: dict[int, float] = {}  # of each prompt
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == COMPILES and not self.times:
            self.ready = time.perf_counter()

    def token(self, prompt: int) -> None:
        """One token of a prompt has come."""
        now = time.perf_counter()
        self.first.setdefault(prompt, now)
        self.times.append(now)

    def stop(self) -> None:
        """The last token has come."""
        self.end = time.perf_counter()

    def figures(self, prompt_tokens: int) -> dict[str, float | None]:
        """Tokens/s: of the prompts until each has its first token, of the tokens after that; and seconds of compilation."""
        prefilled = max(self.first.values(), default=self.end)
        later = sum(t > prefilled for t in self.times)
        return {
            "prompt_tokens_per_second": _rate(prompt_tokens, prefilled - self.ready),
            "decode_tokens_per_second": _rate(later, self.times[-1] - prefilled) if later else None,
            "compile_seconds": self.ready - self.start,
            "generate_seconds": self.end - self.ready,
        }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def summary(stats: dict[str, Any]) -> str:
    """The figures of a run in one line."""

    def speed(name: str) -> str:
        return "" if stats[name] is None else f" at {stats[name]:.1f} tokens/s"

    return (
        f"prompt: {stats['prompt_tokens']} tokens{speed('prompt_tokens_per_second')} | "
        f"decode: {stats['generated_tokens']} tokens{speed('decode_tokens_per_second')} | "
        f"pages: {stats['pages_used']} of {stats['page_size']} tokens | compile: {stats['compile_seconds']:.1f} s | "
        f"kernels: {stats['kernels']}"
    )
