"""Pretraining a small mixture beside transformers: losses, speed, balance, and one kill.

    python benchmarks/pretrain_gpu.py --out OUT --minutes 9     # all, on a GPU
    python benchmarks/pretrain_gpu.py --out OUT --tiny          # proves it on two CPU cores

`pentad pretrain` trains a mixture of 0.67B parameters (124M of a token) on the Python sources of
this machine, under a recipe as a user would write it; in the middle its learner gets SIGKILL and
goes on from the newest checkpoint. transformers trains the same weights on the same batches
(`pretrain_peer`). Each has the GPU alone while its speed is measured (steps 20 to 120): the peer
comes first and waits then until the other is measured, too. `--part ours|peer|table` runs a part
alone, `--part prepare` makes data, weights and recipe (the others do where they are missing).
`--work` holds these and the checkpoints (30 GB); what is found goes to `--out` as it comes, so that
whatever was found by then is left after a cut: `ours/steps.jsonl`, `peer.jsonl`, `result.json`.
Words at the end override keys of the recipe, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.config.schema import Config  # noqa: E402
from pentad.core.device import pick_device  # noqa: E402
from pentad.data.toy import EOS, MIXTURE, MODEL, PAD  # noqa: E402
from pentad.engine.flops import detect_peak_tflops, measure_throughput  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.models.registry import create_model, save_model  # noqa: E402
from pentad.planner.prepare import prepare  # noqa: E402
from pentad.telemetry.steps import LineWriter, read_lines  # noqa: E402

RECORDS = "runs/logs/bench/pretrain/one"
KILL = Path(__file__).parents[1] / "scripts" / "simulate_node_failure.sh"
COPIED = ("steps.jsonl", "recoveries.jsonl", "log.txt", "manifest.json", "ranks/rank-0.log")
NUM_POINTS = 10
NUM_CHECKED, TOLERANCE = 10, 1e-4
"""First steps whose losses must agree in float32, before a token at the edge of two experts goes to
another one here than there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    model: dict[str, Any]
    num_bytes: int
    """Of text."""
    length: int
    batch_size: int
    per_pass: int
    """Tokens of a microbatch."""
    steps: int
    """What the learning rate is planned for; the minutes may end it before."""
    save_every: int
    window: tuple[int, int]
    """Steps between which the speed is measured."""
    lr: float


FULL = Size(
    model={
        **MODEL,
        **MIXTURE,
        "vocab_size": 16384,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    num_bytes=100_000_000,
    length=2048,
    batch_size=32,
    per_pass=32768,
    steps=2500,
    save_every=100,
    window=(20, 120),
    lr=1e-3,
)
TINY = Size(
    model={
        **MODEL,
        **MIXTURE,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "num_experts": 8,
    },
    num_bytes=1_000_000,
    length=64,
    batch_size=8,
    per_pass=256,
    steps=60,
    save_every=10,
    window=(5, 15),
    lr=1e-3,
)


# Data, weights, recipe


def texts(num_bytes: int) -> Iterator[str]:
    """Python's own sources and those of what is installed, by path."""
    folders = sysconfig.get_paths()
    found = [path for key in ("stdlib", "purelib") for path in Path(folders[key]).rglob("*.py")]
    for path in sorted(set(found)):
        if num_bytes <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="ignore")
        num_bytes -= len(text)
        yield text


