"""ONNX Runtime GenAI, in static batches padded on the right: with padding on the left, its CPU attention attends to the padding.

pip install onnxruntime-genai onnx onnx-ir transformers torch
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai


def _convert(job: Any, folder: str) -> None:
    """The package's own builder, weights as they are."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    files = ["-i", job.model, "-o", folder, "-c", f"{folder}.work"]
    done = subprocess.run([*builder, *files], cwd=Path(folder).parent, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError("its builder does not convert this model")


class Engine:
    """Padding is an end token, which no prompt contains. The text's end is set to the vocabulary's last token, since one is required."""

    static = True
    version = f"onnxruntime-genai {version('onnxruntime-genai')}"

    def __init__(self, job: Any):
        if job.dtype != "float32":
            raise ValueError(f"its models for the CPU are float32 or quantized, not {job.dtype}")
        folder = job.converted("onnxruntime", lambda path: _convert(job, path))
        model = json.loads((Path(folder) / "genai_config.json").read_text())["model"]
        ends = model["eos_token_id"]
        self.pad = ends[0] if isinstance(ends, list) else ends
        options = {"intra_op_num_threads": job.threads}
        changed = {"eos_token_id": model["vocab_size"] - 1, "pad_token_id": self.pad, "decoder": {"session_options": options}}
        config = onnxruntime_genai.Config(folder)
        config.overlay(json.dumps({"model": changed}))
        self.model = onnxruntime_genai.Model(config)

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        width = max(map(len, prompts))
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=width + new_tokens[0])
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(np.array([prompt + [self.pad] * (width - len(prompt)) for prompt in prompts], np.int32))
        for _ in range(new_tokens[0]):
            generator.generate_next_token()
        return [generator.get_sequence(i)[width:].tolist() for i in range(len(prompts))]
