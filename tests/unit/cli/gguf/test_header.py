"""Faulty and hostile headers are refused with file and field, before anything of their size is created."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import make_checkpoint
from tests.unit.cli.gguf.gguf_files import FaultyFile, write_gguf
from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.header import MAX_HEADER_BYTES, read_header

U64 = 2**64 - 1
STRING, ARRAY, UINT32 = 8, 9, 4


def value(key: str = "a.b") -> FaultyFile:
    return FaultyFile(num_values=1).text(key)


def tensors(*numbers: tuple[tuple[int, ...], int, int], data: int = 0) -> bytes:
    """A file of tensors t0, t1, ... by shape, type and offset, and some data."""
    file = FaultyFile(num_tensors=len(numbers))
    for place, (shape, kind, offset) in enumerate(numbers):
        file.tensor(f"t{place}", shape, kind, offset)
    return file.raw(bytes(-len(file.content) % 32)).content + bytes(data)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "magic: the file is empty"),
        (b"PK\3\4 and more", "magic: the file begins with b'PK\\x03\\x04', not with b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "magic: the file is a Git-LFS pointer"),
        (b"GGUF", "version: it needs 4 bytes or more, and the file has 0 left for it"),
        (FaultyFile(1).content, "version: 1 is not supported; supported are 2, 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: the file is big-endian; files in little"),
        (FaultyFile(num_values=U64).content, "metadata_kv_count: it needs 239,807,672,958,224,170,995 bytes"),
        (FaultyFile(num_tensors=U64).content, "tensor_count: it needs 442,721,857,769,029,238,760 bytes"),
        (FaultyFile(num_values=1).text("a", U64).raw(bytes(9)).content, "metadata 0: a text of 18,446,744,073,709,"),
        (FaultyFile(num_values=1).text("a", 200).raw(bytes(9)).content, "metadata 0: it needs 200 bytes or more"),
        (FaultyFile(num_values=1).text("").raw(bytes(9)).content, "metadata 0: the name '' is not printable"),
        (FaultyFile(num_values=1).text("a\nb").raw(bytes(9)).content, "metadata 0: the name 'a\\nb' is not printable"),
        (FaultyFile(num_values=1).text(b"\xff").raw(bytes(9)).content, "metadata 0: a text is not UTF-8"),
        (value().number("I", 13).content, "a.b: value type 13 is unknown"),
        (value().number("I", 4_000_000_000).content, "a.b: value type 4,000,000,000 is unknown"),
        (value().number("I", STRING).text("", U64).content, "a.b: a text of 18,446,744,073,709,551,615 bytes"),
        (value().number("I", STRING).text("", 1000).content, "a.b: it needs 1,000 bytes or more"),
        (value().number("I", UINT32).content, "a.b: it needs 4 bytes or more, and the file has 0 left for it"),
        (value().number("I", ARRAY).number("I", UINT32).number("Q", U64).content, "a.b: an array of 18,446,744,0"),
        (value().number("I", ARRAY).number("I", UINT32).number("Q", 1 << 20).content, "a.b: it needs 4,194,304 bytes"),
        (value().number("I", ARRAY).number("I", STRING).number("Q", 1 << 20).content, "a.b: it needs 8,388,608 bytes"),
        (value().number("I", ARRAY).number("I", ARRAY).number("Q", 1).content, "a.b: an array of value type 9 is not"),
        (
            FaultyFile(num_values=2).text("a").number("I", 0).raw(b"\1").text("a").raw(bytes(20)).content,
            "a: the key appears twice",
        ),
        (
            value("general.alignment").number("I", UINT32).number("I", 24).content,
            "general.alignment: 24 is not a power of two",
        ),
        (
            value("general.alignment").number("I", UINT32).number("I", 0).content,
            "general.alignment: 0 is not a power of two",
        ),
        (tensors(((1,) * 5, 0, 0)), "t0: it has 5 dimensions; supported are 1 to 4"),
        (
            FaultyFile(num_tensors=1).text("t").number("I", 2**32 - 1).raw(bytes(30)).content,
            "t: it has 4,294,967,295 d",
        ),
        (tensors(((32, 0), 0, 0)), "t0: a dimension of (0, 32) is 0"),
        (tensors(((1 << 62, 1 << 62), 0, 0), data=64), "t0: offset 0 and 85,070,591,730,234,615,865,843,651,857,"),
        (tensors(((32,), 0, 0), data=100), "t0: offset 0 and 128 bytes reach beyond the file, which has 100"),
        (tensors(((32,), 0, 2**63), data=128), "t0: offset 9,223,372,036,854,775,808 and 128 bytes reach beyond"),
        (tensors(((32,), 0, U64 - 31), data=128), "t0: offset 18,446,744,073,709,551,584 and 128 bytes reach beyond"),
        (tensors(((32,), 0, 4), data=256), "t0: offset 4 is not a multiple of the alignment 32"),
        (tensors(((32,), 0, 0), ((32,), 0, 96), data=256), "t1: its bytes overlap another tensor's"),
        (tensors(((33,), 2, 0), data=256), "t0: rows of 33 values are not whole Q4_0 blocks of 32"),
        (tensors(((256,), 16, 0), data=256), "t0: tensor type IQ2_XXS is not supported; supported are F32, F16"),
        (tensors(((32,), 77, 0), data=256), "t0: tensor type 77 is not supported"),
        (
            FaultyFile(num_tensors=2).tensor("t").tensor("t", offset=128).raw(bytes(512)).content,
            "t: the tensor appears twice",
        ),
    ],
)
def test_faulty_header_is_refused_by_field(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CliError) as refused:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.value.message.startswith(f"{path}: {said}")
    assert peak < 1 << 20


def test_header_is_read_within_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = value().number("I", STRING).text("", MAX_HEADER_BYTES).content
    with path.open("wb") as file:
        file.write(content)
        file.truncate(1 << 40)
    with pytest.raises(CliError, match=rf"a\.b: it needs .* a header of {MAX_HEADER_BYTES:,} has .* left for it"):
        read_header(path)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "model.gguf", make_checkpoint(folder / "hf", "llama")).read_bytes()


@given(place=st.integers(0, 8000), replaced=st.binary(min_size=1, max_size=8))
def test_any_change_gives_a_header_or_a_refusal(
    valid: bytes, tmp_path_factory: pytest.TempPathFactory, place: int, replaced: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(valid[:place] + replaced + valid[place + len(replaced) :])
    try:
        header = read_header(path)
    except CliError as error:
        assert error.message.startswith(f"{path}: ")
    else:
        assert all(tensor.offset + tensor.num_bytes <= len(valid) for tensor in header.tensors.values())
