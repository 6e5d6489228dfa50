"""Frozen weights lent to other processes: what arrives, and what is not taken for them."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from tempfile import mkstemp
from types import SimpleNamespace

import pytest
import torch

from pentad.core.errors import InfraFailure, RunError, WrongWeights
from pentad.models.joined import join, join_with_room
from pentad.samplers.remote import RoleSampler
from pentad.sync.lent import files_of_handles, lend, open_lent, remove_files


def weights(device="cpu"):
    """Three parameters, two of them side by side in one memory, and a buffer of another dtype."""
    shapes = {"q": (4, 6), "k": (2, 6), "o": (6, 4)}
    made = {n: torch.randn(s, device=device).to(torch.bfloat16) for n, s in shapes.items()}
    joined = {n: torch.nn.Parameter(x, requires_grad=False) for n, x in made.items()}
    if device == "cpu":
        join([joined["q"], joined["k"]])
    else:
        join_with_room([joined["q"], joined["k"]], 16)
    return joined | {"bias": torch.arange(5, dtype=torch.float32, device=device)}


def sent(loan):
    return json.loads(json.dumps(asdict(loan.weights)))


def test_lent_weights_keep_their_values_and_writes_of_the_borrower_stay_its_own():
    mine = weights()
    before = {name: tensor.clone() for name, tensor in mine.items()}
    loan = lend(mine, "bfloat16:1")
    theirs = open_lent(sent(loan))
    loan.close()  # mapped memory stays valid
    assert all(torch.equal(mine[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in before.items())
    whole = join([theirs["q"], theirs["k"]])
    assert whole.data_ptr() == theirs["q"].data_ptr(), "still side by side"
    mine["o"].zero_()
    assert not theirs["o"].any(), "it is the lender's memory"
    theirs["q"].zero_()
    assert torch.equal(mine["q"], before["q"])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"file": 4095}, InfraFailure, "cannot be read"),
        ({"process": 2**22}, InfraFailure, "cannot be read"),
        ({"size": 64}, InfraFailure, "it has probably ended"),
        ({"size": "64"}, InfraFailure, "it has probably ended"),
        ({"process": "1/../self"}, ValueError, "format"),
    ],
)
def test_another_file_is_not_taken_for_the_weights(changes, error, said):
    loan = lend(weights(), "bfloat16:1")
    value = sent(loan)
    value["memory"][0] |= changes
    with pytest.raises(error, match=said):
        open_lent(value)
    loan.close()


def test_a_dtype_or_a_place_that_does_not_exist_is_refused():
    loan = lend(weights(), "bfloat16:1")
    for change in (["__dict__", [4, 6], 0], ["bfloat16", [4, 600], 0]):
        value = sent(loan)
        value["tensors"]["q"] = [0, *change]
        with pytest.raises((RunError, RuntimeError), match=r"no dtype of torch|invalid for input"):
            open_lent(value)
    loan.close()


def test_files_of_handles_are_removed_unless_they_are_those_of_another_process():
    """Named as torch names them; made here, as torch makes them with a GPU only."""
    made, maps = [], []
    for number in range(2):
        file, path = mkstemp(prefix=f"torch_{os.getpid()}_", suffix=f"_{number}", dir="/dev/shm")
        os.ftruncate(file, 4096)
        maps.append(mmap(file, 4096))
        os.close(file)
        made.append(path)
    loan = lend(weights(), "bfloat16:1")
    found = [entry for entry in files_of_handles() if entry[0] in made]
    assert sorted(path for path, _ in found) == sorted(made)
    found[1][1] += 1  # by now another file has this name
    remove_files(asdict(loan.weights) | {"files": found})
    assert [Path(path).exists() for path, _ in found] == [False, True]
    Path(found[1][0]).unlink()
    loan.close()


def test_a_sampler_that_reads_other_frozen_weights_does_not_sample():
    sampler = RoleSampler(SimpleNamespace(name="rollout-0"), None)

    async def call(method, lent):
        return "bfloat16:2"

    sampler.call = call
    asyncio.run(sampler._borrow({"digest": "bfloat16:2"}))
    with pytest.raises(WrongWeights, match="rollout-0 reads frozen weights with digest bfloat16:2"):
        asyncio.run(sampler._borrow({"digest": "bfloat16:1"}))


@pytest.mark.gpu
def test_another_process_on_the_gpu_reads_and_finds_the_room():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    mine = weights("cuda")
    code = (
        "import json, sys; from pentad.sync.lent import open_lent\n"
        "from pentad.models.joined import join_with_room\n"
        "made = open_lent(json.loads(sys.argv[1]))\n"
        "address = made['q'].data_ptr()\n"
        "wide = join_with_room([made['q'], made['k']], 16)\n"
        "same = wide.data_ptr() == address\n"
        "print(json.dumps([same, wide[:6].tolist(), made['bias'].tolist()]))\n"
        "wide[6:] = 7\n"
    )
    value = json.dumps(sent(lend(mine, "bfloat16:1")))
    done = subprocess.run([sys.executable, "-c", code, value], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same, rows, bias = json.loads(done.stdout)
    assert same and rows == [*mine["q"].tolist(), *mine["k"].tolist()]
    assert bias == mine["bias"].tolist()
    wide = join_with_room([mine["q"], mine["k"]], 16)
    assert bool((wide[6:] == 7).all()), "the room is one memory"
