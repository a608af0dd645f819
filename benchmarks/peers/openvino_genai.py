"""OpenVINO GenAI: its continuous batching pipeline, fed with at most as many requests as there are rows.

pip install openvino-genai 'optimum-intel[openvino]' torch
"""

from typing import Any

import numpy as np
import openvino
import openvino_genai


def _convert(model: str, folder: str) -> None:
    """What `optimum-cli export openvino` does, weights as they are."""
    from optimum.exporters.openvino import main_export

    main_export(model, folder, task="text-generation-with-past", library_name="transformers", convert_tokenizer=True)


class Engine:
    """The cache has room for all rows, prompts are split into chunks beside decoding rows, and no prefix is kept."""

    static = False
    version = f"openvino-genai {openvino_genai.__version__}"

    def __init__(self, job: Any):
        folder = job.converted("openvino", lambda path: _convert(job.model, path))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = job.rows
        scheduler.num_kv_blocks = job.rows * (job.length // 16 + 2)
        scheduler.enable_prefix_caching = False
        types = {"float32": openvino.Type.f32, "bfloat16": openvino.Type.bf16, "float16": openvino.Type.f16}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder,
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": types[job.dtype],
                "KV_CACHE_PRECISION": types[job.dtype],
                "INFERENCE_NUM_THREADS": job.threads,
            },
        )
        self.requests = 0

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        waiting, working, done = list(range(len(prompts))), {}, [[] for _ in prompts]
        while waiting or working:
            while waiting and len(working) < rows:
                i = waiting.pop(0)
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens[i], True, False
                ids = openvino.Tensor(np.array([prompts[i]], np.int64))
                working[i] = self.pipeline.add_request(self.requests, ids, config)
                self.requests += 1
            self.pipeline.step()
            for i in [i for i, handle in working.items() if handle.get_status() != openvino_genai.GenerationStatus.RUNNING]:
                done[i] = list(working.pop(i).read_all()[0].generated_ids)
        return done
