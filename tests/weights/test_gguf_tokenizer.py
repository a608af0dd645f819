"""Tokenizers from GGUF metadata, against the tokenizers their vocabularies come from."""

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_writing import add_entry, finish
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxkv.weights.gguf_file import GGUFFile
from jaxkv.weights.gguf_tokenizer import build_tokenizer, implied_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 1984, isn't it? WE'LL see: 3.14159",
    "  two spaces, a\ttab\n\n\nand lines  ",
    "naïve café, 你好 🙂 e\u0301",
    "<|start|>user\nhello<|end|><tool> x<tool>",
    "",
    " ",
]
CORPUS = [t * 3 for t in TEXTS] + ["the lazy the quick 12 123 1234 don't won't they'll <|x|>"] * 5
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def written(path: Path, ggml: dict[str, Any], *, architecture: str = "llama", chat_template: str | None = None) -> GGUFFile:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.context_length", 64)
    for key, value in ggml.items():
        add_entry(writer, f"tokenizer.ggml.{key}", value)
    if chat_template is not None:
        writer.add_string("tokenizer.chat_template", chat_template)
    writer.add_tensor("x", np.zeros(1, np.float32))
    finish(writer)
    return GGUFFile(path)


def byte_level(split: str, *, digits: bool = False, nfc: bool = False) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level tokenizer trained on the texts, as Hugging Face would have it, and its GGUF entries."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True)] * digits + steps)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda t: vocab[t])
    kinds = [CONTROL if t in special else USER_DEFINED if t == "<tool>" else NORMAL for t in tokens]
    merges = [" ".join(m) if isinstance(m, list) else m for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    entries = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges}
    return tokenizer, entries | {"bos_token_id": vocab["<|start|>"], "eos_token_id": vocab["<|end|>"]}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-2", {"split": GPT2_SPLIT}),
        ("smollm", {"split": GPT2_SPLIT, "digits": True}),
        ("llama-bpe", {"split": LLAMA3_SPLIT}),
        ("qwen2", {"split": QWEN2_SPLIT, "nfc": True}),
    ],
)
def test_byte_level(name: str, options: dict, tmp_path: Path) -> None:
    original, entries = byte_level(**options)
    tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries | {"pre": name}))
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == original.encode(text).ids, text
        if "e\u0301" not in text or not options.get("nfc"):
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer.bos_token == "<|start|>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.model_max_length == 64
    assert "<|end|>" not in tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True)


def test_begin_and_end_tokens_where_the_file_says_so(tmp_path: Path) -> None:
    _, entries = byte_level(GPT2_SPLIT)
    plain = build_tokenizer(written(tmp_path / "a.gguf", entries))("ab").input_ids
    begin, end = entries["bos_token_id"], entries["eos_token_id"]
    both = entries | {"add_bos_token": True, "add_eos_token": True}
    assert build_tokenizer(written(tmp_path / "b.gguf", both))("ab").input_ids == [begin, *plain, end]
    only = entries | {"add_bos_token": False, "add_eos_token": True}
    assert build_tokenizer(written(tmp_path / "c.gguf", only))("ab").input_ids == [*plain, end]
    assert build_tokenizer(written(tmp_path / "d.gguf", both))("ab", add_special_tokens=False).input_ids == plain


def test_the_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    _, entries = byte_level(GPT2_SPLIT)
    template = "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries, chat_template=template))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>user: hi<|end|>"


def sentencepiece_entries(*, prefix: bool) -> tuple[Any, dict[str, Any]]:
    """A SentencePiece model trained on the texts, and its GGUF entries."""
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    kinds = [
        UNKNOWN if processor.is_unknown(i) else CONTROL if processor.is_control(i) else BYTE if processor.is_byte(i) else NORMAL
        for i in ids
    ]
    entries = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [float(processor.get_score(i)) for i in ids],
        "token_type": kinds,
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return processor, entries


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    processor, entries = sentencepiece_entries(prefix=prefix)
    architecture = "llama" if prefix else "gemma3"
    tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries, architecture=architecture))
    for text in TEXTS:
        if not text or "\n" in text:  # the trainer takes texts line by line, so it never saw a line's end
            continue
        ids = tokenizer(text).input_ids
        assert ids == [processor.bos_id(), *processor.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


def test_implied_merges_follow_the_vocabulary() -> None:
    vocab = {piece: i for i, piece in enumerate(["a", "b", "c", "bc", "ab", "abc"])}
    assert implied_merges(vocab) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_implied_merges_follow_the_scores_where_there_are_any() -> None:
    vocab = {piece: i for i, piece in enumerate(["a", "b", "c", "bc", "ab"])}
    assert implied_merges(vocab, [0.0, 0.0, 0.0, -2.0, -1.0]) == [("a", "b"), ("b", "c")]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_words_in_the_vocabulary_are_taken_whole_after_the_begin_token(pre: str, tmp_path: Path) -> None:
    """Files of older converters do not say whether texts begin with a token; llama.cpp then goes by the name, and so do we."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abcd", "<|begin|>"]
    begin = len(tokens) - 1
    entries = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [NORMAL] * begin + [CONTROL], "merges": ["a b"]}
    tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries | {"bos_token_id": begin}))
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcd").input_ids) == ["<|begin|>", "abcd"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcab", add_special_tokens=False).input_ids) == ["ab", "c", "ab"]
    for said, expected in ((False, ["abcd"]), (True, ["<|begin|>", "abcd"])):
        tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries | {"bos_token_id": begin, "add_bos_token": said}))
        assert tokenizer.convert_ids_to_tokens(tokenizer("abcd").input_ids) == expected


def test_bpe_over_visible_blanks(tmp_path: Path) -> None:
    tokens = ["a", "b", "\u2581", "\u2581a", "\n", *(f"<0x{i:02X}>" for i in range(256))]
    entries = {"model": "gemma4", "tokens": tokens, "token_type": [NORMAL] * 5 + [BYTE] * 256, "merges": ["\u2581 a"]}
    tokenizer = build_tokenizer(written(tmp_path / "t.gguf", entries))
    ids = tokenizer("b a\né").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["b", "\u2581a", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "b a\né"


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert build_tokenizer(written(tmp_path / "t.gguf", {"model": "gpt2"})) is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "bert"}, r"t\.gguf has an unsupported tokenizer\.ggml\.model='bert' \(supported: gpt2, gemma4, llama\)"),
        ({"pre": "newer"}, r"t\.gguf: unsupported tokenizer\.ggml\.pre='newer' \(supported: a\.x-4\.0, afmoe"),
        ({"merges": ["no such"]}, r"t\.gguf: the merge 'no such' of tokenizer\.ggml\.merges is not in its vocabulary"),
        ({"eos_token_id": 10_000}, r"t\.gguf has an incomplete tokenizer"),
    ],
)
def test_what_is_not_supported_is_named(entries: dict, message: str, tmp_path: Path) -> None:
    _, good = byte_level(GPT2_SPLIT)
    with pytest.raises(ValueError, match=message):
        build_tokenizer(written(tmp_path / "t.gguf", good | entries))
