"""The GGUF container: whatever is cut or damaged is an error that names the file, and never a read past its end."""

import io
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.weights import load
from jaxkv.weights.gguf_file import GGUFFile


def sample(path: Path) -> bytes:
    """A small file with every kind of entry and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_int64("a.signed", -3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größer")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.strings", ["x", "", "zz"])
    writer.add_tensor("matrix", np.arange(64, dtype=np.float32).reshape(2, 32))
    packed = gguf.quants.quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "test.gguf"
    path.write_bytes(content)
    return path


def test_entries_and_tensors(whole: bytes, tmp_path: Path) -> None:
    file = GGUFFile(written(tmp_path, whole))
    expected = {"a.signed": -3, "a.float": 0.5, "a.bool": True, "a.string": "größer"}
    expected |= {"a.numbers": [1, 2, 3], "a.strings": ["x", "", "zz"], "llama.block_count": 2, "general.architecture": "llama"}
    assert {k: file.metadata[k] for k in expected} == expected
    assert {t.name: t.shape for t in file.tensors.values()} == {"matrix": (2, 32), "packed": (4, 32)}
    np.testing.assert_array_equal(file.read("matrix"), np.arange(64, dtype=np.float32).reshape(2, 32))
    np.testing.assert_allclose(file.read("packed"), np.linspace(-1, 1, 128).reshape(4, 32), atol=0.01)


def test_every_cut_is_noticed(whole: bytes, tmp_path: Path) -> None:
    end = max(t.offset + t.nbytes for t in GGUFFile(written(tmp_path, whole)).tensors.values())
    for size in range(end):
        path = written(tmp_path, whole[:size])
        with pytest.raises(ValueError, match=r"test\.gguf (is truncated|is no GGUF file)"):
            GGUFFile(path)


def test_a_cut_in_the_data_names_the_tensor(whole: bytes, tmp_path: Path) -> None:
    end = max(t.offset + t.nbytes for t in GGUFFile(written(tmp_path, whole)).tensors.values())
    path = written(tmp_path, whole[: end - 1])
    with pytest.raises(ValueError, match=rf"truncated: tensor packed ends at byte {end}, the file has {end - 1}"):
        load(path)


@given(data=st.data())
def test_damaged_headers_never_do_worse_than_an_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    if not (folder / "sample.gguf").exists():
        sample(folder / "sample.gguf")
    content = bytearray((folder / "sample.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = written(folder, bytes(content))
    try:
        file = GGUFFile(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017, whether there is an error depends on the damage
    else:
        for name, tensor in file.tensors.items():
            assert file.read(name).shape == tensor.shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file: it has only 0 bytes"),
        (b"PK\x03\x04" + bytes(100), r"is no GGUF file: it begins with b'PK\\x03\\x04', expected b'GGUF'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "is GGUF of version 1; supported are 2 and 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "is GGUF of version 50331648; .* little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "is truncated or corrupt: the key of entry 0"),
    ],
)
def test_what_is_no_gguf(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, content))


def one_tensor(kind: int) -> bytes:
    """A file with one tensor "x" of 256 elements of a type."""
    out = io.BytesIO()
    out.write(b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (0).to_bytes(8, "little"))
    out.write((1).to_bytes(8, "little") + b"x" + (1).to_bytes(4, "little") + (256).to_bytes(8, "little"))
    out.write(kind.to_bytes(4, "little") + (0).to_bytes(8, "little"))
    out.write(bytes(-out.tell() % 32 + 4096))
    return out.getvalue()


READ = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S".split()
READ += "IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4".split()


@pytest.mark.parametrize("kind", READ)
def test_quantizations_that_are_read(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, one_tensor(GGMLQuantizationType[kind]))
    assert GGUFFile(path).read("x").shape == (256,)


@pytest.mark.parametrize("kind", ["I8", "I32", "Q8_1", "Q8_K"])
def test_quantizations_that_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, one_tensor(GGMLQuantizationType[kind]))
    with pytest.raises(ValueError, match=rf"has tensors in unsupported quantization: {kind}"):
        GGUFFile(path)


def test_an_unknown_quantization_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor x has the unknown quantization type 77"):
        GGUFFile(written(tmp_path, one_tensor(77)))
