"""Files in and out without an oracle: what is broken is said before anything is built, and a failed save leaves what was there."""

import dataclasses
import gc
import json
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from tiny import byte_tokenizer

import jaxkv.weights.saving
from jaxkv import Decoder
from jaxkv.config import ModelConfig, Rope
from jaxkv.sharding import partition_of, sharding_of
from jaxkv.weights import load, load_config, save
from jaxkv.weights.safetensors_file import SafetensorsSource

CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    max_seq_len=64,
    rope=Rope(rotary_dim=8),
    eos_token_ids=(2,),
    bos_token_id=1,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(Decoder(CONFIG, rngs=nnx.Rngs(0)), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, name: str, **changes: object) -> None:
    fields = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(fields | changes))


def edit_tensors(folder: Path, edit) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def leaves(model: Decoder) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def test_what_is_saved_is_loaded_bit_for_bit(folder: Path) -> None:
    model, tokenizer = load(folder)
    assert model.config == CONFIG == load_config(folder)
    assert tokenizer is None
    for a, b in zip(leaves(model), leaves(Decoder(CONFIG, rngs=nnx.Rngs(0))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype("float32")])
def test_a_dtype_may_be_asked_for(dtype: object, folder: Path) -> None:
    model, _ = load(folder, dtype=dtype)
    assert {x.dtype for x in leaves(model)} == {jnp.dtype(dtype)}
    assert model.config.dtype == jnp.dtype(dtype).name


def test_a_tokenizer_is_saved_along_and_loaded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(chat=True)
    save(Decoder(CONFIG, rngs=nnx.Rngs(0)), tmp_path / "m", tokenizer=tokenizer)
    _, again = load(tmp_path / "m")
    assert again("hello, world").input_ids == tokenizer("hello, world").input_ids
    assert again.chat_template == tokenizer.chat_template


def test_end_tokens_of_the_generation_config_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_config(folder).eos_token_ids == (2, 9)


def test_unsupported_dtype(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of .* got 'int8'"):
        load(folder, dtype="int8")


def test_all_tensors_that_do_not_fit_are_named_at_once(folder: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((40, 32), np.float32)
        tensors["lm_head.weight"] = np.zeros((97, 16), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((97, 32), np.int8)

    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match="4 faults") as caught:
        load(folder)
    text = str(caught.value)
    assert str(folder) in text
    assert "missing model.norm.weight [32]" in text
    assert "unknown tensor model.layers.7.mlp.up_proj.weight [40, 32]" in text
    assert "lm_head.weight has shape [97, 16], expected [97, 32]" in text
    assert "model.embed_tokens.weight has dtype I8, supported are float32" in text


def test_known_harmless_tensors_are_no_surplus(folder: Path) -> None:
    want = jax.tree.leaves(load(folder)[0])
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}))
    for got, same in zip(jax.tree.leaves(load(folder)[0]), want, strict=True):
        np.testing.assert_array_equal(got, same)


def test_an_untied_output_matrix_beside_a_tied_one_is_no_surplus(folder: Path) -> None:
    rewrite(folder, "config.json", tie_word_embeddings=True)
    assert load(folder)[0].lm_head is None


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "header"), (7, "header"), (100, "header"), (-1, "incomplete"), (-5000, "incomplete")],
)
def test_truncated_safetensors(size: int, message: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"model\.safetensors is not a whole safetensors file: .*{message}"):
        load(folder)


def test_a_file_that_is_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)


