"""Handles of tensors on a GPU, as they come from outside: what is no handle is refused."""

import base64
import copy
import json
import pickle

import pytest
import torch

from pentad.sync import group

GOOD = {
    "dtype": "bfloat16",
    "shape": [4, 3],
    "offset": 8,
    "handle": [base64.b64encode(bytes(65)).decode(), 40, 512, False, "Lw==", 0, "AA==", True],
}


def changed(**fields):
    return {**copy.deepcopy(GOOD), **fields}


def with_field(place, value):
    made = copy.deepcopy(GOOD)
    made["handle"][place] = value
    return made


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


BOMB = base64.b64encode(pickle.dumps(Bomb())).decode()
BAD = {
    "a pickle": BOMB,
    "nothing": {},
    "a list": [1],
    "a field too many": changed(more=1),
    "no dtype of torch": changed(dtype="nn"),
    "a dtype that is no text": changed(dtype=7),
    "a private name": changed(dtype="__dict__"),
    "a negative size": changed(shape=[-1]),
    "a size that is no number": changed(shape=["4"]),
    "a truth for a size": changed(shape=[True]),
    "a shape that is no list": changed(shape=12),
    "an endless shape": changed(shape=[1 << 60]),
    "a shape beyond its memory": changed(shape=[4, 4]),
    "an offset beyond its memory": changed(offset=9),
    "a negative offset": changed(offset=-1),
    "too few fields": changed(handle=GOOD["handle"][:-1]),
    "too many fields": changed(handle=[*GOOD["handle"], 1]),
    "fields that are no list": changed(handle="x"),
    "no base64": with_field(0, "*"),
    "a long handle": with_field(4, "A" * 5000),
    "a negative size of memory": with_field(1, -1),
    "a text for a number": with_field(2, "0"),
    "a number for a truth": with_field(3, 1),
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_what_is_no_handle_is_refused_before_torch_sees_it(value, monkeypatch):
    monkeypatch.setattr(group, "rebuild_cuda_tensor", lambda *given: pytest.fail("torch saw it"))
    with pytest.raises(ValueError, match="."):
        group.open_gpu_handle(json.loads(json.dumps(value)), 0)


def test_a_handle_becomes_the_arguments_that_torch_gave(monkeypatch):
    seen = []
    monkeypatch.setattr(group, "rebuild_cuda_tensor", lambda *given: seen.append(given))
    group.open_gpu_handle(json.loads(json.dumps(GOOD)), 3)
    ((_, shape, stride, offset, _, dtype, device, *fields),) = seen
    assert (shape, stride, offset, device) == ((4, 3), (3, 1), 8, 3)
    assert dtype is torch.bfloat16
    assert fields == [bytes(65), 40, 512, False, b"/", 0, b"\0", True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_the_tensor(tmp_path):
    import subprocess
    import sys

    tensor = torch.arange(24, device="cuda", dtype=torch.float32).view(2, 3, 4)[1]
    handle = json.dumps(group.gpu_handle(tensor))
    code = (
        "import json, sys, torch; from pentad.sync.group import open_gpu_handle\n"
        "print(open_gpu_handle(json.loads(sys.argv[1]), 0).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, handle], capture_output=True, text=True)
    assert done.stdout.strip() == str(tensor.tolist()), done.stderr
