"""From a source of tensors to a `Decoder`: everything is checked first, then each parameter is filled, placed and let go.

The host holds at most one parameter and the tensor being read at any time, beyond what is already placed.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.config import ModelConfig
from jaxkv.families import Tensor, family_of
from jaxkv.model.decoder import Decoder, parameter_name
from jaxkv.sharding import sharding_of
from jaxkv.weights.bar import bar
from jaxkv.weights.matching import match
from jaxkv.weights.source import Source


def stored_dtype(source: Source) -> str:
    """The dtype that most of a source's elements have, float32 for those no model runs in."""
    counts: dict[str, int] = {}
    for shape, dtype in source.tensors.values():
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    dtype = max(counts, key=lambda d: counts[d], default="float32")
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def assemble(config: ModelConfig, source: Source, *, dtype: str | None, mesh: jax.sharding.Mesh | None) -> Decoder:
    """Build the decoder and fill it.

    Args:
      config: its dtype is replaced.
      source: where the tensors are.
      dtype: of the parameters; None keeps the source's.
      mesh: devices to spread the parameters over, see `jaxkv.sharding`.

    Raises:
      ValueError: the source does not fit the configuration, or the mesh does not; nothing has been read then.
    """
    config = dataclasses.replace(config, dtype=dtype or stored_dtype(source))
    found = match(config, source)
    by_parameter: dict[str, list[Tensor]] = {}
    for tensor in family_of(config.family).tensors(config):
        by_parameter.setdefault(tensor.parts[0].parameter, []).append(tensor)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=None, mesh=mesh)))
    flat = [(path, variable, parameter_name(path)) for path, variable in nnx.to_flat_state(state)]
    shardings = {name: sharding_of(config, name, mesh) for _, _, name in flat}
    total = sum(math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for _, v, _ in flat)
    filled = []
    with bar("loading", total) as shown:
        for path, variable, name in flat:
            host = _fill(variable.shape, jnp.dtype(variable.dtype), by_parameter[name], found, source)
            shown.update(host.nbytes)
            filled.append((path, variable.replace(_place(host, shardings[name]))))
            del host
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _fill(
    shape: tuple[int, ...], dtype: np.dtype, tensors: list[Tensor], found: Mapping[str, str], source: Source
) -> np.ndarray:
    """One parameter on the host, from the tensors that hold its parts."""
    first = tensors[0]
    if len(tensors) == 1 and len(first.parts) == 1 and not first.parts[0].index and first.parts[0].axes is None:
        return source.read(found[first.name]).astype(dtype, copy=False).reshape(shape)
    host = np.empty(shape, dtype)
    for tensor in tensors:
        data, row = source.read(found[tensor.name]), 0
        for part in tensor.parts:
            view = part.view(host)
            rows = tensor.rows(view)
            view[...] = data[row : row + rows].reshape(view.shape)
            row += rows
    return host


def _place(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Copy to the device; never a view of the host's memory, which XLA could not reuse when the parameter is donated."""
    if sharding is None:
        return jnp.array(host, copy=True)
    return jax.device_put(host, sharding, may_alias=False)
