"""Models and tokenizers made on the spot: nothing to download. One token is one byte, so texts get split within characters."""

from pathlib import Path

import tokenizers
import transformers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

import jaxkv

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE without merges, as GPT-2's family has it: ids 0 to 255 are bytes in an order of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _wrapped(inner, chat)


def blank_stripping_tokenizer(*, chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Byte fallback and a leading blank that decoding takes away, as Llama's family has it."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {f"▁{chr(c)}": 256 + i for i, c in enumerate(range(97, 123))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(inner, chat)


def _wrapped(inner: tokenizers.Tokenizer, chat: bool) -> transformers.PreTrainedTokenizerFast:
    out = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    out.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    out.chat_template = TEMPLATE if chat else None
    return out


def save_model(folder: Path, *, chat: bool = False, max_seq_len: int = 128, **changes) -> Path:
    """A random two-layer Llama and its byte tokenizer, in a Hugging Face folder."""
    tokenizer = byte_tokenizer(chat=chat)
    config = {
        "family": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_seq_len": max_seq_len,
        "rope": jaxkv.Rope(rotary_dim=8),
        "tie_embeddings": True,
        "eos_token_ids": (tokenizer.eos_token_id,),
        **changes,
    }
    jaxkv.save(jaxkv.Decoder(jaxkv.ModelConfig(**config), rngs=nnx.Rngs(0)), folder)
    tokenizer.save_pretrained(folder)
    return folder
