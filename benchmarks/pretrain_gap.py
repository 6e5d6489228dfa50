"""What rounding does to pretraining, here and in transformers: gradients, and runs of one recipe.

    python benchmarks/pretrain_gap.py --out OUT --work WORK --size full --runs 0   # gradients alone
    python benchmarks/pretrain_gap.py --out OUT --work WORK --size half --runs 3 --steps 450
    python benchmarks/pretrain_gap.py --out OUT --work WORK --size tiny            # on a CPU

Recipe, weights, batches and peer are those of `pretrain_gpu`. `gradients`: those of both sides in
bfloat16 held against float32, by kind of parameter, at the first weights and after a run: the
relative error; how much of it lasts over the steps that are looked at (1: nothing, their errors are
independent; their number: all of it); and by which share the gradient is too long. `runs`: each
side trains several times, from weights that differ by less than bfloat16 can tell (the same ones on
both sides), so the spread within a side is that of rounding alone. Words at the end override keys
of the recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from pretrain_gpu import FULL, TINY, make_inputs  # noqa: E402
from pretrain_peer import Peer  # noqa: E402

from pentad.config.schema import Config  # noqa: E402
from pentad.core.device import pick_device  # noqa: E402
from pentad.data.tokenizer import load_tokenizer  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.planner.prepare import prepare  # noqa: E402
from pentad.rl.losses import SftLoss  # noqa: E402
from pentad.telemetry.steps import LineWriter  # noqa: E402
from pentad.trainer.inputs import (
    RowReader,
    open_examples,  # noqa: E402
)
from pentad.trainer.rank.learners import build_role  # noqa: E402

Weights = dict[str, Tensor]

HALF = replace(
    FULL,
    model={
        **FULL.model,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 256,
    },
)
"""A quarter of the work."""
SMALL = replace(
    TINY,
    model={
        **TINY.model,
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 128,
    },
    num_bytes=8_000_000,
    length=128,
    batch_size=16,
    per_pass=1024,
    steps=1000,
    lr=2e-3,
)
"""Hundreds of steps on a CPU, a quarter of a second each."""
SIZES = {"full": FULL, "half": HALF, "small": SMALL, "tiny": TINY}
WIDE = (
    "actor.gradient_checkpointing=true",
    "actor.archon.ac_mode=full",
    "actor.archon.enable_compile=false",
)
"""Words of the reference: attention in float32 takes memory."""
COLUMNS = ("error", "lasting", "longer")
SHAKE = 1e-4
"""By which share weights are moved: neighbours in bfloat16 are 4e-3 to 8e-3 apart."""
THEIRS = {
    "model.": "",
    "embed_tokens": "embed",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "self_attn": "attn",
    "mlp.gate.": "ffn.router.",
    "mlp.": "ffn.",
    "_proj": "",
    "lm_head": "head",
}
"""Parts of transformers' names, in the order of replacement -> ours."""


class Side(Protocol):
    masters: Weights
    """By Pentad's names; shapes are each side's own, the order of numbers is one."""

    def train(self, step: int) -> Tensor | float: ...
    def gradients(self, step: int, num: int | None = None) -> tuple[float, Weights]:
        """Loss and gradients of a step's batch, or of its first sequences; nothing is moved."""
        ...

    def forget(self) -> None:
        """The weights are new: the optimizer begins again."""
        ...


class Ours:
    """What every rank of `pentad pretrain` does in a step."""

    def __init__(self, config: Config, device: torch.device) -> None:
        assert config.actor.path is not None and config.total_train_steps is not None
        dims, tokenizer = dims_of(config.actor.path), load_tokenizer(config.actor.path)
        self.data = open_examples("pretrain", config, "train", RowReader(dims, tokenizer))
        self.batch_size = config.train_dataset.batch_size
        self.engine = build_role(
            config,
            "actor",
            device=device,
            temperature=1.0,
            total_steps=config.total_train_steps,
            max_row_tokens=self.data.max_row_tokens,
        )
        self.masters = self.engine.masters

    def train(self, step: int) -> float:
        self._accumulate(step)
        return self.engine.end_step().loss

    def gradients(self, step: int, num: int | None = None) -> tuple[float, Weights]:
        loss_sum, count = self._accumulate(step, num)
        found = {name: x / count for name, x in self.engine.held.gradients().items()}
        self.engine.begin_step()  # gives this one up
        return loss_sum / count, found

    def _accumulate(self, step: int, num: int | None = None) -> tuple[float, float]:
        self.engine.begin_step()
        done = self.engine.accumulate(self.data.batch(step, self.batch_size)[:num], SftLoss())
        return done.loss_sum, done.count

    def forget(self) -> None:
        assert self.engine.optimizer is not None
        for state in self.engine.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.engine.num_steps = 0