def test_missing_shards_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jaxkv.weights.saving, "SHARD_BYTES", 20_000)
    save(load(folder)[0], tmp_path / "sharded")
    files = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    load(tmp_path / "sharded")
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of its {len(files)} weight files: {files[1].name}"):
        load(tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load(tmp_path / "sharded")


def test_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "none.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=f"no such file or folder: {name}"):
            load(name)
    with pytest.raises(ValueError, match="is a weight file; give its folder"):
        load(folder / "model.safetensors")
    (folder / "config.json").rename(folder / "config.bak")
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load(folder)


def test_a_folder_with_other_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"it has pytorch_model\.bin, which must be converted to safetensors first"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\xff"])
def test_a_broken_config(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json (is not valid JSON|holds list, expected an object)"):
        load(folder)


def test_unsupported_fields_name_the_file(folder: Path) -> None:
    rewrite(folder, "config.json", hidden_act="mish")
    with pytest.raises(ValueError, match=r"config\.json: llama configuration with unsupported hidden_act='mish'"):
        load(folder)


def test_a_hub_model_without_a_network() -> None:
    with pytest.raises(ConnectionError, match="'no-one/no-model' is no local folder, is not in the hub's cache"):
        load("no-one/no-model")


def test_a_failed_save_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(jaxkv.weights.saving, "write_safetensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(Decoder(CONFIG, rngs=nnx.Rngs(1)), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_saving_over_a_sharded_model_leaves_no_old_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load(folder)[0]
    with monkeypatch.context() as small:
        small.setattr(jaxkv.weights.saving, "SHARD_BYTES", 20_000)
        save(model, tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("mine")
    save(model, tmp_path / "m")
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    load(tmp_path / "m")


def test_saving_onto_a_file(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        save(Decoder(CONFIG, rngs=nnx.Rngs(1)), tmp_path / "m")


def numpy_bytes() -> int:
    """Bytes that NumPy arrays made since `tracemalloc.start()` hold at this moment."""
    of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([of_numpy]).traces)


def test_loading_holds_one_parameter_on_the_host_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a tensor has been read, the host holds the parameter it belongs to, that tensor and the one read before it.

    A transfer to the device may keep its array for a moment longer, so an excess counts only if it does not go away.
    """
    wide = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=32, num_kv_heads=16)
    model = Decoder(wide, rngs=nnx.Rngs(0))
    save(model, tmp_path / "m")
    sizes = [x.nbytes for x in leaves(model)]
    largest_tensor = 4 * 512 * 256
    limit = max(sizes) + 2 * largest_tensor + 2**16
    assert limit < sum(sizes) / 4
    original, reads = SafetensorsSource.read, 0

    def read(self: SafetensorsSource, name: str) -> np.ndarray:
        nonlocal reads
        tensor = np.array(original(self, name))  # its memory is NumPy's own, so that it is counted
        assert tensor.nbytes <= largest_tensor
        end = time.monotonic() + 20
        while (held := numpy_bytes()) > limit:
            assert time.monotonic() < end, f"{held:,} bytes are held after reading {name}, {limit:,} are allowed"
            jax.block_until_ready(jax.live_arrays())
            gc.collect()
        reads += 1
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", read)
    tracemalloc.start()
    try:
        load(tmp_path / "m")
    finally:
        tracemalloc.stop()
    assert reads == 3 + 9 * wide.num_layers


def test_partitions() -> None:
    gated, plain = CONFIG, dataclasses.replace(CONFIG, mlp="plain")
    assert partition_of(gated, "layers.0.attention.qkv", 2) == PartitionSpec("tensor")
    assert partition_of(gated, "layers.0.attention.out", 2) == PartitionSpec(None, "tensor")
    assert partition_of(gated, "layers.1.mlp.up", 2) == PartitionSpec(None, "tensor")
    assert partition_of(plain, "layers.1.mlp.up", 2) == PartitionSpec("tensor")
    assert partition_of(gated, "layers.1.mlp.down", 2) == PartitionSpec(None, "tensor")
    assert partition_of(gated, "layers.1.mlp.down", 16) == PartitionSpec(), "40 is no multiple of 16"
    assert partition_of(gated, "embed", 2) == PartitionSpec()


def test_a_mesh_that_does_not_fit() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",))
    with pytest.raises(ValueError, match=r"2 kv heads cannot be split over 4 devices \(mesh axis 'tensor'\)"):
        sharding_of(CONFIG, "embed", mesh)
    with pytest.raises(ValueError, match=r"the mesh needs an axis 'tensor', got \('data',\)"):
        sharding_of(CONFIG, "embed", jax.sharding.AbstractMesh((2,), ("data",)))


def test_a_model_on_two_devices_gives_the_same_logits(folder: Path) -> None:
    script = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jaxkv.weights import load
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
        one, two = load({str(folder)!r})[0], load({str(folder)!r}, mesh=mesh)[0]
        shard = two.layers[0].attention.qkv.get_value().addressable_shards[0].data.shape
        assert shard == (1, 4, 8, 32), shard
        tokens = jnp.arange(24).reshape(2, 12)
        np.testing.assert_allclose(jax.jit(lambda m: m(tokens))(two), one(tokens), atol=1e-5, rtol=0)
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
