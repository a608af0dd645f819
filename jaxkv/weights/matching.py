"""Which tensor of a file is which of the family's table, and if they do not fit, the one cause rather than its many symptoms."""

import collections
import re

from jaxkv.config import ModelConfig
from jaxkv.families import family_of
from jaxkv.weights.source import Source

DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHOWN = 8
# What quantized checkpoints keep beside or instead of a weight: GPTQ and AWQ, compressed-tensors and FP8, bitsandbytes, HQQ, MLX.
_QUANTIZED = re.compile(
    r".*(\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv)?|weight_zero_point|input_scale|SCB|W_q|scales|biases|"
    r"weight\.(absmax|quant_map|quant_state\..*|nested_absmax|nested_quant_map)))"
)


def match(config: ModelConfig, source: Source) -> dict[str, str]:
    """Find every tensor of the family's table in the source.

    Returns:
      Name in the table -> name in the source.

    Raises:
      ValueError: one line that says what is wrong: another form of names, a quantization, or the first of all tensors that are
        missing, left over, of a wrong shape or of a dtype that holds no weights.
    """
    family = family_of(config.family)
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    faults: list[str] = []
    for tensor in family.tensors(config):
        spellings = source.spellings(tensor.name)
        name = next((s for s in spellings if s in source.tensors), None)
        if name is None:
            missing[spellings[0]] = f"missing {spellings[0]} {list(tensor.shape)}"
            continue
        found[tensor.name] = name
        shape, dtype = source.tensors[name]
        if shape != tensor.shape:
            faults.append(f"{name} has shape {list(shape)}, expected {list(tensor.shape)}")
        if dtype not in DTYPES:
            faults.append(f"{name} has dtype {dtype}, supported are {', '.join(DTYPES)}")
    tied = source.spellings(family.lm_head) if config.tie_embeddings else ()
    harmless = [*source.harmless, *map(re.escape, tied)]
    left = [n for n in source.tensors.keys() - set(found.values()) if not any(re.fullmatch(p, n) for p in harmless)]
    faults += [*missing.values(), *(f"unknown tensor {n} {list(source.tensors[n][0])}" for n in left)]
    if faults:
        cause = _quantization(left) or _prefix(list(missing), left, family.prefix)
        if cause:
            raise ValueError(f"{source.where} {cause}")
        faults.sort()
        shown = "; ".join(faults[:_SHOWN]) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")
        raise ValueError(f"{source.where} does not fit its {config.family} configuration ({len(faults)} faults): {shown}")
    return found


def _quantization(left: list[str]) -> str | None:
    """Whether what is left over belongs to a quantization."""
    foreign = sorted(n for n in left if _QUANTIZED.fullmatch(n))
    if not foreign:
        return None
    return (
        f"is quantized ({len(foreign)} tensors such as {foreign[0]}), which is not supported: take the model's unquantized weights, "
        "or a GGUF file of it"
    )


def _prefix(missing: list[str], left: list[str], usual: str) -> str | None:
    """Whether most of what is missing is there under a longer name, or a shorter one."""
    cores = {m.removeprefix(usual): m for m in missing}
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in left:
        at = 0
        while True:
            if wanted := cores.get(name[at:]):
                found[name[:at], wanted.removesuffix(name[at:])] += 1
                break
            at = name.find(".", at) + 1
            if not at:
                break
    if not found:
        return None
    (theirs, ours), count = found.most_common(1)[0]
    if count < 2 or count < len(missing) * 0.8:
        return None
    return (
        f"has tensors whose names begin with {theirs!r} where {ours!r} is expected ({count} of them): it was saved from within "
        "another module (torch.compile, DataParallel, a model of more than text); save the language model alone, or rename them"
    )
