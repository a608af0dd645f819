"""How byte-level BPE cuts a text into words before it merges, by the name in `tokenizer.ggml.pre`.

Each expression cuts what those before it left: a match is a piece, and so is what stands between two matches. The expressions are
those of the models' own tokenizers, where llama.cpp has other ones that its engine can run.

Source: llama.cpp, `src/llama-vocab.cpp` at 00ad355 (names, expressions, which take whole words, which begin with a token).
"""

from typing import NamedTuple

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+#|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*#"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_DEEPSEEK = "[一-龥\u0800-一가-\ud7ff]+"
# Letters with upper and lower case, in the order of their code points.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ"
    "ῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_SOUTH_EAST_ASIAN = (
    "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
    "\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7af\u1100-\u11ff]+"
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_TEKKEN = _CAMEL_CASE.replace("#", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_GPT4O = _CAMEL_CASE.replace("#", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_NO_HAN = (f"{_UPPER[:-1]}&&[^\\p{{Han}}]]", f"{_LOWER[:-1]}&&[^\\p{{Han}}]]")
_KIMI = r"\p{Han}+|" + _GPT4O.replace(_UPPER, _NO_HAN[0]).replace(_LOWER, _NO_HAN[1]).replace(r"[\r\n/]*", r"[\r\n]*")
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
_JAIS2 += "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_EXAONE_MOE = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_ASCII_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_LINE_BREAKS = r"[^\n]+|[\n]+"


class Split(NamedTuple):
    """How a text becomes words.

    Attributes:
      expressions: applied one after the other.
      whole_words: a word that is in the vocabulary is one token, whatever the merges say.
      begin: texts begin with the begin token, where the file does not say whether they do.
      nfc: texts are normalised to NFC first, as the models' own tokenizers do.
      spaces: "bytes" where words are spelled in GPT-2's letters for bytes; "visible" where they are as written but for blanks,
        which are U+2581; "plain" where they are as written.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    begin: bool = False
    nfc: bool = False
    spaces: str = "bytes"


_DIGITS_GPT2 = Split((r"\p{N}", _GPT2))
_DEEPSEEK3 = Split((r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}[\r\n]*|{_LINES}"))
_LLAMA3_SPLIT = Split((_LLAMA3,), whole_words=True, begin=True)

_SPLITS: dict[str, Split] = {
    "default": Split((_ASCII_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "minicpm5": Split((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words=True),
    "deepseek-llm": Split(
        ("[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK_DEEPSEEK, r"\p{N}+")
    ),
    "deepseek-coder": Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK, r"\p{N}")),
    "spark2_5": Split((r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": Split(("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK, _YOUTU), whole_words=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "jais-2": Split((_JAIS2,)),
    "qwen35": Split((_QWEN35,), nfc=True),
    "viking": Split((_BLOOM, r"\p{N}")),
    "tekken": Split((_TEKKEN,), whole_words=True, begin=True),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "chameleon": Split(
        (
            "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )", r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        ),
        begin=True,
    ),
    "granite-embed-multi-97m": Split((_GPT4O,), whole_words=True),
    "superbpe": Split((r"\p{N}+", _THOUSANDS)),
    "seed-coder": Split((_SEED,)),
    "kimi-k2": Split((_KIMI,)),
    "ufakzeka": Split((_QWEN2.removeprefix(f"{_CONTRACTION}|"),)),
    "afmoe": Split((_THOUSANDS, _SOUTH_EAST_ASIAN, rf"{_PUNCTUATED}[\r\n]*|{_LINES}")),
    "laguna": Split((_LINE_BREAKS, _QWEN2)),
    "sarvam-moe": Split((_LINE_BREAKS,), spaces="visible"),
    "whitespace": Split((r"\S+",), spaces="plain"),
}  # fmt: skip
_ALIKE: tuple[tuple[Split, str], ...] = (
    (_LLAMA3_SPLIT, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (Split((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (Split((_GPT2,)), "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais"),
    (Split((_GPT2,)), "trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"),
    (_DIGITS_GPT2, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (Split((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen"),
    (Split((_QWEN2,)), "kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (Split((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (Split((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Split((_THOUSANDS, _GPT4O)), "tiny_aya cohere2moe"),
    (Split((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Split((_LINE_BREAKS,), begin=True, spaces="visible"), "gemma4 granite-embed-multi-311m"),
)
SPLITS = {**_SPLITS, **{name: split for split, names in _ALIKE for name in names.split()}}
"""Every name that llama.cpp knows."""