class Theirs:
    def __init__(self, config: Config, device: torch.device, *, compiles: bool) -> None:
        self.peer = Peer(config, device)
        self.is_compiled = compiles and self.peer.compiles()
        named = zip(self.peer.names, self.peer.masters, strict=True)
        self.masters: Weights = {our_name(name): x for name, x in named}

    def train(self, step: int) -> Tensor:
        return self.peer.train(step)[0]

    def gradients(self, step: int, num: int | None = None) -> tuple[float, Weights]:
        loss, _ = self.peer.accumulate(self.peer.batch(step)[:num])
        found = {name: x.grad for name, x in self.masters.items() if x.grad is not None}
        self.peer.optimizer.zero_grad()
        return float(loss), found

    def forget(self) -> None:
        self.peer.cast()
        self.peer.optimizer.state.clear()


def our_name(name: str) -> str:
    for theirs, ours in THEIRS.items():
        name = name.replace(theirs, ours)
    return name


def install(side: Side, weights: Mapping[str, Tensor], shake: int = 0) -> None:
    """Copies weights; with a number, moved by as little as that number says."""
    assert side.masters.keys() == weights.keys(), side.masters.keys() ^ weights.keys()
    with torch.no_grad():
        for name, master in sorted(side.masters.items()):
            master.copy_(weights[name].view_as(master))
            if shake:
                generator = torch.Generator(master.device).manual_seed(shake)
                noise = torch.empty(master.numel(), device=master.device)
                noise.normal_(generator=generator)
                master.mul_(1 + SHAKE * noise.view_as(master))
    side.forget()


# Gradients


