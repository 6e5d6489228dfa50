"""`pentad convert`: runs a conversion with a progress bar, and prints its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pentad.cli.options import ConvertOptions
from pentad.core.errors import Problem, UserError
from pentad.core.folders import INFO, STATE, RecoveryPath, recovery_path, tensor_names
from pentad.core.quantization import FLAG
from pentad.models.catalog import quantization
from pentad.models.conversion import Conversion, Converted, check_apart, convert
from pentad.models.conversion_files import OnProgress, check_target
from pentad.models.towers import by_adapter_names
from pentad.planner.hub import local_model
from pentad.runtime.helper import HelperPool
from pentad.weights.megatron.layout import RELEASE, FolderKind, checkpoint_name, find_weights
from pentad.weights.merge import merge_folder
from pentad.weights.peft import CONFIG as ADAPTER
from pentad.weights.peft import is_adapter, read_adapter

LOSS_WORTH_A_NOTE = 0.01
NOT_OF_RECOVERY = (
    *("iteration", "release", "spec", "tp", "pp", "vpp", "ep", "etp", "config", "dequantize"),
    *("separate_layers", "make_vocab_size_divisible_by"),
)
"""Options that do not apply to recovery checkpoints."""
FORMATS: dict[str, FolderKind] = {
    "hf": "hf",
    "megatron": "torch_dist",
    "torch_dist": "torch_dist",
    "legacy": "legacy",
}


def run_convert(given: ConvertOptions) -> None:
    """Converts SRC to DST, and prints the result."""
    if given.merge or given.base is not None or is_adapter(given.source):
        check_merge(given)
        merge_adapter(given)
        return
    source = local_model(given.source, f"SRC = {given.source}")
    if recovery := recovery_path(Path(source)):
        _convert_recovery(recovery, given)
        return
    role, spec, iteration = given.role, given.spec, given.iteration
    if role is not None or given.tag != "actor":
        where = f"--role {role}" if role is not None else f"--tag {given.tag}"
        rule = f"is for recovery checkpoints, and {source} is not one"
        raise UserError(Problem(where, rule, "leave it out"))
    if iteration is not None and given.release:
        rule = "each names a checkpoint, and one is converted"
        raise UserError(Problem(f"--iteration {iteration} --release", rule, "keep one of the two"))
    if given.processes < 1:
        raise UserError(Problem(f"--processes {given.processes}", "must be at least 1"))
    if spec not in ("te", "local"):
        raise UserError(Problem(f"--spec {spec}", "no such layer spec", "use te or local"))
    name = checkpoint_name(iteration) if iteration is not None else None
    name = RELEASE if given.release else name
    _, kind = find_weights(Path(source), name)
    target_kind = _target_format(given.to, kind)
    if kind == target_kind == "hf" and name is not None:
        where = "--release" if given.release else f"--iteration {iteration}"
        rule = f"names a checkpoint of Megatron, and {source} and {given.target} are HF folders"
        raise UserError(Problem(where, rule, "leave it out"))
    conversion = Conversion(
        source=source,
        target=given.target,
        to=target_kind,
        tp=given.tp,
        pp=given.pp,
        vpp=given.vpp,
        ep=given.ep,
        etp=given.etp,
        checkpoint=name,
        iteration=iteration,
        spec="local" if spec == "local" else "te",
        separate_layers=given.separate_layers,
        dtype=given.dtype,
        dequantize=given.dequantize,
        vocab_divisor=given.make_vocab_size_divisible_by,
        config=given.config,
        model=given.model,
    )
    console = Console(stderr=True)
    with progress_bar(console) as report:
        pool = HelperPool(given.processes) if given.processes > 1 else None
        ended = convert(conversion, pool=pool, force=given.force, progress=report)
    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(_last_line(ended))
    if ended.command_line:
        out.print(f"Megatron needs, besides --use-checkpoint-args: {ended.command_line}")


def _convert_recovery(recovery: RecoveryPath, given: ConvertOptions) -> None:
    """Converts a recovery checkpoint to an HF folder; other formats need a second conversion."""
    # Here, since it imports torch.distributed.checkpoint, which other conversions do not need.
    from pentad.checkpoint.restore import ACTOR, export_hf, find_recovery

    unset = {field.name: field.default for field in fields(given)}
    unknown = [name for name in NOT_OF_RECOVERY if getattr(given, name) != unset[name]]
    if given.to not in (None, "hf") or unknown:
        is_kind = given.to not in (None, "hf")
        where = f"--to {given.to}" if is_kind else f"--{unknown[0].replace('_', '-')}"
        rule = "a recovery checkpoint becomes a HF folder"
        raise UserError(Problem(where, rule, "leave it out, and convert that folder afterwards"))
    target, tag = Path(given.target), given.tag
    check_target(target, force=given.force)
    for folder in (recovery.root / INFO, *recovery.root.glob(f"*/{STATE}")):
        check_apart(folder, target)
    checkpoint = find_recovery(recovery)
    begun = time.monotonic()
    named = ACTOR if given.role == "actor" else given.role or recovery.role or ACTOR
    kept = {"dtype": given.dtype, "model": given.model}
    counters = export_hf(checkpoint, target, role=named, tag=tag, **kept)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    out = Console(highlight=False, markup=False, soft_wrap=True)
    what = f"{'actor' if named == ACTOR else named} after step {checkpoint.step + 1}"
    what += f", tag {tag}" if tag != "actor" else ""
    took = f"{size / 1e9:.2f} GB in {time.monotonic() - begun:.1f} s"
    out.print(f"{target}: written ({what} of {checkpoint.root}, every byte verified; {took})")
    if not (target / "tokenizer_config.json").exists():
        known = ", ".join(counters["companions"]) or "none"
        out.print(f"It has no tokenizer: the run took it from {known}; copy its files beside it")


def check_merge(given: ConvertOptions) -> None:
    """Rejects merge options if SRC is not an adapter, and an adapter without merge options."""
    source = given.source
    if not is_adapter(source):
        rule = f"is for adapters, and {source} has no {ADAPTER}"
        raise UserError(Problem("--merge or --base", rule, "give the PEFT folder as SRC"))
    if not given.merge:
        rule = "is an adapter, without full weights to convert"
        remedy = "merge it into its base with --merge, or serve it as it is"
        raise UserError(Problem(source, rule, remedy))
    if given.to not in (None, "hf"):
        rule = "an adapter is merged into a HF folder"
        raise UserError(
            Problem(f"--to {given.to}", rule, "leave it out, and convert that afterwards")
        )
    if given.dequantize:
        rule = "an adapter is merged into 16-bit weights"
        remedy = f"convert the base with {FLAG} --to hf, and name that folder with --base"
        raise UserError(Problem(FLAG, rule, remedy))


def merge_adapter(given: ConvertOptions) -> None:
    """Writes the base with the adapter merged, and prints the rounding loss."""
    source, target = given.source, given.target
    adapter = read_adapter(source)
    model = given.base or adapter.base
    model = local_model(model, f"{source}: its base, {model}") if model else ""
    if not Path(model).is_dir() or not model:
        rule = f"its base, {model or 'which its config does not name'}, is not a folder here"
        raise UserError(Problem(source, rule, "name the folder with --base"))
    check_target(Path(target), force=given.force)
    for folder in (source, model):
        check_apart(Path(folder), Path(target))
    if found := quantization(model):
        rule = f"its weights are quantised ({found.method}), and 16-bit weights are merged into"
        remedy = f"convert it with {FLAG} --to hf, and name that folder with --base"
        raise UserError(Problem(f"base = {model}", rule, remedy))
    begun = time.monotonic()
    names = by_adapter_names(model, {name: name for name in tensor_names(Path(model))})
    loss = merge_folder(model, adapter, target, given.dtype, source, names)
    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(f"{target}: written ({source} in {model}; {time.monotonic() - begun:.1f} s)")
    out.print(f"{loss}")
    if loss.lost > LOSS_WORTH_A_NOTE:
        remedy = "write it with --dtype float32, or serve the adapter unmerged"
        out.print(f"note: the folder is not the policy that was trained; {remedy}")


def _target_format(to: str | None, source: FolderKind) -> FolderKind:
    """The format to write; by default HF becomes torch_dist and Megatron becomes HF."""
    if to is None:
        return "torch_dist" if source == "hf" else "hf"
    if to not in FORMATS:
        raise UserError(Problem(f"--to {to}", "no such format", f"use one of {', '.join(FORMATS)}"))
    return FORMATS[to]


def _last_line(ended: Converted) -> str:
    size = f"{ended.num_files} files, {ended.size_bytes / 1e9:.2f} GB"
    if ended.status == "found":
        return f"{ended.folder}: already there ({size}, {ended.identity}); nothing was done"
    return f"{ended.folder}: written ({size}, {ended.identity}) in {ended.seconds:.1f} s"


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """Shows a progress bar; yields the function that a conversion reports its progress to."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bar:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report
