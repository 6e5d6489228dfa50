"""Prints a plan: who stands where, memory by phase, batch, files, and what would make it fit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pentad.config.derived import samples
from pentad.config.rules.layout import count_devices, layout_notes
from pentad.config.rules.model import uncounted
from pentad.config.rules.rule import Command
from pentad.config.rules.start import unbuilt_problems
from pentad.config.rules.unread import unread
from pentad.config.schema import Config, DatasetConfig
from pentad.core.errors import UserError
from pentad.core.layout import parse_allocation
from pentad.core.machine import GIB, host_memory
from pentad.data.rows import open_rows
from pentad.planner.figures import RunPlan, SamplePlan, TrainPlan
from pentad.planner.memory import RULE_OMITS, held_params, sharded_params
from pentad.planner.plan import build_plan, choose_device, thumb_of
from pentad.planner.ranks import inner_rows, span, stage_rows
from pentad.planner.remedies import Remedy, propose

MAX_WIDTH = 120
PLAIN_WIDTH = 100
MAX_DATA_BYTES = 512 << 20
"""A larger dataset is not counted: a plan must stay quick."""
MAX_STAGE_ROWS = 32


def run_plan(
    config: Config, notes: list[str], gpu_memory: float | None = None, as_json: bool = False
) -> int:
    """Prints the plan; 0 when it fits, 1 when it does not."""
    command: Command = "train" if samples(config) else "sft"
    notes = [*notes, *unread(config, command), *refusals(config)]
    if command == "sft":
        notes.append(f"allocation_mode = {config.allocation_mode} has no sampler: planned for sft")
    if reason := uncounted(config):
        show_places(config, [*notes, reason], as_json)
        return 0
    device = choose_device(config, gpu_memory)
    num_rows, said = count_rows(config.train_dataset)
    plan = build_plan(config, device, num_rows)
    limit = count_devices(config)
    plan.notes = [*notes, *layout_notes(config, plan.dims, limit), *plan.notes, *said]
    remedies = propose(plan)
    if as_json:
        print(json.dumps(as_dict(plan, remedies), indent=2))
    else:
        console = make_console()
        with console.capture() as captured:
            Page(plan, remedies, console).show()
        # Tables pad their last column.
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0 if plan.fits else 1


def refusals(config: Config) -> list[str]:
    """What can be planned and is not built."""
    problems = unbuilt_problems(config, samples=samples(config))
    return [f"a run refuses it today: {problem}" for problem in problems]


def show_places(config: Config, notes: list[str], as_json: bool) -> None:
    """Who stands where, of a run whose memory is not known."""
    assert config.allocation_mode is not None, "checked before"
    allocation = parse_allocation(config.allocation_mode).as_run()
    rows = [
        {
            "role": component.role,
            "component": str(component),
            "devices": list(allocation.devices(component)),
        }
        for component in allocation
    ]
    if as_json:
        print(json.dumps({"components": rows, "memory": None, "notes": notes}, indent=2))
        return
    print(f"{config.actor.path}: {allocation.num_devices} devices, {config.allocation_mode}")
    for component in allocation:
        devices = span(list(allocation.devices(component)))
        print(f"  {component.role}: {component} on {devices}")
    for note in notes:
        print(f"note: {note}")


def make_console() -> Console:
    """As wide as the terminal up to a limit; without one plain text of a fixed width."""
    if sys.stdout.isatty():
        console = Console(highlight=False)
        return Console(highlight=False, width=min(console.width, MAX_WIDTH))
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) >= 40 else PLAIN_WIDTH
    return Console(highlight=False, width=min(width, MAX_WIDTH), color_system=None)


def count_rows(data: DatasetConfig) -> tuple[int | None, list[str]]:
    """Rows of the training data where it can be read here, and a note where it cannot."""
    if data.path is None:
        return None, []
    path = Path(data.path).expanduser()
    files = [path] if path.is_file() else list(path.rglob("*")) if path.is_dir() else []
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size > MAX_DATA_BYTES:
        return None, [
            f"train_dataset.path = {data.path}: {gib(size)} GiB, its rows are not counted"
        ]
    try:
        rows = open_rows(
            data.path,
            format=data.format,
            streaming=True,
            limit=data.limit,
            key="train_dataset.path",
        )
    except UserError as error:
        return None, [str(problem) for problem in error.problems]
    return len(rows), []


def gib(size: float) -> str:
    """Bytes as GiB with as many digits as mean something."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def billions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


