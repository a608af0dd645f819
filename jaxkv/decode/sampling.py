"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p.

The filters act in transformers' order: temperature, top-k, top-p, min-p, each on what the ones before it left. None of them sorts
the vocabulary: the least kept logit is found bit by bit, by 32 passes of counting (top-k) or of adding up probability (top-p).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxkv.config import shown
from pallas_kernels.row_tiles import in_row_tiles
from pallas_kernels.varying import fori_loop, vary_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Every value may be a number, a traced scalar, or an array with one value per prompt.

    None is off, as in transformers: no filter, and for the temperature logits as they are, i.e. 1.0.

    Args:
      temperature: logits are divided by it; 0.0 is greedy (the filters then do not matter).
      top_k: keep the k most probable tokens; 0 keeps all. Tokens as probable as the k-th all stay.
      top_p: keep the most probable tokens whose probabilities add up to at least this, in (0, 1].
      min_p: keep tokens at least this share as probable as the most probable one, in [0, 1].

    Raises:
      ValueError: a value known now (not traced) is out of range; the message shows it.

    Examples:
      >>> Sampling(temperature=0.8, top_p=0.95).always_greedy
      False
      >>> Sampling(top_p=1.5)
      Traceback (most recent call last):
        ...
      ValueError: top_p must be in (0, 1], got 1.5

    Source: top-p, Holtzman et al. 2020 (arXiv:1904.09751); min-p, Nguyen et al. 2024 (arXiv:2407.01082); the filters' order and ties
    as in transformers.
    """

    temperature: float | Array | None = 0.0
    top_k: int | Array | None = 0
    top_p: float | Array | None = 1.0
    min_p: float | Array | None = 0.0

    def __post_init__(self):
        # jax rebuilds pytrees with placeholders of its own for leaves; only what is surely a value is checked here.
        for name in _RULES:
            value = getattr(self, name)
            if _known(value) or isinstance(value, str | bool | bytes):
                _check(name, value)

    def per_row(self, rows: int) -> "Sampling":
        """The same with every value an array of `rows` entries.

        Raises:
          ValueError: a value is an array of another length, or is no number.
        """
        values = {}
        for field in _RULES:
            given = getattr(self, field)
            given = _OFF[field] if given is None else given
            dtype, of = np.int32 if field == "top_k" else np.float32, np  # NumPy's functions compile nothing
            if isinstance(given, Tracer) or (isinstance(given, jax.Array) and len(given.devices()) > 1):
                of = jnp
            if not isinstance(given, Tracer):
                known = _check(field, given)
                given = given if of is jnp else known
            x = of.asarray(given).astype(dtype)
            if x.ndim > 1 or (x.ndim == 1 and x.shape[0] != rows):
                raise ValueError(f"{field} must be one value or one per prompt ({rows}), got shape {x.shape}")
            values[field] = of.broadcast_to(x, (rows,))
        return Sampling(**values)

    def at(self, rows: Int[Array, " rows"]) -> "Sampling":
        """The values of some rows, out of arrays."""
        return jax.tree.map(lambda x: x[rows], self)

    @property
    def always_greedy(self) -> bool:
        """Whether it is known now that no row samples, so that sampling need not be compiled."""
        return _known(self.temperature) and not np.any(np.asarray(self.temperature) > 0)


def _known(x: object) -> bool:
    return isinstance(x, (int, float, np.ndarray, np.generic)) or (isinstance(x, jax.Array) and not isinstance(x, Tracer))


_FINITE = float(np.finfo(np.float32).max)
_RULES: dict[str, tuple[Callable, str]] = {
    "temperature": (lambda x: (x >= 0) & (x <= _FINITE), ">= 0 and finite"),
    "top_k": (lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31), "an integer >= 0 (0 keeps all tokens) and below 2^31"),
    "top_p": (lambda x: (x >= float(np.finfo(np.float32).tiny)) & (x <= 1), "in (0, 1]"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
}
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""What None stands for."""


def _check(name: str, value: Any) -> np.ndarray:
    """Raise ValueError unless a value is a number, or several, and in range."""
    test, rule = _RULES[name]
    try:
        array = np.asarray(value)
    except Exception:  # whatever an object's own conversion may raise
        raise ValueError(f"{name} must be {rule}, got {shown(value)}") from None
    numbers = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if not numbers or not np.all(test(array.astype(np.float64))):
        raise ValueError(f"{name} must be {rule}, got {value if _known(value) and numbers else shown(value)}")
    return array


def as_sampling(given: Any) -> Sampling:
    """The `sampling` argument; None is greedy.

    Raises:
      ValueError: it is something else.
    """
    if given is None:
        return Sampling()
    if isinstance(given, Sampling):
        return given
    way = ""
    if isinstance(given, dict):
        way = ": pass jaxkv.Sampling(**sampling)"
    elif isinstance(given, int | float | np.number) and not isinstance(given, bool):
        way = f": pass jaxkv.Sampling(temperature={shown(given)})"
    raise ValueError(f"sampling must be a jaxkv.Sampling or None, got {shown(given)}{way}")


