"""`pentad bench`: runs the benchmarks and compares them with a baseline of the same hardware.

A baseline is a JSON file (`nvidia-h200.json`) with every figure, the versions and the commit of its
run. Comparisons are speedups over the baseline.
"""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

import pentad
from pentad.cli.output import make_table, print_parts
from pentad.core.device import pick_device
from pentad.core.errors import Problem, UserError
from pentad.telemetry import host
from pentad_tools.bench import bench_kernels, bench_rl, bench_train, bench_trl
from pentad_tools.bench.bench_kernels import Figure, Line
from pentad_tools.bench.bench_rl import RlCase
from pentad_tools.bench.bench_train import TrainCase, TrainMeasurement

PARTS = ("train", "router", "mixture", "head", "rl")
NEEDS_GPU = ("router", "mixture")
MORE_IS_BETTER = {"tok/s": True, "us": False, "ms": False, "GiB": False}
"""Unit -> whether larger figures are better."""
WIDTH = 150
HEAD = ("Log-probs with the head, forward and backward", ["ms", "peak GiB", "float32 logits GiB"])
"""Title and columns of the head's table."""


class Baseline:
    """Figures of an earlier run on the same kind of machine; empty if there is no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = jsonlib.loads(path.read_text()) if path.is_file() else {"figures": {}}
        self.figures: dict[str, float] = self.content["figures"]

    def compare(self, figure: Figure) -> str:
        """Speedup of the figure over the baseline; an empty string without a baseline."""
        old = self.figures.get(f"{figure.key} [{figure.unit}]")
        if not old or not figure.value:
            return ""
        ratio = figure.value / old
        return f"{ratio if MORE_IS_BETTER[figure.unit] else 1 / ratio:.2f}x"

    def save(self, figures: Iterable[Figure], about: dict[str, Any]) -> None:
        """Merges the figures into the file: figures of other benchmarks are kept."""
        fresh = {f"{figure.key} [{figure.unit}]": round(figure.value, 4) for figure in figures}
        whole = {**about, "figures": {**self.figures, **fresh}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(jsonlib.dumps(whole, indent=1) + "\n")


class BenchReport:
    """Collects the figures and prints them."""

    def __init__(self, baseline: Baseline, is_json: bool) -> None:
        self.baseline = baseline
        self.is_json = is_json
        self.figures: list[Figure] = []
        self.problems: list[str] = []

    def add(self, key: str, value: float, unit: str) -> str:
        figure = Figure(key, value, unit)
        self.figures.append(figure)
        return self.baseline.compare(figure)

    def lines(self, title: str, names: list[str], lines: list[Line]) -> None:
        rows = []
        for line in lines:
            self.figures += [line.figure, *line.besides]
            rows.append([line.figure.key, *line.cells, self.baseline.compare(line.figure)])
        self.show(title, ["what", *names, "baseline"], rows)

    def say(self, text: str = "") -> None:
        if not self.is_json:
            print(text, flush=True)

    def show(self, title: str, names: list[str], rows: list[list[str]]) -> None:
        if self.is_json:
            return
        print(f"\n{title}")
        numbers = [name for name in names if name not in ("what", "weights")]
        print_parts(make_table(names, rows, right=numbers), min_width=WIDTH)


def run_bench(
    parts: list[str],
    *,
    device: str,
    models: list[str],
    num_steps: int,
    baselines: str,
    save: bool,
    json: bool,
) -> int:
    """Runs the benchmarks. Returns 0, or 1 if implementations disagree."""
    chosen = pick_device(device)
    check_parts(parts, chosen)
    about = describe(chosen)
    report = BenchReport(Baseline(Path(baselines) / f"{slug(chosen)}.json"), json)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    report.say(f"{about['device']}; {versions}; commit {about['commit']}")
    if report.baseline.figures:
        old = report.baseline.content
        report.say(f"baseline: {report.baseline.path}, commit {old.get('commit')}")
    else:
        report.say(f"no baseline: {report.baseline.path} is not there")
    torch.manual_seed(0)
    wanted = parts or [part for part in PARTS if chosen.type == "cuda" or part not in NEEDS_GPU]
    for part in wanted:
        if part == "rl":
            show_rl(report, chosen, models, num_steps)
        elif part == "train":
            show_training(report, chosen, models, num_steps)
        elif part == "router":
            title = "Router, device time in a CUDA graph, without the gate's product"
            report.lines(title, ["eager us", "us", "x eager"], bench_kernels.router_lines())
        elif part == "mixture":
            title = "Mixture, device time in a CUDA graph, not compiled"
            report.lines(title, ["us", "TFLOP/s"], bench_kernels.mixture_lines())
        else:
            title, names = HEAD
            report.lines(title, names, bench_kernels.head_lines(chosen))
    if save:
        report.baseline.save(report.figures, about)
        report.say(f"\nsaved {report.baseline.path}")
    if json:
        figures = {f"{x.key} [{x.unit}]": x.value for x in report.figures}
        print(jsonlib.dumps({**about, "figures": figures, "problems": report.problems}, indent=2))
    for problem in report.problems:
        report.say(f"\n{problem}")
    return 1 if report.problems else 0


def check_parts(parts: list[str], device: torch.device) -> None:
    problems = [
        Problem(f"part {part}", "there is no such part", f"use {', '.join(PARTS)}")
        for part in parts
        if part not in PARTS
    ]
    if device.type != "cuda":
        problems += [
            Problem(f"part {part}", "its kernels run on CUDA, and there is none", "leave it out")
            for part in parts
            if part in NEEDS_GPU
        ]
    if problems:
        raise UserError(problems)


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit, without anything that identifies the machine."""
    hardware = host.hardware()
    git = host.git_state(Path(pentad.__file__).parents[1])
    changed = " with changes" if git and git["is_modified"] else ""
    return {
        "device": device_name(device),
        "cpu": hardware["cpu"],
        "num_cpus": hardware["num_cpus"],
        "versions": host.versions(),
        "commit": f"{git['commit']}{changed}" if git else None,
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{host.hardware()['cpu'] or 'cpu'}, {torch.get_num_threads()} threads"


def slug(device: torch.device) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


T = TypeVar("T", TrainCase, RlCase)


def named(cases: list[T], models: list[str], device: torch.device) -> list[T]:
    """The cases whose model name contains one of `models`; all if none is given."""
    names = list(dict.fromkeys(case.model for case in cases))
    unknown = [m for m in models if not any(m in name for name in names)]
    if unknown:
        rule = f"no case has such a name on {device.type}"
        raise UserError(Problem(f"models = {' '.join(unknown)}", rule, f"use {', '.join(names)}"))
    return [case for case in cases if not models or any(m in case.model for m in models)]


def show_rl(report: BenchReport, device: torch.device, models: list[str], num_steps: int) -> None:
    cases = bench_rl.gpu_cases() if device.type == "cuda" else bench_rl.cpu_cases()
    for case in named(cases, models, device):
        found = bench_rl.measure(case, device, num_steps)
        better = report.add(f"rl {case.name}", found.tokens_per_s, "tok/s")
        phases = {name: f"{ms:.0f}" for name, ms in found.phases_ms.items()}
        peak = "" if found.peak_gib is None else f"{found.peak_gib:.1f}"
        names = ["step ms", "slowest", *phases, "tok/s", "rollout tok/s", "idle", "peak GiB"]
        row = [f"{found.wall_ms:.0f}", f"{found.slowest_ms:.0f}", *phases.values()]
        row += [f"{found.tokens_per_s:,.0f}", f"{found.rollout_tokens_per_s:,.0f}"]
        row += [percent(found.idle_share), peak, f"{found.first_step_s:.1f}", better]
        title = f"GRPO step, {case.name}, at most {case.max_new_tokens}"
        report.show(title, [*names, "first step s", "baseline"], [row])
        if bench_trl.is_installed():
            if device.type == "cuda":
                bench_train.free_memory(device)  # TRL runs in another process
            show_peer(report, case, device, num_steps, found.tokens_per_s)


def show_peer(
    report: BenchReport, case: RlCase, device: torch.device, num_steps: int, ours: float
) -> None:
    """Runs the same steps with TRL and shows the speedup over it."""
    peer = bench_trl.measure(case, device, num_steps)
    if isinstance(peer, str):
        report.say(peer)
        return
    report.add(f"rl {case.name}, TRL", peer.tokens_per_s, "tok/s")
    row = [peer.sampler, f"{peer.wall_ms:.0f}", f"{peer.rollout_ms:.0f}"]
    row += [f"{peer.tokens_per_s:,.0f}", percent(peer.idle_share)]
    row += ["" if peer.peak_gib is None else f"{peer.peak_gib:.1f}"]
    names = ["what", "step ms", "rollout", "tok/s", "idle", "peak GiB", "x TRL"]
    report.show("TRL, which samples with", names, [[*row, f"{ours / peer.tokens_per_s:.2f}x"]])


def show_training(
    report: BenchReport, device: torch.device, models: list[str], num_steps: int
) -> None:
    all_cases = bench_train.gpu_cases() if device.type == "cuda" else bench_train.cpu_cases()
    cases = named(all_cases, models, device)
    for model in dict.fromkeys(case.model for case in cases):
        show_model(report, device, [case for case in cases if case.model == model], num_steps)


def show_model(
    report: BenchReport, device: torch.device, cases: list[TrainCase], num_steps: int
) -> None:
    found: list[TrainMeasurement] = []
    rows = []
    for case in cases:
        try:
            one = bench_train.measure(case, device, num_steps)
        except torch.OutOfMemoryError:
            rows.append([case.name, case.masters, str(case.microbatch), "out of memory"])
            continue
        found.append(one)
        better = report.add(one.key, one.tokens_per_s, "tok/s")
        if one.peak_gib is not None:
            report.add(f"{one.key}, peak", one.peak_gib, "GiB")
        rows.append([*training_row(one, found), better])
    names = ["what", "weights", "microbatch", "ms", "tok/s", "x transformers", "MFU causal"]
    names += ["MFU full", "peak GiB", "warm-up s", "loss", "baseline"]
    first = cases[0]
    title = f"Training {first.model}: {first.num_tokens} tokens a step, length {first.length}"
    report.show(title, names, rows)
    report.problems += bench_train.check_losses(found)


def training_row(one: TrainMeasurement, found: list[TrainMeasurement]) -> list[str]:
    """Table row with the speedup over the fastest comparable transformers case."""
    theirs = [
        x.tokens_per_s
        for x in found
        if x.case.who == "transformers" and x.case.masters == one.case.masters
    ]
    is_ours = one.case.who == "pentad" and not one.case.is_ragged
    return [
        one.case.name,
        one.case.masters,
        str(one.case.microbatch),
        f"{one.ms:.1f}",
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s / max(theirs):.2f}" if theirs and is_ours else "",
        percent(one.mfu_causal),
        percent(one.mfu_full),
        "" if one.peak_gib is None else f"{one.peak_gib:.1f}",
        f"{one.warm_up_s:.0f}",
        f"{one.loss:.3f}",
    ]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"
