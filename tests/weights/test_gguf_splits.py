"""The table of `tokenizer.ggml.pre`: every expression runs, loses nothing, and cuts as the models' own tokenizers do."""

import pytest
from tokenizers import Regex, pre_tokenizers

from jaxkv.weights.gguf_splits import SPLITS

TEXT = "Hello I'LL go 1234567 你好ー世界 fooBAR  x\n\n  y!? 한국 Ça ಕನ್ನಡ ๒ ΐ\u212a IMGIMGABZ <sentinel:1>\t½"


def cut(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in SPLITS[name].expressions]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", SPLITS)
def test_nothing_is_lost(name: str) -> None:
    assert "".join(cut(name, TEXT)) == TEXT


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "I'LL 12345\n\n x", ["I", "'LL", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "a12 b", ["a", "1", "2", " b"]),
        ("qwen35", "ಕನ್ನಡ 1", ["ಕನ್ನಡ", " ", "1"]),
        ("tekken", "fooBar HTTPServer 12", ["foo", "Bar", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "don'T fooBar 1234", ["don'T", " foo", "Bar", " ", "123", "4"]),
        ("deepseek-v3", "a 1234 你好 (x", ["a", " ", "123", "4", " ", "你好", " (", "x"]),
        ("deepseek-llm", "a b12\n你好", ["a", " b", "12", "\n", "你好"]),
        ("deepseek-coder", "a b12", ["a", " b", "1", "2"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("superbpe", "a 1234567 b", ["a ", "1", "234", "567", " b"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "a 12345 ไทย", ["a", " ", "12", "345", " ", "ไทย"]),
        ("kimi-k2", "ab你好c 1234", ["ab", "你好", "c", " ", "123", "4"]),
        ("viking", "a, b12", ["a", ",", " b", "1", "2"]),
        ("bailingmoe", "I'll\n\nx", ["I", "'ll", "\n\n", "x"]),
        ("seed-coder", "x!\n12", ["x", "!", "\n", "1", "2"]),
        ("exaone-moe", "a b c1", ["a b c", "1"]),
        ("minicpm5", "a1234", ["a", "123", "4"]),
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("ufakzeka", "ali'nin", ["ali", "'nin"]),
        ("youtu", "한국abc", ["한국", "abc"]),
        ("chameleon", "a  b\t1", ["a", "  ", "b", "\t", "1"]),
        ("spark2_5", "ab 1234\n\n", ["ab", " ", "1", "2", "3", "4", "\n", "\n"]),
    ],
)
def test_words(name: str, text: str, words: list[str]) -> None:
    assert cut(name, text) == words


def test_which_take_whole_words_and_begin_with_a_token() -> None:
    assert {n for n, s in SPLITS.items() if s.begin} == set(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon gemma4 "
        "granite-embed-multi-311m".split()
    )
    assert {n for n, s in SPLITS.items() if s.whole_words} == set(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken youtu minicpm5 "
        "granite-embed-multi-97m".split()
    )