def sortable(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """float32 to integers in the same order; NaN counts as the least."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    x = jnp.where(x == 0, 0.0, x)  # -0.0 is 0.0's equal; x + 0.0 would do, but XLA takes it for x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _greatest(holds: Callable[[Array], Array], rows: int, *like: Array) -> Array:
    """Per row the greatest u32 for which `holds` (true up to some value, false above; of `like`), found bit by bit."""

    def set_bit(i: Array, least: Array) -> Array:
        tried = least | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(holds(tried), tried, least)

    return fori_loop(jnp.int32(0), jnp.int32(32), set_bit, jnp.zeros(rows, jnp.uint32), *like)


def _top_k_mask(keys: UInt32[Array, "rows vocab"], top_k: Int[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    count = jnp.where(top_k > 0, jnp.minimum(top_k, keys.shape[1]), keys.shape[1])
    least = _greatest(lambda t: jnp.sum(keys >= t[:, None], axis=1, dtype=jnp.int32) >= count, keys.shape[0], keys, count)
    return keys >= least[:, None]


def _top_p_mask(keys: Array, probs: Float[Array, "rows vocab"], top_p: Float[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    wanted = top_p * jnp.sum(probs, axis=1)
    least = _greatest(
        lambda t: jnp.sum(jnp.where(keys >= t[:, None], probs, 0.0), axis=1) >= wanted, keys.shape[0], keys, wanted
    )
    return (keys >= least[:, None]) | (top_p >= 1)[:, None]


def filtered_logits(logits: Float[Array, "rows vocab"], sampling: Sampling) -> Float[Array, "rows vocab"]:
    """Logits of the distribution that is sampled from: after temperature and filters, -inf where a token is filtered out.

    Args:
      logits: float32.
      sampling: with arrays, one entry per row. Rows with temperature 0 keep their most probable tokens only.
    """
    temperature, ks, ps, least = (jnp.asarray(getattr(sampling, name)) for name in _RULES)
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    keys = sortable(scaled)

    def keep_all(filter: Array) -> Array:
        return vary_like(jnp.ones(scaled.shape, bool), scaled, filter)

    top_k = jnp.where(greedy, 1, ks)
    kept = lax.cond(jnp.any(top_k > 0), lambda t: _top_k_mask(keys, t), keep_all, top_k)
    scaled = jnp.where(kept, scaled, -jnp.inf)

    def top_p(p: Array) -> Array:
        return _top_p_mask(sortable(scaled), jax.nn.softmax(scaled, axis=-1), p)

    kept = lax.cond(jnp.any(ps < 1), top_p, keep_all, ps)
    scaled = jnp.where(kept, scaled, -jnp.inf)
    best = jnp.max(scaled, axis=1, keepdims=True)
    kept = scaled >= best + jnp.log(least)[:, None]
    return jnp.where(kept, scaled, -jnp.inf)


BLOCK = 512
"""Entries of a row that are searched together, and then the blocks' greatest (docs/measurements.md, "Argmax over the vocabulary")."""


def _first_greatest(x: Float[Array, "rows n"]) -> Int[Array, " rows"]:
    """Index of each row's greatest entry, the first of equals; the last index where there is none for NaN."""
    top = jnp.max(x, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == top, index, x.shape[1] - 1), axis=-1)


def _argmax(x: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """`_first_greatest` for long rows: in blocks, then in the best of them. XLA's own argmax goes number by number on CPU."""
    rows, vocab = x.shape
    width = min(BLOCK, vocab)
    blocks = jnp.pad(x, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf).reshape(rows, -1, width)
    best = _first_greatest(lax.optimization_barrier(jnp.max(blocks, axis=-1)))
    place = _first_greatest(blocks[jnp.arange(rows, dtype=jnp.int32), best])
    return jnp.minimum(best * width + place, vocab - 1)


def gumbel_noise(keys: Key[Array, " rows"], vocab: int) -> Float[Array, "rows vocab"]:
    """Noise whose argmax, added to logits, is a sample; a row's noise depends on its key alone."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)


def sample(
    logits: Float[Array, "rows vocab"],
    sampling: Sampling,
    keys: Key[Array, " rows"] | None,
    *,
    deterministic: bool = False,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Choose a token per row.

    Args:
      logits: float32, the model's own.
      sampling: numbers, or arrays of one entry per row.
      keys: one per row, or None when every row is greedy.
      deterministic: a row's log-probability does not depend on the number of rows, to the last bit.

    Returns:
      Tokens i32[rows], and their log-probabilities under the sampled distribution, f32[rows] (0.0 for greedy rows).

    Raises:
      ValueError: keys or values of `sampling` are not one for each row.
    """
    if not isinstance(logits, jax.Array | np.ndarray) or logits.ndim != 2:
        raise ValueError(f"logits must be float32 [rows, vocab], got {shown(logits)}")
    best = _argmax(logits)
    if keys is None:
        return best, jnp.zeros(logits.shape[0], jnp.float32)
    if getattr(keys, "shape", ())[:1] != logits.shape[:1]:
        rows = logits.shape[0]
        raise ValueError(f"keys must be a key for each of the {rows} rows, jax.random.split(key, {rows}), got {shown(keys)}")
    sampling = as_sampling(sampling).per_row(logits.shape[0])
    filtered = filtered_logits(logits, sampling)
    drawn = _argmax(filtered + gumbel_noise(keys, logits.shape[1]))
    greedy = sampling.temperature == 0
    return jnp.where(greedy, best, drawn), jnp.where(greedy, 0.0, token_logprobs(filtered, drawn, deterministic=deterministic))


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], *, deterministic: bool = False
) -> Float[Array, " rows"]:
    """log softmax(logits) at the tokens, float32. Every log-probability of jaxkv comes from here, so that all agree.

    `deterministic`: a row's bits do not depend on the number of rows.
    """
    total = in_row_tiles(log_normaliser, (logits,), ()) if deterministic else log_normaliser(logits)
    return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - total


def log_normaliser(logits: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """log of the sum of exp(logits).

    Over whole rows, unlike the greatest token: summed in blocks, a row's last bit depended on the number of rows (jaxlib 0.12).
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    return (jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)) + top)[:, 0]
