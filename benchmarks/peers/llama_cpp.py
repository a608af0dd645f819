"""llama.cpp through its Python binding: rows that are refilled as they end, by its own batches of sequences.

pip install llama-cpp-python gguf
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

CHUNK = 512
"""Prompt tokens in one batch: its default."""

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FORMATS = {
    "F32": (np.float32, gguf.GGMLQuantizationType.F32),
    "F16": (np.float16, gguf.GGMLQuantizationType.F16),
    "BF16": (np.uint16, gguf.GGMLQuantizationType.BF16),
}
"""Of each of safetensors' names: NumPy's type that holds the bits, and GGUF's name."""


def _tensors(folder: Path):
    """Name, format and array of everything in a folder's safetensors; bfloat16 as its bits."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                flat = np.frombuffer(data[8 + size + begin : 8 + size + end], FORMATS[entry["dtype"]][0])
                yield name, entry["dtype"], flat.reshape(entry["shape"])


def _convert(model: str, target: str) -> None:
    """A plain Llama as GGUF, weights to the bit and no tokenizer; q and k rows in the order of interleaved rotary."""
    config = json.loads((Path(model) / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"this adapter converts plain Llamas, not {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    for name, kind, array in _tensors(Path(model)):
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            number, _, rest = stem.removeprefix("model.layers.").partition(".")
            new = f"blk.{number}.{LAYER[rest]}.weight"
            if rest in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if "q_proj" in rest else kv_heads
                array = array.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        else:
            new = f"{OUTSIDE[stem]}.weight"
        if array.ndim == 1:  # norms are float32 there
            wide = (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array.astype(np.float32)
            writer.add_tensor(new, wide)
        else:
            writer.add_tensor(new, np.ascontiguousarray(array).view(np.uint8), raw_dtype=FORMATS[kind][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    """One cache for all rows; each step decodes every row and takes further prompt tokens as far as a batch has room."""

    static = False
    version = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(self, job: Any):
        path = job.converted("llama.gguf", lambda target: _convert(job.model, target))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        kinds = {"float32": FORMATS["F32"][1], "float16": FORMATS["F16"][1], "bfloat16": FORMATS["BF16"][1]}
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = job.rows * (job.length + 1), job.rows, True
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = job.threads
        params.type_k = params.type_v = int(kinds[job.dtype])
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        memory, batch = llama_cpp.llama_get_memory(self.context), llama_cpp.llama_batch_init(CHUNK, 0, 1)
        llama_cpp.llama_memory_clear(memory, False)
        waiting, done = list(range(len(prompts))), [[] for _ in prompts]
        working: dict[int, int] = {}  # row to prompt
        sent = [0] * len(prompts)
        while waiting or working:
            for row in range(rows):
                if waiting and row not in working:
                    working[row] = waiting.pop(0)
            batch.n_tokens, asked = 0, []
            for decoding in (True, False):  # rows that decode go first, prompts share what room is left
                for row, i in working.items():
                    text = prompts[i] + done[i]
                    if (sent[i] >= len(prompts[i])) == decoding:
                        for token in text[sent[i] : sent[i] + CHUNK - batch.n_tokens]:
                            self._add(batch, token, sent[i], row)
                            sent[i] += 1
                        if sent[i] == len(text):
                            batch.logits[batch.n_tokens - 1] = True
                            asked.append((row, i, batch.n_tokens - 1))
            if status := llama_cpp.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode gave {status}")
            for row, i, place in asked:
                logits = llama_cpp.llama_get_logits_ith(self.context, place)
                view = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,))
                done[i].append(int(view.argmax()))
                if len(done[i]) == new_tokens[i]:
                    llama_cpp.llama_memory_seq_rm(memory, row, -1, -1)
                    del working[row]
        llama_cpp.llama_batch_free(batch)
        return done

    @staticmethod
    def _add(batch: Any, token: int, position: int, row: int) -> None:
        n = batch.n_tokens
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = token, position, 1, row, False
        batch.n_tokens = n + 1