def train_tokenizer(found: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(found[:: max(1, len(found) // 400)], trainer)
    return tokenizer


def make_inputs(work: Path, size: Size) -> None:
    """Once: a start that finds them whole takes them."""
    if (work / "recipe.yaml").exists():
        return
    began = time.monotonic()
    found = list(texts(size.num_bytes))
    tokenizer = train_tokenizer(found, size.model["vocab_size"])
    plain = work / "plain"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    ).save_pretrained(plain)
    eos = tokenizer.token_to_id(EOS)
    parts = [np.array([*one.ids, eos], np.uint16) for one in tokenizer.encode_batch_fast(found)]
    ids = np.concatenate(parts)
    np.save(work / "tokens.npy", ids)
    config = {**size.model, "pad_token_id": 0, "eos_token_id": eos, "bos_token_id": None}
    device = pick_device()
    model = create_model(dims_of(config), device=device, seed=1)
    save_model(model, work / "model", hf_config=config, tokenizer_folder=plain)
    del model
    torch.cuda.empty_cache()  # others have the device from here on
    (work / "recipe.yaml").write_text(yaml.safe_dump(recipe(work, size)))
    print(f"inputs: {len(ids):,} tokens of {len(found)} files, {time.monotonic() - began:.1f} s")


def recipe(work: Path, size: Size) -> dict[str, Any]:
    return {
        "experiment_name": "pretrain",
        "trial_name": "one",
        "user": "bench",
        "fileroot": str(work / "runs"),
        "allocation_mode": "archon:d1",
        # The learner is a process of its own, which the run starts again when it is lost.
        "scheduler": {"processes": "separate"},
        "recover": {"freq_steps": size.save_every},
        "actor": {
            "path": str(work / "model"),
            "gradient_checkpointing": False,  # there is memory; the peer recomputes nothing either
            "mb_spec": {"max_tokens_per_mb": size.per_pass},
            "optimizer": {
                "lr": size.lr,
                "lr_scheduler_type": "cosine",
                "warmup_steps_proportion": 0.04,
                "min_lr_ratio": 0.1,
                "weight_decay": 0.1,
            },
            "archon": {"moe_aux_loss_coef": 0.01},
        },
        # In their order, since the balancing loss depends on which sequences are passed together.
        "balance_data": False,
        "train_dataset": {
            "path": str(work / "tokens.npy"),
            "max_length": size.length,
            "batch_size": size.batch_size,
            "mask_documents": False,
        },
        "total_train_epochs": 1000,
        "total_train_steps": size.steps,
    }


# Ours


def run_ours(asked: argparse.Namespace, size: Size, config: Config, until: float) -> None:
    """The run, killed once in the middle of its time or steps, half-way between two checkpoints."""
    records, out = asked.work / RECORDS, asked.out / "ours"
    out.mkdir(parents=True, exist_ok=True)
    begun = shown = time.time()
    kill: dict[str, Any] | None = None
    command = [sys.executable, "-m", "pentad.cli.main", "pretrain", str(asked.work / "recipe.yaml")]
    says = {"TORCH_LOGS": "graph_breaks,recompiles"}  # to rank-0.log
    with (out / "screen.txt").open("wb") as screen:
        run = subprocess.Popen(
            [*command, *asked.words],
            stdout=screen,
            stderr=subprocess.STDOUT,
            env=os.environ | says,
        )
        while run.poll() is None and time.time() < until:
            time.sleep(1.0)
            copy_records(records, out)
            if not (lines := read_lines(out / "steps.jsonl")):
                continue
            step, saved = lines[-1]["step"], lines[-1]["infra"]["last_recover_step"]
            if step > size.window[1]:
                (asked.work / "ours.measured").touch()
            if time.time() > shown + 20:
                shown, last = time.time(), make_result(asked, size, config)["last_step"]
                print(f"{shown - begun:4.0f} s: {last}, loss {lines[-1]['loss']:.4f}", flush=True)
            is_middle = step >= size.steps / 2 or time.time() > (begun + until) / 2
            is_between = saved is not None and step - saved >= size.save_every / 2
            if kill is None and is_middle and is_between and step > size.window[1]:
                said = subprocess.run(
                    ["bash", str(KILL), str(records), "1"], capture_output=True, text=True
                )
                kill = {"time": time.time(), "after_s": time.time() - begun, "step": step}
                kill["said"] = (said.stdout or said.stderr).strip()
                print(f"after step {step}: {kill['said']}", flush=True)
                (out / "kill.json").write_text(json.dumps(kill))
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(60)
            except subprocess.TimeoutExpired:
                run.kill()
    (asked.work / "ours.measured").touch()  # nobody waits for a run that has ended
    copy_records(records, out)
    print(f"pentad pretrain: exit code {run.wait()}", flush=True)


def copy_records(records: Path, out: Path) -> None:
    for name in COPIED:
        if (records / name).exists():
            shutil.copyfile(records / name, out / Path(name).name)


# The peer


def run_peer(asked: argparse.Namespace, size: Size, config: Config, until: float) -> None:
    """A line a step, written every ten; after the window it waits for `--wait-for`."""
    from pretrain_peer import Peer

    device = pick_device()
    (asked.out / "peer.jsonl").unlink(missing_ok=True)
    writer = LineWriter(asked.out / "peer.jsonl")
    peer, held = Peer(config, device), []
    compiled = device.type == "cuda" and not asked.eager and peer.compiles()
    (first, last), began = size.window, 0.0
    for step in range(size.steps):
        held.append((step + 1, *peer.train(step)))
        is_edge = step + 1 in (1, first, last)
        if is_edge or len(held) == 10 or step + 1 == size.steps:
            flush(held, writer)
            held = []
        if step + 1 == first:
            began = time.monotonic()
        if step + 1 == last:
            seconds = (time.monotonic() - began) / (last - first)
            peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
            found = {"step_s": seconds, "compiled": compiled, "peak_gb": peak}
            (asked.out / "peer.json").write_text(json.dumps(found))
            print(f"peer: {found}", flush=True)
            while asked.wait_for and not asked.wait_for.exists() and time.time() < until:
                time.sleep(0.2)
        if time.time() > until:
            break
    if held:
        flush(held, writer)


def flush(held: list[tuple[int, torch.Tensor, torch.Tensor]], writer: LineWriter) -> None:
    """Here alone the device is waited for."""
    for step, loss, loads in held:
        balance = {
            str(layer): {
                "mean": float(load.mean()),
                "std": float(load.std(correction=0)),
                "min": float(load.min()),
                "max": float(load.max()),
            }
            for layer, load in enumerate(loads.double().cpu())
        }
        writer.append(
            {"step": step, "loss": float(loss), "time_s": time.time(), "balance": balance}
        )


# The table


def spread(balance: dict[str, dict[str, float]]) -> dict[str, float]:
    """Tokens of an expert: mean and std as means over layers, the fewest and most of any."""
    layers = list(balance.values())
    return {
        "mean": statistics.fmean(one["mean"] for one in layers),
        "std": statistics.fmean(one["std"] for one in layers),
        "min": min(one["min"] for one in layers),
        "max": max(one["max"] for one in layers),
    }


def speed_of(size: Size, config: Config, step_s: float) -> dict[str, float | None]:
    assert config.actor.path is not None
    peak = config.telemetry.hardware_peak_tflops or detect_peak_tflops(pick_device())
    lengths = [size.length] * size.batch_size
    found = measure_throughput(dims_of(config.actor.path), lengths, step_s, peak_tflops=peak)
    return {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": found.tokens_per_s,
        "mfu_causal": found.mfu_causal,
        "mfu_full": found.mfu_full,
    }


def make_result(asked: argparse.Namespace, size: Size, config: Config) -> dict[str, Any]:
    """From the files of `--out` alone."""
    out, result = asked.out, {"tokens_a_step": size.batch_size * size.length}
    everything = read_lines(out / "ours" / "steps.jsonl", superseded=True)
    ours = {line["step"]: line for line in everything if not line["superseded"]}
    theirs = {line["step"]: line for line in read_lines(out / "peer.jsonl")}
    first, last = size.window
    if first in ours and last in ours:
        begun = [line for line in everything if line["step"] in (first, last)]
        step_s = (begun[1]["time_s"] - begun[0]["time_s"]) / (last - first)
        peak = max((line["memory"]["peak_allocated_gb"] or 0.0) for line in everything)
        result["ours"] = {**speed_of(size, config, step_s), "peak_gb": peak or None}
    if (out / "peer.json").exists():
        found = json.loads((out / "peer.json").read_text())
        result["peer"] = {**found, **speed_of(size, config, found["step_s"])}
    both = sorted(ours.keys() & theirs.keys())
    if both:
        marks = [both[round(n * (len(both) - 1) / (NUM_POINTS - 1))] for n in range(NUM_POINTS)]
        result["losses"] = [
            {"step": n, "ours": ours[n]["loss"], "peer": theirs[n]["loss"]}
            for n in dict.fromkeys(marks)
        ]
        gaps = [ours[n]["loss"] - theirs[n]["loss"] for n in both]
        result["gap"] = {"steps": len(both), "mean": statistics.fmean(gaps)}
        result["gap"]["largest"] = max(map(abs, gaps))
        result["gap"]["largest_at_first"] = max(map(abs, gaps[:NUM_CHECKED]))
    for name, lines in (("ours", ours), ("peer", theirs)):
        ends = [min(lines), max(lines)] if lines else []
        tables = [lines[n].get("balance") or lines[n]["kernel"]["balance"] for n in ends]
        result[f"experts_{name}"] = {
            f"step {n}": spread(table) for n, table in zip(ends, tables, strict=True)
        }
    if (out / "ours" / "kill.json").exists():
        result["kill"] = json.loads((out / "ours" / "kill.json").read_text())
        result["recoveries"] = read_lines(out / "ours" / "recoveries.jsonl")
        again = [line for line in everything if line["superseded"] and line["step"] in ours]
        result["repeated"] = {
            "steps": [line["step"] for line in again],
            "largest_difference": max(
                (abs(line["loss"] - ours[line["step"]]["loss"]) for line in again), default=None
            ),
        }
    result["last_step"] = {"ours": max(ours, default=0), "peer": max(theirs, default=0)}
    if ours:
        result["ettr"] = ours[max(ours)]["infra"]["ettr"]
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def show(result: dict[str, Any]) -> None:
    keys = ("step_ms", "tokens_per_s", "mfu_causal", "mfu_full", "peak_gb", "compiled")
    print(f"\n{'alone on the device':22} {'ours':>12} {'peer':>12}")
    for key in keys:
        found = [result.get(who, {}).get(key) for who in ("ours", "peer")]
        words = [f"{x:12.4g}" if isinstance(x, float) else f"{x!s:>12}" for x in found]
        print(f"{key:22} {words[0]} {words[1]}")
    print(f"\n{'step':>6} {'ours':>9} {'peer':>9} {'difference':>11}")
    for one in result.get("losses", ()):
        gap = one["ours"] - one["peer"]
        print(f"{one['step']:6} {one['ours']:9.5f} {one['peer']:9.5f} {gap:11.2e}")
    for key in ("gap", "experts_ours", "experts_peer", "kill", "recoveries", "repeated"):
        print(f"{key}: {json.dumps(result.get(key))}")
    for key in ("last_step", "ettr", "tokens_a_step"):
        print(f"{key}: {json.dumps(result.get(key))}")


def run_all(asked: argparse.Namespace, size: Size, config: Config, until: float) -> None:
    """The peer until it is measured; ours until it is measured; then both, side by side."""
    (asked.work / "ours.measured").unlink(missing_ok=True)
    (asked.out / "peer.json").unlink(missing_ok=True)
    words = ["--part", "peer", "--wait-for", str(asked.work / "ours.measured")]
    words += ["--out", str(asked.out), "--work", str(asked.work)]
    words += ["--minutes", str((until - time.time()) / 60)]
    words += [*(["--tiny"] if asked.tiny else ()), *(["--eager"] if asked.eager else ())]
    peer = subprocess.Popen([sys.executable, __file__, *words, *asked.words])
    while peer.poll() is None and not (asked.out / "peer.json").exists():
        time.sleep(0.5)
    run_ours(asked, size, config, until)
    while peer.poll() is None and time.time() < until + 20:
        time.sleep(0.5)
    peer.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part", default="all", choices=("all", "prepare", "ours", "peer", "table")
    )
    parser.add_argument("--out", type=Path, default=Path("pretrain-gpu"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/pentad-pretrain"))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the parts that train")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in minutes")
    parser.add_argument("--eager", action="store_true", help="the peer is not compiled")
    parser.add_argument("--wait-for", type=Path, help="a file, after the peer was measured")
    parser.add_argument("words", nargs="*", help="KEY=VALUE of the recipe")
    asked = parser.parse_args()
    size = TINY if asked.tiny else FULL
    asked.out, asked.work = asked.out.absolute(), asked.work.absolute()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * asked.minutes
    make_inputs(asked.work, size)
    config, _ = prepare(asked.work / "recipe.yaml", asked.words, "pretrain")
    if asked.part == "ours":
        run_ours(asked, size, config, until)
    elif asked.part == "peer":
        run_peer(asked, size, config, until)
    elif asked.part == "all":
        run_all(asked, size, config, until)
    if asked.part in ("all", "ours", "table"):
        result = make_result(asked, size, config)
        show(result)
        if asked.tiny and asked.part == "all":
            assert result["gap"]["largest_at_first"] < TOLERANCE, "the losses differ"
            assert len(result["recoveries"]) == 1, "it did not go on after the kill"
            assert result["repeated"]["largest_difference"] == 0.0, "it repeated other steps"
            assert result["last_step"] == {"ours": size.steps, "peer": size.steps}


if __name__ == "__main__":
    main()
