"""Every family decodes greedily as transformers does, token for token, prompts of different lengths in one batch."""

from pathlib import Path

import numpy as np
import pytest
from families.tiny_models import FAMILIES, tiny_model, tokens

from jaxkv import generate
from jaxkv.weights import load

pytestmark = pytest.mark.torch

LENGTHS, NEW_TOKENS = (3, 7, 12, 20), 32
CLOSE = 1e-3  # two candidates nearer than this may change places with the order of additions


def clear_prompts(model) -> tuple[list[np.ndarray], list[list[int]]]:
    """One prompt of each length whose greedy continuation has no near ties, and that continuation, by recomputing everything.

    Several candidates of each length run at once, padded on the right, which a causal model does not see.
    """
    import torch

    candidates = [tokens(length, seed=seed) for length in LENGTHS for seed in range(8)]
    lengths = torch.tensor([len(c) for c in candidates])
    rows, lead = torch.arange(len(candidates)), torch.full((len(candidates),), float("inf"))
    ids = torch.zeros(len(candidates), max(LENGTHS) + NEW_TOKENS, dtype=torch.long)
    for row, candidate in enumerate(candidates):
        ids[row, : len(candidate)] = torch.from_numpy(candidate)
    with torch.no_grad():
        for step in range(NEW_TOKENS):
            width = max(LENGTHS) + step
            best = model(ids[:, :width], use_cache=False).logits[rows, lengths + step - 1].topk(2)
            lead = torch.minimum(lead, best.values[:, 0] - best.values[:, 1])
            ids[rows, lengths + step] = best.indices[:, 0]
    chosen = [next(i for i in rows if lengths[i] == length and lead[i] > CLOSE) for length in LENGTHS]
    return [candidates[i] for i in chosen], [ids[i, lengths[i] : lengths[i] + NEW_TOKENS].tolist() for i in chosen]


# The logits of every family are compared always, and GPT-NeoX's tokens by beam search.
QUICK = ("opt-350m", "llama", "gemma3_text")


@pytest.mark.parametrize("case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path)
    prompts, expected = clear_prompts(oracle)
    model, _ = load(tmp_path)
    for page_size in (1, 16, 5) if request.config.getoption("--slow") else (5,):
        out = generate(model, [p.tolist() for p in prompts], max_new_tokens=NEW_TOKENS, page_size=page_size, eos_token_id=())
        assert np.asarray(out.tokens)[:, 0].tolist() == expected, f"page size {page_size}"