class Page:
    """One plan on paper."""

    def __init__(self, plan: RunPlan, remedies: list[Remedy], console: Console) -> None:
        self.plan = plan
        self.remedies = remedies
        self.console = console

    def show(self) -> None:
        self.heading_line()
        self.places()
        for trainer in self.plan.trainers:
            self.ranks(trainer)
        for trainer in self.plan.trainers:
            self.memory(trainer)
        for sampler in self.plan.samplers:
            self.say(describe_sampler(sampler))
        self.batch()
        self.files()
        self.notes()
        self.verdict()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def title(self, text: str) -> None:
        self.console.print()
        self.say(text, "bold")

    def table(self, *columns: str, right: tuple[str, ...] = ()) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column in columns:
            justify = "right" if column in right else "left"
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        return table

    def heading_line(self) -> None:
        plan, dims = self.plan, self.plan.dims
        size = billions(dims.num_params)
        if dims.num_experts:
            size += f" parameters ({billions(dims.num_active_params)} active)"
            size += f", {dims.num_layers} layers, {dims.num_experts} experts"
        else:
            size += f" parameters, {dims.num_layers} layers"
        self.say(f"{plan.config.actor.path}: {size}", "bold")
        memory = gib(plan.device.memory_bytes)
        self.say(f"{plan.device.word} memory {memory} GiB ({plan.device.source})")

    def places(self) -> None:
        plan = self.plan
        limit = count_devices(plan.config)
        total = f" of {limit}" if limit else ""
        word = "devices" if plan.device.kind == "cuda" else "processes"
        count = plan.allocation.num_devices
        mode = plan.config.mode or "training only"
        single = "device" if plan.device.kind == "cuda" else "process"
        shown = single if count == 1 and not limit else word
        self.title(f"Who stands where: {count}{total} {shown}, mode {mode}")
        table = self.table(word, "role", "component", "cut")
        for component in plan.allocation:
            devices = span(list(plan.allocation.devices(component)))
            role = component.role
            if role == "actor" and any(t.role == "critic" for t in plan.trainers):
                role += "" if plan.allocation.find("critic") else " and critic"
            if component.is_inference:
                each = component.world // component.size("d")
                number = component.size("d")
                cut = f"{number} replica{'s' * (number > 1)} of {each}"
            else:
                key = plan.config.critic if role == "critic" else plan.config.actor
                layout = component.layout(key.archon.dp_replicate)
                cut = f"{layout}, efsdp={layout.efsdp}"
            table.add_row(devices, role, str(component), cut)
        self.console.print(table)

    def ranks(self, trainer: TrainPlan) -> None:
        layout, dims = trainer.training.layout, trainer.training.dims
        if layout.world == 1:
            return
        sharded = [
            sharded_params(trainer.training, held_params(trainer.training, pp))
            for pp in range(layout.pp)
        ]
        self.title(f"{trainer.role}: pipeline ranks")
        columns = ("pp", "devices", "stages", "layers", "parameters", "stored", "peak GiB")
        table = self.table(*columns, right=("parameters", "stored", "peak GiB"))
        rows = stage_rows(trainer, sharded)
        for row in rows[:MAX_STAGE_ROWS]:
            table.add_row(
                str(row.pp),
                row.devices,
                row.stages,
                row.layers,
                billions(row.params),
                billions(row.sharded),
                gib(row.peak_bytes),
            )
        self.console.print(table)
        if layout.world > layout.pp:
            self.inner(trainer, dims.num_heads, dims.num_experts)

    def inner(self, trainer: TrainPlan, num_heads: int, num_experts: int) -> None:
        layout = trainer.training.layout
        rows, left_out = inner_rows(layout, num_heads, num_experts)
        self.say(f"inside each pipeline rank ({layout.world // layout.pp} devices):", "bold")
        columns = ["device", "dp", "cp", "tp", "heads"]
        expert = ["efsdp", "ep", "etp", "experts"] if num_experts else []
        table = self.table(*columns, *expert)
        for index, row in enumerate(rows):
            if left_out and index == len(rows) - 1:
                table.add_row(f"... {left_out} more alike")
            cells = [row.offsets, row.dp, row.cp, row.tp, row.heads]
            cells += [row.efsdp, row.ep, row.etp, row.experts] if num_experts else []
            table.add_row(*cells)
        self.console.print(table)

    def memory(self, trainer: TrainPlan) -> None:
        rank, peak = trainer.peak
        word = self.plan.device.word
        at = f", pipeline rank {rank}" if trainer.training.layout.pp > 1 else ""
        self.title(f"{trainer.role}: memory by phase, GiB a {word}{at} (an estimate)")
        has_host = self.plan.device.kind == "cuda"
        columns = ("phase", word, "of which", *(("host, a node",) if has_host else ()))
        table = self.table(*columns, right=(word, "host, a node"))
        for name, phase in trainer.phases[rank].items():
            parts = sorted(phase.device.items(), key=lambda item: -item[1])
            shown = [item for item in parts if item[1] > 0.01 * phase.device_bytes]
            text = ", ".join(f"{part} {gib(size)}" for part, size in shown)
            mark = " <- peak" if phase is peak else ""
            host = gib(self.plan.host_bytes[name])
            table.add_row(name, gib(phase.device_bytes), text + mark, *([host] if has_host else []))
        self.console.print(table)
        thumb = thumb_of(trainer)
        terms = " + ".join(f"{name} {gib(size)}" for name, size in thumb.items())
        total = gib(sum(thumb.values()))
        self.say(f"the Archon tutorial's rule of thumb: {terms} = {total} GiB; {RULE_OMITS}.")

    def batch(self) -> None:
        batch = self.plan.batch
        each = self.plan.config.gconfig.n_samples
        self.title("Batch")
        if batch.answer_tokens:
            text = f"{batch.prompts} prompts x {each} samples = {batch.samples} sequences a step, "
            text += f"each at most {batch.prompt_tokens} + {batch.answer_tokens}"
        else:
            text = f"{batch.samples} sequences a step, each at most {batch.prompt_tokens}"
        self.say(f"{text} tokens: {batch.tokens:,} tokens")
        for trainer in self.plan.trainers:
            training = trainer.training
            if not training.with_optimizer:
                continue
            self.say(
                f"{trainer.role}: {trainer.batch_tokens:,.0f} tokens a data-parallel rank, "
                f"{training.num_microbatches} microbatches of at most "
                f"{training.microbatch_tokens:,} tokens"
            )
        self.say(f"training a step costs {batch.flops / 1e15:.3g} PFLOP (causal attention)")
        self.say(describe_steps(self.plan))

    def files(self) -> None:
        files = self.plan.files
        self.title("Files")
        self.say(
            f"HF export {gib(files.export_bytes)} GiB x {files.num_exports}; "
            f"{gib(files.free_bytes)} GiB free at {files.folder}"
        )

    def notes(self) -> None:
        if self.plan.notes:
            self.title("Notes")
        for note in self.plan.notes:
            self.say(f"- {note}")

    def verdict(self) -> None:
        plan = self.plan
        self.console.print()
        if plan.fits:
            size, where = plan.peak
            have = gib(plan.device.memory_bytes)
            tight = "; that is tight for an estimate" if plan.is_tight else ""
            self.say(f"Fits: {gib(size)} of {have} GiB at the peak ({where}){tight}.", "bold green")
            return
        for lack in plan.lacks:
            self.say(f"Does not fit: {lack}.", "bold red")
        if not self.remedies:
            return
        self.say("What would help, each on top of those before it:")
        table = self.table("override", "peak GiB", "", right=("peak GiB",))
        for remedy in self.remedies:
            fits = "fits" if remedy.fits else ""
            if remedy.num_devices != plan.allocation.num_devices:
                fits = f"{fits} ({remedy.num_devices} devices)".strip()
            table.add_row(" ".join(remedy.overrides), gib(remedy.peak_bytes), fits)
        self.console.print(table)
        if not self.remedies[-1].fits:
            self.say("That is not enough: use more devices, a smaller model or shorter answers.")


