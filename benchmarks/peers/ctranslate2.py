"""CTranslate2, in static batches. Its prompts are strings of its own vocabulary, one per token.

pip install ctranslate2 transformers torch
"""

import json
from pathlib import Path
from typing import Any

import ctranslate2


def _convert(model: str, folder: str) -> None:
    """The converter's own form; special tokens that the tokenizer lacks, which it cannot read again, get a name."""
    ctranslate2.converters.TransformersConverter(model).convert(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: "" if key.endswith("_token") and value is None else value for key, value in config.items()})
    )


class Engine:
    """Prompts are not padded: of a ragged batch only the shortest prompt's tokens are computed together, the rest step by step."""

    static = True
    version = f"ctranslate2 {ctranslate2.__version__}"

    def __init__(self, job: Any):
        if job.dtype not in ctranslate2.get_supported_compute_types("cpu"):
            raise ValueError(f"ctranslate2 computes {job.dtype} on no CPU like this")
        folder = job.converted("ctranslate2", lambda path: _convert(job.model, path))
        self.vocabulary = json.loads((Path(folder) / "vocabulary.json").read_text())
        self.model = ctranslate2.Generator(folder, device="cpu", compute_type=job.dtype, intra_threads=job.threads)

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        results = self.model.generate_batch(
            [[self.vocabulary[token] for token in prompt] for prompt in prompts],
            max_length=new_tokens[0],
            end_token=[],
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]
