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


def greedy(model, prompt: np.ndarray) -> tuple[list[int], float]:
    """transformers' own greedy tokens, by recomputing everything, and the smallest lead a chosen token had."""
    import torch

    ids, lead = torch.from_numpy(prompt).long()[None], float("inf")
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = model(ids, use_cache=False).logits[0, -1].topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[None, :1]], dim=1)
    return ids[0, len(prompt) :].tolist(), lead


def clear_prompts(model) -> tuple[list[np.ndarray], list[list[int]]]:
    """One prompt of each length whose continuation has no near ties, and that continuation."""
    prompts, expected = [], []
    for length in LENGTHS:
        for seed in range(100):
            prompt = tokens(length, seed=seed)
            continuation, lead = greedy(model, prompt)
            if lead > CLOSE:
                break
        prompts.append(prompt)
        expected.append(continuation)
    return prompts, expected


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path)
    prompts, expected = clear_prompts(oracle)
    model, _ = load(tmp_path)
    everything = request.config.getoption("--slow") or case == "gemma3_text"
    for page_size in (1, 16, 5) if everything else (5,):
        out = generate(model, [p.tolist() for p in prompts], max_new_tokens=NEW_TOKENS, page_size=page_size)
        assert np.asarray(out.tokens)[:, 0].tolist() == expected, f"page size {page_size}"
