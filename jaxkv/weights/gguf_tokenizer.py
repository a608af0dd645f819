"""A tokenizer from a GGUF file's metadata.

Two kinds of vocabulary occur: byte-level BPE with its merges ("gpt2"), and SentencePiece BPE ("llama"), whose merges are not in
the file and follow from the vocabulary: a piece's score is its rank.
"""

from collections.abc import Sequence
from typing import Any

from jaxkv.families.hf import transformers
from jaxkv.weights.gguf_file import GGUFFile
from jaxkv.weights.gguf_splits import SPLITS, Split
from jaxkv.weights.tokenizer_warning import no_tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"  # SentencePiece's visible space


def gguf_tokenizer(file: GGUFFile) -> Any:
    """As `build_tokenizer`, but None and a `TokenizerWarning` where the file's tokenizer is not supported or broken."""
    try:
        return build_tokenizer(file)
    except ValueError as error:
        no_tokenizer(str(error))
        return None


def build_tokenizer(file: GGUFFile) -> Any:
    """The transformers tokenizer a GGUF file describes, chat template included; None where it describes none.

    Raises:
      ValueError: the kind of tokenizer is not supported, or its entries do not fit together.
    """
    ggml = {k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items() if k.startswith("tokenizer.ggml.")}
    if "tokens" not in ggml:
        return None
    builders = {"gpt2": _bpe, "gemma4": _bpe, "llama": _sentencepiece}
    kind = ggml.get("model")
    if not isinstance(kind, str) or kind not in builders:
        raise ValueError(f"{file.path} has an unsupported tokenizer.ggml.model={kind!r} (supported: {', '.join(builders)})")
    try:
        architecture = file.metadata["general.architecture"]
        backend = builders[kind](ggml, architecture)
        _add_begin_and_end(backend, ggml, kind)
        context, special = file.metadata.get(f"{architecture}.context_length"), _special_tokens(ggml)
        tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=context, **special)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    except Exception as error:  # entries that are missing or of a wrong type make KeyError, TypeError or Rust's own errors
        raise ValueError(f"{file.path} has an incomplete tokenizer: {error!r}") from error
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _special_tokens(ggml: dict[str, Any]) -> dict[str, str]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: ggml.get(f"{key}_token_id") for name, key in ids.items()}
    return {name: ggml["tokens"][i] for name, i in found.items() if i is not None}


def _split(ggml: dict[str, Any]) -> Split:
    name = "gemma4" if ggml["model"] == "gemma4" else ggml.get("pre", "default")
    if name not in SPLITS:
        raise ValueError(f"unsupported tokenizer.ggml.pre={name!r} (supported: {', '.join(sorted(SPLITS))})")
    return SPLITS[name]


def _bpe(ggml: dict[str, Any], architecture: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split(ggml)
    vocab = {token: i for i, token in enumerate(ggml["tokens"])}
    merges = []
    for merge in ggml["merges"]:
        cut = merge.find(" ", 1)  # a token may begin with a blank
        first, second = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {first, second, first + second} <= vocab.keys():
            raise ValueError(f"the merge {merge!r} of tokenizer.ggml.merges is not in its vocabulary")
        merges.append((first, second))
    by_bytes = split.spaces == "bytes"
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words, byte_fallback=not by_bytes)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in split.expressions]
    if by_bytes:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        visible = split.spaces == "visible"
        tokenizer.decoder = decoders.Sequence(
            [*[decoders.Replace(_SPACE, " ")] * visible, decoders.ByteFallback(), decoders.Fuse()]
        )
        if visible:
            tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, ggml)
    return tokenizer


def _sentencepiece(ggml: dict[str, Any], architecture: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = architecture.startswith("gemma")
    # Gemma's files spell runs of spaces as spaces, where the text that is looked up has them as visible ones.
    tokens = [_SPACE * len(t) if gemma and t and not t.strip(" ") else t for t in ggml["tokens"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    byte_fallback = "<0x00>" in vocab
    scores = ggml.get("scores")
    if scores is not None and len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    model = models.BPE(
        vocab=vocab,
        merges=implied_merges(vocab, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    tokenizer = Tokenizer(model)
    prefix = ggml.get("add_space_prefix", not gemma)
    visible = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), visible]) if prefix else visible
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_tokens(tokenizer, {**ggml, "tokens": tokens})
    return tokenizer


def implied_merges(vocab: dict[str, int], scores: Sequence[float] | None = None) -> list[tuple[str, str]]:
    """All ways to join two pieces into a third; the piece of the highest score first, or else the earliest of the vocabulary."""
    found = []
    for piece, rank in vocab.items():
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [(vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
        found += [(-scores[rank] if scores else 0.0, rank, *pair) for pair in pairs]
    found.sort()
    return [(a, b) for *_, a, b in found]


def _add_tokens(tokenizer: Any, ggml: dict[str, Any]) -> None:
    """Tokens that are never cut: control tokens, and those a user defined."""
    from tokenizers import AddedToken

    kinds = ggml.get("token_type") or []
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokens = [t for t, kind in zip(ggml["tokens"], kinds) if kind == wanted and t]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(t, normalized=False, special=special) for t in tokens])


def _add_begin_and_end(tokenizer: Any, ggml: dict[str, Any], kind: str) -> None:
    """Put the begin and end tokens around every text where the file says so."""
    from tokenizers import processors

    usual = kind == "llama" or _split(ggml).begin
    begin = ggml.get("add_bos_token", usual) and ggml.get("bos_token_id") is not None
    end = ggml.get("add_eos_token", False) and ggml.get("eos_token_id") is not None
    ids = [ggml[f"{name}_token_id"] for name, wanted in (("bos", begin), ("eos", end)) if wanted]
    if not ids:
        return
    special = [(ggml["tokens"][i], i) for i in ids]
    first, last = [special[0][0]] if begin else [], [special[-1][0]] if end else []
    single, pair = [*first, "$A", *last], [*first, "$A", *last, *first, "$B:1", *last]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