class Errors:
    """Of one side's gradients against the reference, gathered over steps."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """By kind: of errors squared, of true gradients squared, of one times the other."""
        self.total: Weights = {}
        self.losses: list[float] = []

    def add(self, loss: float, found: Weights, true_loss: float, true: Weights) -> None:
        self.losses.append(loss - true_loss)
        for name, wanted in true.items():
            error, mine = found[name].reshape(wanted.shape) - wanted, self.sums[kind_of(name)]
            mine[0] += float(error.square().sum())
            mine[1] += float(wanted.square().sum())
            mine[2] += float((error * wanted).sum())
            self.total[name] = self.total[name] + error if name in self.total else error

    def result(self) -> dict[str, dict[str, float]]:
        totals: dict[str, float] = defaultdict(float)
        for name, error in self.total.items():
            totals[kind_of(name)] += float(error.square().sum())
        return {
            kind: {
                "error": math.sqrt(errors / true),
                "lasting": totals[kind] / errors if errors else 1.0,
                "longer": both / true,
            }
            for kind, (errors, true, both) in self.sums.items()
        }


def kind_of(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


def compare_gradients(
    sides: Mapping[str, Side], exact: Mapping[str, Side], weights: Weights, num_steps: int
) -> dict[str, object]:
    """`exact` compute in float32; the first of them is the reference."""
    # As bfloat16 has them: the same numbers on all sides, whatever they compute in.
    held = {name: x.bfloat16().float() for name, x in weights.items()}
    for side in (*sides.values(), *exact.values()):
        install(side, held)
    reference, *others = exact.values()
    errors, agreement = {name: Errors() for name in sides}, Errors()
    true_loss, true = reference.gradients(0, 1)
    for other in others:
        agreement.add(*other.gradients(0, 1), true_loss, true)
    for step in range(num_steps):
        true_loss, true = reference.gradients(step)
        for name, side in sides.items():
            errors[name].add(*side.gradients(step), true_loss, true)
    found: dict[str, object] = {"float32": agreement.result()}
    found |= {name: one.result() for name, one in errors.items()}
    return found | {"loss": {name: one.losses for name, one in errors.items()}}


def show_gradients(title: str, found: Mapping[str, object]) -> None:
    names = [name for name in found if name not in ("float32", "loss")]
    print(f"\nrelative errors of gradients, {title}")
    head = "".join(f"{name + ' ' + key:>14}" for name in names for key in COLUMNS)
    print(f"{'':22}{head}{'float32 apart':>15}")
    tables: dict[str, dict[str, dict[str, float]]] = dict(found)  # type: ignore[arg-type]
    for kind in tables[names[0]]:
        words = "".join(f"{tables[name][kind][key]:14.5f}" for name in names for key in COLUMNS)
        print(f"{kind:22}{words}{tables['float32'][kind]['error']:15.2e}")
    losses: dict[str, list[float]] = tables["loss"]  # type: ignore[assignment]
    for name in names:
        print(f"loss, {name} - float32: mean {statistics.fmean(losses[name]):+.2e}", flush=True)


# Runs


def train(
    name: str, side: Side, weights: Weights, number: int, steps: int, writer: LineWriter
) -> list[float]:
    """Losses by step; written every fifty, where alone the device is waited for."""
    install(side, weights, shake=number)
    held: list[Tensor | float] = []
    losses: list[float] = []
    began = time.monotonic()
    for step in range(steps):
        held.append(side.train(step))
        if len(held) == 50 or step + 1 == steps:
            for loss in map(float, held):
                losses.append(loss)
                writer.append({"side": name, "run": number, "step": len(losses), "loss": loss})
            held = []
    seconds = time.monotonic() - began
    print(
        f"{name}, run {number}: {steps} steps, {seconds:.0f} s, loss {losses[-1]:.4f}", flush=True
    )
    return losses


def show_runs(runs: Mapping[str, list[list[float]]]) -> None:
    """Means of fifty steps: each run's distance from the mean over all runs."""
    names = [f"{name} {n}" for name, found in runs.items() for n in range(len(found))]
    curves = [losses for found in runs.values() for losses in found]
    if not curves:
        return
    print("\nloss of fifty steps: mean of all runs, and each run's distance from it, in 1e-3")
    print(f"{'steps':>10}{'mean':>9}" + "".join(f"{name:>10}" for name in names))
    for start in range(0, len(curves[0]), 50):
        means = [statistics.fmean(losses[start : start + 50]) for losses in curves]
        middle = statistics.fmean(means)
        apart = "".join(f"{1e3 * (mean - middle):+10.1f}" for mean in means)
        print(f"{start + 1:5}-{min(start + 50, len(curves[0])):4}{middle:9.4f}{apart}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pretrain-gap"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/pentad-pretrain-gap"))
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--runs", type=int, default=1, help="of each side")
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--batches", type=int, default=4, help="of the gradients; 0: none")
    parser.add_argument("--dtype", default="bfloat16", help="of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after them")
    parser.add_argument("--eager", action="store_true", help="the peer is not compiled")
    parser.add_argument("words", nargs="*", help="KEY=VALUE of the recipe")
    asked = parser.parse_args()
    until = time.time() + 60 * asked.minutes
    size, device = SIZES[asked.size], pick_device()
    for folder in (asked.out, asked.work):
        folder.mkdir(parents=True, exist_ok=True)
    make_inputs(asked.work, size)
    config = read(asked, asked.dtype)
    compiles = device.type == "cuda" and not asked.eager
    both: dict[str, Side] = {"ours": Ours(config, device)}
    both["peer"] = Theirs(config, device, compiles=compiles)
    first = {name: x.detach().clone() for name, x in both["ours"].masters.items()}
    found: dict[str, object] = {}
    exact: dict[str, Side] = {}
    if asked.batches:
        wide = read(asked, "float32", *WIDE)
        exact = {"ours": Ours(wide, device), "peer": Theirs(wide, device, compiles=False)}

    def look(title: str, weights: Weights) -> None:
        found[title] = compare_gradients(both, exact, weights, asked.batches)
        show_gradients(title, found[title])  # type: ignore[arg-type]
        (asked.out / "gradients.json").write_text(json.dumps(found, indent=1) + "\n")

    if asked.batches:
        look("at the first weights", first)
    (asked.out / "runs.jsonl").unlink(missing_ok=True)
    writer = LineWriter(asked.out / "runs.jsonl")
    runs: dict[str, list[list[float]]] = {name: [] for name in both}
    for number in range(asked.runs):
        for name, side in both.items():
            if time.time() > until:
                continue
            runs[name].append(train(name, side, first, number, asked.steps, writer))
            if asked.batches and number == 0 and name == "ours":
                look(f"after {asked.steps} steps", {n: x.clone() for n, x in side.masters.items()})
    show_runs(runs)


def read(asked: argparse.Namespace, dtype: str, *more: str) -> Config:
    words = [*asked.words, f"actor.dtype={dtype}", *more]
    return prepare(asked.work / "recipe.yaml", words, "pretrain")[0]


if __name__ == "__main__":
    main()
