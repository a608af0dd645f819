"""Small tokenizers of every kind, made in memory: byte-level BPE, byte fallback with and without a blank stripped, WordPiece."""

from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "Hello, world's end! n't 're",
    "한국어 한 글",
    "你好，世界",
    "🙂🙂 👩‍👩‍👧‍👦 🇩🇪 ❤️",
    "a  b\n\tc",
    "naïve e\u0301 café",
    "¿Qué?",
    "\ufffd",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
SPACE = "\u2581"


def wrapped(inner: tokenizers.Tokenizer) -> transformers.PreTrainedTokenizerFast:
    out = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    out.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    out.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("日本", normalized=False)])
    return out


def byte_level() -> transformers.PreTrainedTokenizerFast:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    inner.train_from_iterator(TEXTS * 3, trainer)
    return wrapped(inner)


def byte_fallback(*, strip: bool) -> transformers.PreTrainedTokenizerFast:
    words = [SPACE, SPACE * 2, f"{SPACE}a", f"{SPACE}Hello", "b", "한", "世界", "🙂", "\u200d", "\n", "'s", ".", "\ufffd"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)} | {"<unk>": 300}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return wrapped(inner)


def metaspace() -> transformers.PreTrainedTokenizerFast:
    words = [
        "<unk>",
        SPACE,
        SPACE * 2,
        f"{SPACE}a",
        f"{SPACE}Hello",
        "b",
        "한",
        "世界",
        "🙂",
        "\u200d",
        ".",
        "A",
        "ÿ",
        "Ģ",
        "ł",
    ]
    inner = tokenizers.Tokenizer(models.Unigram([(w, -1.0) for w in words], unk_id=0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrapped(inner)


def word_piece() -> transformers.PreTrainedTokenizerFast:
    words = [
        "[UNK]",
        "hello",
        "##ing",
        "world",
        ".",
        ",",
        "'",
        "##s",
        "n",
        "##'",
        "t",
        "한",
        "##국",
        "世",
        "🙂",
        "##\u200d",
        "ÿ",
        "A",
    ]
    inner = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return wrapped(inner)


KINDS = {
    "byte-level BPE": byte_level(),
    "byte fallback, blank stripped": byte_fallback(strip=True),
    "byte fallback": byte_fallback(strip=False),
    "metaspace": metaspace(),
    "WordPiece": word_piece(),
}
