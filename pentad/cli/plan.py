"""`pentad plan`: prints placement, memory by phase, batch, files, and remedies if it does not
fit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.cli.look import Looked, looking_at
from pentad.cli.output import make_console, make_table
from pentad.config.environments import environments
from pentad.config.rules.check import noted
from pentad.config.rules.elastic import fit_world
from pentad.config.rules.layout import layout_notes
from pentad.config.rules.model import uncounted
from pentad.config.rules.unused_keys import unread
from pentad.config.run_process import RunProcess
from pentad.config.schema import Config
from pentad.config.topology import Topology, facts_of, topology
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.layout import Component, Layout
from pentad.core.machine import GIB, host_memory
from pentad.data.rows import open_rows
from pentad.data.section import DatasetConfig
from pentad.data.shares import Turns, whole_shares
from pentad.planner.figures import RunPlan, SamplePlan, TrainPlan, inner_rows, span, stage_rows
from pentad.planner.memory import rule_of_thumb
from pentad.planner.plan import build_plan, choose_device
from pentad.planner.present import is_here
from pentad.planner.remedies import Remedy, propose, propose_adapter, propose_host

MAX_DATA_BYTES = 512 << 20
"""Rows of larger datasets are not counted, to keep `plan` quick."""
MAX_STAGE_ROWS = 32
TRAIN_ADAPTER = "Or train an adapter on the same devices (actor.lora, docs/lora.md):"
KEEP_ON_HOST = (
    "Or keep weights and optimizer state in host memory (slower, {host} GiB per machine):"
)
ON_EXAMPLES_NAMES = {"log-prob": "forward", "publish": "export"}
"""Other names of phases in a run without a sampler, where held-out rows and a reference need only a
forward pass."""


def run_plan(
    config: Config,
    notes: list[str],
    gpu_memory: float | None = None,
    as_json: bool = False,
    world: int | None = None,
) -> int:
    """Prints the plan; returns 0 if it fits, 1 if not. `world`: plans for this many remaining
    training ranks."""
    refused = refusals(config)  # of the layout before ranks are lost
    if world is not None:
        config, note = left_with(config, world)
        notes = [*notes, note]
    command = config.task
    notes = [*notes, *unread(config, command), *refused]
    if command != "train":
        where = f"allocation_mode = {config.allocation_mode}"
        said = " (train needs a reward)" if command == "sft" else ""
        notes.append(f"{where} has no sampler: planned for {command}{said}")
    with looking_at(config, gpu_memory) as looking:
        looked = looking.result()
    reason, plan = uncounted(config), None
    try:
        if reason:
            # Here, since it imports transformers, whose class decides whether it can be trained.
            from pentad.trainer.rank.learners import check_models

            check_models(config)
        else:
            plan = make_plan(config, notes, gpu_memory, looked.longest)
    except UserError as error:
        raise UserError([*error.problems, *looked.problems]) from error
    raise_problems(looked.problems)
    if plan is None:
        assert reason is not None, "else there is a plan"
        show_places(config, [*notes, *looked.notes, reason], looked, as_json)
        return 0
    plan.notes += [note for note in looked.notes if note not in plan.notes]
    show_plan(plan, looked, as_json)
    return 0 if plan.fits else 1


def show_plan(plan: RunPlan, looked: Looked, as_json: bool) -> None:
    remedies, adapter = propose(plan), propose_adapter(plan)
    is_here = any(one.fits and one.num_devices <= plan.allocation.num_devices for one in remedies)
    host = [] if is_here else propose_host(plan)
    if as_json:
        found = as_dict(plan, remedies) | {"inputs": looked.as_json()}
        found |= {"with_adapter": [asdict(one) for one in adapter]}
        found |= {"with_host_memory": [asdict(one) for one in host]}
        print(json.dumps(found, indent=2))
        return
    console = make_console()
    with console.capture() as captured:
        page = Page(plan, looked, remedies, console)
        page.show()
        page.alternative(TRAIN_ADAPTER, adapter)
        page.alternative(KEEP_ON_HOST, host)
    # Tables pad their last column.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def make_plan(
    config: Config, notes: Sequence[str], gpu_memory: float | None, longest: int | None = None
) -> RunPlan:
    """The plan of a model of known size; `longest`: tokens of the longest row that was read."""
    is_stream = config.task == "pretrain"
    num_rows, said = (None, []) if is_stream else count_all(config)
    plan = build_plan(config, choose_device(config, gpu_memory), num_rows, longest=longest)
    limit = config.cluster.count_devices()
    plan.notes = [*notes, *layout_notes(config, plan.dims, limit), *plan.notes, *said]
    return plan


def left_with(config: Config, world: int) -> tuple[Config, str]:
    """The config of an elastic run with this many ranks left, and its changes."""
    actor = config.component("actor")
    fitted = fit_world(config, world)
    where = f"--world {world}"
    if fitted is None:
        rule = f"no layout of so few ranks is valid for {actor}"
        raise UserError(Problem(where, rule, "the axes that cannot shrink are p, t and c"))
    batch = config.train_dataset.batch_size
    same = f"the global batch ({batch}) and the order of data stay"
    if world > actor.world:
        rule = f"{actor} has {actor.world} ranks: --world is the number of them that remain"
        raise UserError(
            Problem(where, rule, f"give at most {actor.world}, or make the axes larger")
        )
    if not fitted.why:
        return config, f"{where}: {actor} has its {actor.world} ranks, nothing changes"
    least, note = config.elastic.min_ranks, f"{where}: {fitted.why}; {same}"
    if not config.elastic.enabled:
        note += "; elastic.enabled = false: a run would not do so"
    elif world < least:
        note += f"; fewer than elastic.min_ranks = {least}: a run would wait"
    return fitted.config, note


def refusals(config: Config) -> list[str]:
    """Notes on settings that can be planned but are not implemented."""
    return [f"a run rejects it today: {problem}" for problem in noted(config)]


def show_places(config: Config, notes: list[str], looked: Looked, as_json: bool) -> None:
    """Prints the placement of a run whose memory is unknown."""
    found = topology(config)
    allocation = found.allocation
    rows = [(c.role, str(c), list(allocation.devices(c))) for c in allocation]
    if as_json:
        parts = [dict(zip(("role", "component", "devices"), row, strict=True)) for row in rows]
        processes = [asdict(one) for one in found.processes]
        known: dict[str, Any] = {"components": parts, "processes": processes, "memory": None}
        known |= {"inputs": looked.as_json(), "notes": notes}
        print(json.dumps(known, indent=2))
        return
    print(f"{config.actor.path}: {allocation.num_devices} devices, {config.allocation_mode}")
    for role, component, devices in rows:
        print(f"  {role}: {component} on {span(devices)}")
    for line in looked.lines:
        print(f"input: {line}")
    for note in notes:
        print(f"note: {note}")


def count_all(config: Config) -> tuple[int | None, list[str]]:
    """Number of prompts per epoch if the data can be read here, with notes on environments and on
    unreadable data."""
    found = [(one, *count_rows(one.data, one.data_key)) for one in environments(config)]
    notes = [note for _, _, said in found for note in said]
    if not config.rollout.workflows:
        return found[0][1], notes
    turns = Turns(whole_shares([one.weight for one, _, _ in found]))
    for (one, num, _), share in zip(found, turns.shares, strict=True):
        rows = "rows not known" if num is None else f"{num:,} rows"
        text = f"{share} of {turns.length} prompts, {one.workflow}, {rows} of {one.data.path}"
        held = f", held-out {one.valid.path}" if one.valid is not None else ""
        notes.append(f"environment {one.name}: {text}{held}")
    counts = [num for _, num, _ in found if num]
    return turns.until(counts) if len(counts) == len(found) else None, notes


def count_rows(data: DatasetConfig, block: str = "train_dataset") -> tuple[int | None, list[str]]:
    """Number of rows of a dataset if they can be read here; else None and a note."""
    if data.path is None:
        return None, []
    path = Path(data.path).expanduser()
    files = [path] if path.is_file() else list(path.rglob("*")) if path.is_dir() else []
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size > MAX_DATA_BYTES:
        return None, [f"{block}.path = {data.path}: {gib(size)} GiB, its rows are not counted"]
    kind, key = data.format, f"{block}.path"
    if not is_here(data.path):
        return None, []
    try:
        rows = open_rows(data.path, format=kind, streaming=True, limit=data.limit, key=key)
    except UserError as error:
        return None, [str(problem) for problem in error.problems]
    return len(rows), []


def gib(size: float) -> str:
    """Bytes as text in GiB, with two significant digits or one decimal."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def billions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