def describe_sampler(sampler: SamplePlan) -> str:
    room, wanted = sampler.num_running, sampler.sampling.num_sequences
    text = f"{sampler.component.role} ({sampler.component}): weights {gib(sampler.weights_bytes)}"
    text += f" + cache {gib(sampler.kv_bytes)} GiB a device, room for {room:,} sequences of "
    return text + f"{sampler.sampling.sequence_tokens:,} tokens; {wanted} wanted at once"


def describe_steps(plan: RunPlan) -> str:
    batch = plan.batch
    if batch.steps_per_epoch is None:
        total = f"{batch.total_steps} steps" if batch.total_steps else "steps an epoch not known"
        path = plan.config.train_dataset.path
        why = "train_dataset.path is unset" if path is None else "the data cannot be read here"
        return f"{total} ({why})"
    text = f"{batch.num_rows:,} rows: {batch.steps_per_epoch:,} steps an epoch"
    return f"{text}, {batch.total_steps:,} in all"


def as_dict(plan: RunPlan, remedies: list[Remedy]) -> dict[str, Any]:
    """The same figures for programs; sizes in bytes."""
    return {
        "fits": plan.fits,
        "lacks": plan.lacks,
        "model": {
            "path": plan.config.actor.path,
            "num_params": plan.dims.num_params,
            "num_active_params": plan.dims.num_active_params,
        },
        "device": {
            "kind": plan.device.kind,
            "memory_bytes": plan.device.memory_bytes,
            "source": plan.device.source,
        },
        "allocation": {
            "text": plan.config.allocation_mode,
            "num_devices": plan.allocation.num_devices,
        },
        "peak_bytes": plan.peak_bytes,
        "trainers": [trainer_dict(trainer) for trainer in plan.trainers],
        "samplers": [
            {
                "component": str(sampler.component),
                "devices": [sampler.devices.start, sampler.devices.stop],
                "weights_bytes": sampler.weights_bytes,
                "kv_bytes": sampler.kv_bytes,
                "num_running": sampler.num_running,
            }
            for sampler in plan.samplers
        ],
        "host_bytes_per_node": plan.host_bytes,
        "host_memory_here_bytes": host_memory()[0],
        "batch": {
            "prompts": plan.batch.prompts,
            "samples": plan.batch.samples,
            "max_tokens": plan.batch.tokens,
            "train_flops": plan.batch.flops,
            "num_rows": plan.batch.num_rows,
            "steps_per_epoch": plan.batch.steps_per_epoch,
            "total_steps": plan.batch.total_steps,
        },
        "files": asdict(plan.files),
        "notes": plan.notes,
        "remedies": [asdict(remedy) for remedy in remedies],
    }


def trainer_dict(trainer: TrainPlan) -> dict[str, Any]:
    layout = trainer.training.layout
    return {
        "role": trainer.role,
        "component": str(trainer.component),
        "devices": [trainer.devices.start, trainer.devices.stop],
        "layout": str(layout),
        "num_microbatches": trainer.training.num_microbatches,
        "microbatch_tokens": trainer.training.microbatch_tokens,
        "pipeline_ranks": [
            {name: {"device": phase.device, "host": phase.host} for name, phase in row.items()}
            for row in trainer.phases
        ],
        "rule_of_thumb": thumb_of(trainer),
    }
