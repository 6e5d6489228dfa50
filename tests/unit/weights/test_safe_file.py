"""Blocks of a safetensors file, read into memory of any kind."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from pentad.core.errors import RunError
from pentad.weights import files
from pentad.weights.files import SafeFile, checksum

GIVEN = {
    "matrix": torch.randn(23, 17, generator=torch.Generator().manual_seed(0)),
    "cube": torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "vector": torch.arange(50, dtype=torch.int64),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(params=[64, 1 << 20])
def file(request, tmp_path, monkeypatch):
    """With a buffer smaller than a tensor, and with a larger one."""
    monkeypatch.setattr(files, "BUFFER_BYTES", request.param)
    save_file(GIVEN, tmp_path / "x.safetensors")
    return SafeFile(tmp_path / "x.safetensors")


def blocks(shape):
    """All, and a few parts along every dim."""
    ranges = [[(0, n), (n // 3, n), (n // 3, min(n, n // 2 + 1)), (n, n)] for n in shape]
    return itertools.product(*ranges)


def outs(shape, dtype):
    """Memory of that shape: plain, of another dtype, transposed, every second row."""
    yield torch.zeros(shape, dtype=dtype)
    yield torch.zeros(shape, dtype=torch.float64)
    if shape:
        yield torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        yield torch.zeros(2 * shape[0], *shape[1:], dtype=dtype)[::2]


@pytest.mark.parametrize("name", GIVEN)
def test_every_block_lands_in_every_kind_of_memory(file, name):
    tensor = GIVEN[name]
    for box in blocks(tensor.shape):
        expected = tensor[tuple(slice(start, stop) for start, stop in box)]
        assert torch.equal(file.read(name, box), expected)
        for out in outs(expected.shape, tensor.dtype):
            file.read_into(name, box, out)
            assert torch.equal(out, expected.to(out.dtype))


def test_a_block_outside_the_tensor_is_an_error_not_its_neighbour(file):
    with pytest.raises(AssertionError, match="vector"):
        file.read("vector", ((0, 51),))


def test_checksums_are_of_the_bytes(file):
    for name, tensor in GIVEN.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        assert file.checksum(name) == checksum(data)


@pytest.mark.parametrize("size", [0, 7, 4096, 4097, 3 * 4096 + 100])
def test_a_checksum_tells_what_disks_do(size):
    """Flipped bits, lost and exchanged blocks, other lengths; in pieces it is the same number."""
    data = bytes(torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).tolist())
    right = checksum(memoryview(data))
    cut = min(size, 4096)
    assert checksum(memoryview(data[cut:]), checksum(memoryview(data[:cut]))) == right
    wrong = [data[:at] + bytes([data[at] ^ 128]) + data[at + 1 :] for at in range(0, size, 61)]
    wrong += [data + b"\0", data[:-1]] if size else [b"\0"]
    if size > 2 * 4096:
        wrong.append(data[4096:8192] + data[:4096] + data[8192:])
        wrong.append(bytes(4096) + data[4096:])
    assert all(checksum(memoryview(other)) != right for other in wrong)


def test_threads_do_not_disturb_each_other(file):
    def read(_):
        out = torch.zeros(23, 17, dtype=torch.float64)
        file.read_into("matrix", ((0, 23), (0, 17)), out)
        return torch.equal(out, GIVEN["matrix"].double()) and file.checksum("vector")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read, range(60)))) == 1


def test_a_file_that_is_cut_while_it_is_read_is_told(file):
    with file.path.open("r+b") as handle:
        handle.truncate(file.path.stat().st_size - 30)
    last = max(file.offsets, key=file.offsets.get)
    box = tuple((0, n) for n in GIVEN[last].shape)
    with pytest.raises(RunError, match=f"ended within {last}; it was truncated while read"):
        file.read(last, box)