class Page:
    """Prints one plan."""

    def __init__(
        self, plan: RunPlan, looked: Looked, remedies: list[Remedy], console: Console
    ) -> None:
        self.plan = plan
        self.looked = looked
        self.remedies = remedies
        self.console = console

    def show(self) -> None:
        self.heading_line()
        self.placement()
        for trainer in self.plan.trainers:
            self.ranks(trainer)
        for trainer in self.plan.trainers:
            self.memory(trainer)
        for sampler in self.plan.samplers:
            self.say(describe_sampler(sampler))
        self.batch()
        files = self.plan.files
        text = f"HF export {gib(files.export_bytes)} GiB x {files.num_exports}"
        text += f", recovery checkpoint {gib(files.checkpoint_bytes)} GiB x {files.num_checkpoints}"
        how = "beside training, from host memory" if self.plan.is_async else "while training waits"
        text += f", written {how}; {gib(files.free_bytes)} GiB free at {files.folder}"
        self.section("Files", text)
        if self.looked.lines:
            self.section("Inputs", *(f"- {line}" for line in self.looked.lines))
        if self.plan.notes:
            self.section("Notes", *(f"- {note}" for note in self.plan.notes))
        self.verdict()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def section(self, title: str, *lines: str) -> None:
        self.console.print()
        self.say(title, "bold")
        for line in lines:
            self.say(line)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *right: str) -> None:
        """Prints a table; `right`: the columns of numbers."""
        self.console.print(make_table(columns, rows, right=right))

    def heading_line(self) -> None:
        plan, dims = self.plan, self.plan.dims
        active = f" ({billions(dims.num_active_params)} active)" if dims.num_experts else ""
        size = f"{billions(dims.num_params)} parameters{active}, {dims.num_layers} layers"
        size += f", {dims.num_experts} experts" if dims.num_experts else ""
        self.say(f"{plan.config.actor.path}: {size}", "bold")
        memory = gib(plan.device.memory_bytes)
        self.say(f"{plan.device.word} memory {memory} GiB ({plan.device.source})")

    def placement(self) -> None:
        """Prints a table of the processes of a run and their GPUs."""
        plan, placed = self.plan, topology_of(self.plan)
        limit, count = placed.facts.num_devices, plan.allocation.num_devices
        processes = counted(len(placed.processes), "process", "processes")
        if plan.device.kind == "cuda":
            used = f"{count} of {limit} GPUs" if limit else counted(count, "GPU", "GPUs")
            processes = f"{used} in {processes}"
        self.section(f"Placement: {processes}, mode {plan.config.mode or 'training only'}")
        rows = process_rows(placed.processes)
        columns = ("process", "runs", "machine", "GPUs", "shared with", "started by")
        shown = [n for n in range(len(columns)) if n not in (3, 4) or any(row[n] for row in rows)]
        self.table([columns[n] for n in shown], [[row[n] for n in shown] for row in rows])
        for component in plan.allocation:
            self.say(self.describe_part(component))

    def describe_part(self, component: Component) -> str:
        """Text on a component and its parallel layout."""
        plan, role = self.plan, component.role
        if role == "actor" and any(t.role == "critic" for t in plan.trainers):
            role += "" if plan.allocation.find("critic") else " and critic"
        if component.is_inference:
            number, word = component.size("d"), plan.device.word
            each = counted(component.world // number, word, f"{word}s")
            cut = f"{counted(number, 'replica', 'replicas')} of {each}"
        else:
            model = plan.config.critic if role == "critic" else plan.config.actor
            cut = describe_layout(component.layout(model.archon.dp_replicate))
        return f"{role} ({component}): {cut}"

    def ranks(self, trainer: TrainPlan) -> None:
        layout, dims = trainer.training.layout, trainer.training.dims
        if layout.world in (1, layout.dp_replicate * layout.dp_shard):
            return  # all ranks are alike, and the memory table shows one
        self.section(f"{trainer.role}: layers of each pipeline rank")
        columns = ("pp", "devices", "stages", "layers", "parameters", "stored", "peak GiB")
        rows = [
            (*words, billions(held), billions(stored), gib(peak))
            for *words, held, stored, peak in stage_rows(trainer)[:MAX_STAGE_ROWS]
        ]
        self.table(columns, rows, "parameters", "stored", "peak GiB")
        if layout.world == layout.pp:
            return
        count = layout.world // layout.pp
        self.say(f"positions of the {count} devices inside each pipeline rank:", "bold")
        found, left_out = inner_rows(layout, dims.num_heads, dims.num_experts)
        titles = ("device", "dp", "cp", "tp", "heads", "efsdp", "ep", "etp", "experts")
        num_columns = len(titles) if dims.num_experts else 5
        cells = [row[:num_columns] for row in found]
        if left_out:
            cells.insert(-1, (f"... {left_out} more alike",))
        self.table(titles[:num_columns], cells)

    def memory(self, trainer: TrainPlan) -> None:
        rank, peak = trainer.peak
        word, has_host = self.plan.device.word, self.plan.device.kind == "cuda"
        at = f", pipeline rank {rank}" if trainer.training.layout.pp > 1 else ""
        self.section(f"{trainer.role}: estimated memory by phase, GiB per {word}{at}")
        rows = []
        names = {} if self.plan.config.task == "train" else ON_EXAMPLES_NAMES
        for name, phase in trainer.phases[rank].items():
            if names and name == "rollout":
                continue
            parts = sorted(phase.device.items(), key=lambda item: -item[1])
            shown = [item for item in parts if item[1] > 0.01 * phase.device_bytes]
            text = ", ".join(f"{part} {gib(size)}" for part, size in shown)
            text += " <- peak" if phase is peak else ""
            called = names.get(name, name)
            rows.append((called, gib(phase.device_bytes), text, gib(self.plan.host_bytes[name])))
        columns = ("phase", word, "of which", "host per node")[: 3 + has_host]
        self.table(columns, [row[: 3 + has_host] for row in rows], word, "host per node")

    def batch(self) -> None:
        batch, each = self.plan.batch, self.plan.config.gconfig.n_samples
        text = f"{batch.samples} sequences per step, each at most {batch.prompt_tokens}"
        if batch.answer_tokens:
            text = f"{batch.prompts} prompts x {each} samples = {text} + {batch.answer_tokens}"
        self.section("Batch", f"{text} tokens: {batch.tokens:,} tokens")
        if self.plan.config.samples_greedily:
            greedy = counted(batch.prompts, "greedy answer", "greedy answers")
            self.say(f"{self.plan.config.algorithm.name} also samples {greedy}, not trained")
        for trainer in self.plan.trainers:
            training = trainer.training
            if training.with_optimizer:
                self.say(
                    f"{trainer.role}: {trainer.batch_tokens:,.0f} tokens per data-parallel rank, "
                    f"{training.num_microbatches} microbatches of at most "
                    f"{training.microbatch_tokens:,} tokens"
                )
        self.say(f"training a step costs {batch.flops / 1e15:.3g} PFLOP (causal attention)")
        self.say(describe_steps(self.plan))

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
        self.say("Remedies, cheapest first; each row includes the rows above it:")
        self.remedy_table(self.remedies)
        if not self.remedies[-1].fits:
            self.say(
                "All of it is not enough: use more devices, a smaller model or shorter answers."
            )

    def alternative(self, text: str, remedies: list[Remedy]) -> None:
        if remedies:
            self.say(text.format(host=gib(remedies[-1].host_bytes)))
            self.remedy_table(remedies)

    def remedy_table(self, remedies: list[Remedy]) -> None:
        rows, sampler_fits = [], self.plan.sampler_fits
        for remedy in remedies:
            result = "fits" if remedy.fits else ""
            if remedy.sampler_fits and not (sampler_fits or remedy.fits):
                result = "gives the sampler's cache room"
            if remedy.num_devices != self.plan.allocation.num_devices:
                result = f"{result} ({remedy.num_devices} devices)".strip()
            rows.append((" ".join(remedy.overrides), gib(remedy.peak_bytes), result))
            sampler_fits = remedy.sampler_fits
        self.table(("override", "peak GiB", ""), rows, "peak GiB")


def process_rows(processes: Sequence[RunProcess]) -> list[tuple[str, str, str, str, str, str]]:
    """Rows (name, roles, machine, GPUs, sharers, starter); processes that differ only in their
    numbers share a row."""

    def likeness(one: RunProcess) -> tuple[object, ...]:
        words = tuple(role.split()[0] for role in one.runs)
        sharers = sorted({name.rpartition("-")[0] for name in one.shares_with})
        at = "bundle" if one.bundle is not None else one.node
        return one.name.rpartition("-")[0], words, at, one.started_by, sharers, len(one.devices)

    rows = []
    for _, group in itertools.groupby(processes, likeness):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name, runs = first.name, ", ".join(first.runs)
        if len(alike) > 1:
            name += f" to {last.name}"
            runs = ", ".join(role.split()[0] for role in first.runs)
        sharers = list(dict.fromkeys(name for one in alike for name in one.shares_with))
        if len(sharers) > 2:
            sharers = [f"{sharers[0]} to {sharers[-1]}"]
        rows.append(
            (name, runs, machine_of(alike), gpus_of(alike), ", ".join(sharers), first.started_by)
        )
    return rows


def machine_of(alike: Sequence[RunProcess]) -> str:
    if alike[0].bundle is not None:
        numbers = sorted({one.bundle for one in alike if one.bundle is not None})
        return f"bundle{'s' * (len(numbers) > 1)} {span(numbers)}"
    return "any" if alike[0].node is None else str(alike[0].node)


def gpus_of(alike: Sequence[RunProcess]) -> str:
    """GPU numbers; on Ray, which assigns them, only their count."""
    if alike[0].bundle is not None and alike[0].num_gpus:
        return f"{alike[0].num_gpus} each" if len(alike) > 1 else str(alike[0].num_gpus)
    return span(sorted({device for one in alike for device in one.devices}))


def counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def describe_layout(layout: Layout) -> str:
    """Text with the number of ranks and the axes of the layout."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    cut = [f"{name}={size}" for name in names if (size := getattr(layout, name)) > 1]
    experts = [f"{name}={size}" for name in ("ep", "etp") if (size := getattr(layout, name)) > 1]
    if experts:
        cut.append(f"experts {' '.join([*experts, f'efsdp={layout.efsdp}'])}")
    ranks = counted(layout.world, "rank", "ranks")
    return f"{ranks}: {', '.join(cut)}" if cut else ranks


def topology_of(plan: RunPlan) -> Topology:
    return topology(plan.config, facts_of(plan.config, plan.device.kind))


def describe_sampler(sampler: SamplePlan) -> str:
    room, wanted = sampler.num_running, sampler.sampling.num_sequences
    text = f"{sampler.component.role} ({sampler.component}), GiB per device: weights "
    text += f"{gib(sampler.weights_bytes)}, key-value cache {gib(sampler.kv_bytes)}"
    if sampler.slots_bytes:
        text += f", states of delta nets {gib(sampler.slots_bytes)}"
    if sampler.pass_tokens:
        text += f", a forward pass of {sampler.pass_tokens:,} tokens {gib(sampler.pass_bytes)}"
    held = counted(room, "sequence", "sequences")
    text += f"; the cache holds {held} of {sampler.sampling.sequence_tokens:,} tokens"
    return f"{text}, and the run starts {wanted} at once per replica"


def describe_steps(plan: RunPlan) -> str:
    batch = plan.batch
    if batch.steps_per_epoch is None:
        total = f"{batch.total_steps} steps" if batch.total_steps else "steps per epoch not known"
        path = plan.config.train_dataset.path or plan.config.rollout.workflows
        is_stream = plan.config.task == "pretrain"
        why = "sequences are not counted" if is_stream else "the data cannot be read here"
        why = why if path else "train_dataset.path is unset"
        return f"{total} ({why})"
    assert batch.num_rows is not None, "steps of an epoch are counted from rows"
    text = counted(batch.num_rows, "row", "rows")
    if plan.config.rollout.workflows:
        text = f"{batch.num_rows:,} prompts of all environments"
    text += f": {counted(batch.steps_per_epoch, 'step', 'steps')} per epoch"
    return f"{text}, {batch.total_steps:,} in all"


def as_dict(plan: RunPlan, remedies: list[Remedy]) -> dict[str, Any]:
    """The figures as JSON values; sizes in bytes."""
    model = picked(plan.dims, "num_params num_active_params")
    batch = picked(plan.batch, "prompts samples num_rows steps_per_epoch total_steps")
    allocation = {"text": plan.config.allocation_mode, "num_devices": plan.allocation.num_devices}
    return {
        **picked(plan, "fits lacks peak_bytes notes"),
        "model": {"path": plan.config.actor.path, **model},
        "device": picked(plan.device, "kind memory_bytes source"),
        "allocation": allocation,
        "processes": [asdict(one) for one in topology_of(plan).processes],
        "trainers": [
            {
                **placed(trainer),
                "role": trainer.role,
                "layout": str(trainer.training.layout),
                **picked(trainer.training, "num_microbatches microbatch_tokens"),
                "pipeline_ranks": [
                    {name: picked(phase, "device host") for name, phase in row.items()}
                    for row in trainer.phases
                ],
                "rule_of_thumb": rule_of_thumb(trainer.training, trainer.batch_tokens),
            }
            for trainer in plan.trainers
        ],
        "samplers": [
            placed(sampler)
            | picked(
                sampler, "weights_bytes kv_bytes slots_bytes pass_tokens pass_bytes num_running"
            )
            for sampler in plan.samplers
        ],
        "host_bytes_per_node": plan.host_bytes,
        "saver_mode": "async" if plan.is_async else "sync",
        "host_memory_here_bytes": host_memory()[0],
        "batch": batch | {"max_tokens": plan.batch.tokens, "train_flops": plan.batch.flops},
        "files": asdict(plan.files),
        "remedies": [asdict(remedy) for remedy in remedies],
    }


def picked(part: object, names: str) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names.split()}


def placed(part: TrainPlan | SamplePlan) -> dict[str, Any]:
    devices = [part.devices.start, part.devices.stop]
    return {"component": str(part.component), "devices": devices}
