"""What is laid around blocks: recomputation draws what forward drew, and compiling is announced."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch
from sections import engine_keys
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from pentad.core import kept
from pentad.parallel.blocks import Compiling, _Policy, apply_to_blocks, compile_run, compiling

CPU = torch.device("cpu")


class Block(nn.Module):
    """Draws in three ways, between products that selective checkpointing keeps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_TD):
        h = nn.functional.dropout(self.up(x_TD), 0.5)
        h = h * torch.rand_like(h)
        return x_TD + self.down(h) * torch.bernoulli(torch.full((8,), 0.5))


def gradients(**settings):
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()])
    apply_to_blocks(dict(enumerate(blocks)), engine_keys(**settings), CPU)
    x_TD = torch.randn(5, 8)
    torch.manual_seed(1)
    for block in blocks:
        x_TD = block(x_TD)
    torch.randn(3)  # others draw between forward and backward
    x_TD.square().sum().backward()
    return [parameter.grad for parameter in blocks.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(
    "settings",
    [{"ac_mode": "full"}, {"ac_mode": "selective", "ac_selective": "op"}, {"ac_debug": True}],
    ids=str,
)
def test_what_a_block_draws_is_drawn_again_when_it_is_recomputed(settings):
    plain, after = gradients(gradient_checkpointing=False)
    found, state = gradients(gradient_checkpointing=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert torch.equal(after, state), "and the generator is left as it was"


def test_of_factors_the_small_product_is_kept_and_the_wide_one_is_computed_again():
    """What B gives is as wide as the frozen matrix's result: kept, it would be held twice."""
    policy, ctx = _Policy(4), SimpleNamespace(is_recompute=False)

    def keeps(op, *shapes):
        found = policy(ctx, op, *(torch.empty(shape, device="meta") for shape in shapes))
        return found is CheckpointPolicy.MUST_SAVE

    mm, addmm, grouped = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm
    assert keeps(mm.default, (5, 16), (16, 32)) and keeps(addmm.default, 32, (5, 16), (16, 32))
    assert keeps(mm.default, (5, 16), (16, 4)) and keeps(mm.default, (5, 16), (16, 8))
    assert not keeps(mm.default, (5, 4), (4, 32))
    shapes = [((5, 16), (3, 16, 24)), ((5, 4), (3, 4, 12)), ((5, 4), (3, 4, 12))]  # gate and up
    shapes += [((5, 12), (3, 12, 16)), ((5, 12), (3, 12, 4))]  # down
    assert [keeps(grouped.default, *each) for each in shapes] == [True, False, False, False, True]


def test_compiling_says_that_it_runs_and_how_long_it_took(caplog):
    caplog.set_level(logging.INFO)
    compile_run(torch.sin, backend="eager")
    torch._dynamo.reset()  # it ends the watch of what was compiled before
    compiling.report()
    caplog.clear()
    run = compile_run(lambda x: x.sin() + 1, backend="eager")
    run(torch.randn(4))
    compiling.report()
    compiling.report()
    begun, done = caplog.records
    assert begun.getMessage() == "compiling the model's blocks ..."
    assert done.getMessage().startswith("compiled the model's blocks in ")
    assert all(record.is_notice for record in (begun, done))


def compile_once(what: str) -> list[str]:
    """The lines of a process that compiles the blocks of this model."""
    told: list[str] = []
    watch = Compiling()
    watch.what = what
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pentad.parallel.blocks")
    logger.addHandler(handler)
    try:
        for seconds in (2.0, 0.5):
            watch._begin()
            watch.since = time.monotonic() - seconds
            watch._end()
            watch.report()
    finally:
        logger.removeHandler(handler)
    return told


def test_compiling_says_how_long_it_took_the_last_time(caplog, tmp_path, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again, other = (compile_once(what) for what in ("tiny, d1", "tiny, d1", "tiny, d2"))
    assert first[0] == "compiling the model's blocks (tiny, d1; not known here yet) ..."
    assert first[2] == "compiling the model's blocks ...", "of this process all is known"
    assert again[0] == "compiling the model's blocks (tiny, d1; 2.5 s the last time) ..."
    assert "not known" in other[0], "another layout is another program"
    assert [line[:-1] for line in first[1::2]] == [
        "compiled the model's blocks in 2.0 s (1 graphs so far",
        "compiled the model's blocks in 0.5 s (2 graphs so far",
    ]


@pytest.mark.parametrize("content", ["", "[1]", '{"tiny": "long"}'])
def test_times_that_cannot_be_read_are_not_known(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pentad").mkdir()
    (tmp_path / "pentad" / "compile-seconds.json").write_text(content)
    assert kept.seconds_of("tiny") is None
    kept.note_seconds("tiny", 3.0)
    assert kept.seconds_of("tiny") == 3.0


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept.note_seconds("tiny", 3.0)
    assert kept.last_time("tiny") == "not known here yet"
