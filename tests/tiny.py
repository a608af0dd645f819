"""Tokenizers made on the spot, one token a byte: nothing to download, and every text can be split within a character."""

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

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
