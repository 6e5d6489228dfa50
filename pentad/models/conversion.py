"""Conversion between HF folders and Megatron's, and from one Megatron layout to another.

Every source is read by HF-on-disk names and every output is filled from these, so all pairs of
formats and layouts are supported. The output has a record of its source; a repeated request finds
it and does nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.files import json_digest
from pentad.core.folders import INDEX as HF_INDEX
from pentad.core.quantization import KEY as QUANTIZATION
from pentad.core.quantization import flag_problems, quantization_of
from pentad.models.conversion_files import (
    RECORD,
    ConversionRecord,
    OnProgress,
    SourceFiles,
    WrittenFile,
    check_target,
    is_whole,
    read_record,
    read_source,
    stats_of,
    write_aside,
    write_files,
    write_record,
)
from pentad.models.families import dims_of, map_of, path_of, read_config, spec_of
from pentad.models.registry import column_of, open_weights, warn_left_out
from pentad.models.spec import padded_vocab
from pentad.weights import transfer
from pentad.weights.dequantize import DequantizedFolder
from pentad.weights.hf import (
    SHARD_BYTES,
    HfFolder,
    companion_files,
    copy_companions,
    plan_files,
    write_json,
)
from pentad.weights.map import WeightMap
from pentad.weights.megatron.arguments import build_args, command_line
from pentad.weights.megatron.dist import COMMON
from pentad.weights.megatron.layout import (
    INDEX,
    RANK_FILE,
    FolderKind,
    build_layout,
    check_rank_files,
    checkpoint_name,
    find_weights,
    iteration_of,
    write_tracker,
)
from pentad.weights.megatron.model_args import unsayable
from pentad.weights.megatron.outputs import (
    DistOutput,
    Filler,
    HfFile,
    HfOutput,
    LegacyOutput,
    Output,
    hf_files,
    hf_files_of,
)
from pentad.weights.megatron.stored import Form, Spelling
from pentad.weights.transfer import Reader

VERSION = 2
"""Version of the output format; records of other versions do not match a request."""
CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion request."""

    source: str
    target: str
    to: FolderKind
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    """null: as tp."""
    checkpoint: str | None = None
    """The checkpoint of a Megatron source; null: the one that its tracker file names."""
    iteration: int | None = None
    """Iteration number of a Megatron output; null: released weights."""
    spec: Spelling = "te"
    separate_layers: bool = False
    """Whether torch_dist has a key per layer even if all layers are alike."""
    dtype: str | None = None
    dequantize: bool = False
    """Whether the source is quantised, and read as 16-bit weights."""
    vocab_divisor: int = 128
    """Megatron's `make_vocab_size_divisible_by`."""
    config: str | None = None
    """HF folder or config.json of the model, if the source has none."""
    model: str | None = None
    """Family of the model, overriding the config's `model_type`."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    folder: Path
    status: Literal["written", "found"]
    identity: str
    num_files: int
    size_bytes: int
    seconds: float
    command_line: str = ""
    """Arguments that Megatron needs besides `--use-checkpoint-args`."""


@dataclass(frozen=True)
class Opened:
    """The source of a conversion."""

    root: Path
    folder: Path
    """The folder of its weights: the root itself, or one checkpoint in it."""
    kind: FolderKind
    config: Path
    dims: ModelDims
    reader: Reader

    @property
    def hf(self) -> HfFolder | None:
        """The folder of a HF source as it is on disk."""
        reader = self.reader.folder if isinstance(self.reader, DequantizedFolder) else self.reader
        return reader if isinstance(reader, HfFolder) else None

    def files(self) -> dict[str, Path]:
        """All files on which the output depends, by name."""
        if self.hf is not None:
            paths = {*self.hf.file_of.values(), self.folder / HF_INDEX}
        elif self.kind == "torch_dist":
            paths = {*self.folder.glob("*.distcp"), self.folder / INDEX, self.folder / COMMON}
        else:
            paths = set(self.folder.glob(f"mp_rank_*/{RANK_FILE}"))
        named = {str(path.relative_to(self.folder)): path for path in paths if path.is_file()}
        beside = [companion_files(folder) for folder in reversed(self.companions())]
        config = companion_files(self.config.parent, [self.config.name])[self.config.name]
        return {**named, **beside[0], **beside[1], CONFIG: config}

    def companions(self) -> list[Path]:
        return [self.root, self.config.parent]


def open_source(conversion: Conversion) -> Opened:
    root = Path(conversion.source)
    folder, kind = find_weights(root, conversion.checkpoint)
    config = _config_of(conversion, root, folder)
    dims = dims_of(config, conversion.model)
    asked = conversion.dequantize
    found = quantization_of(read_config(config)) if kind == "hf" else None
    raise_problems(flag_problems(conversion.source, found, dequantize=asked))
    reader = open_weights(root, dims, conversion.checkpoint, dequantize=asked)
    return Opened(root, folder, kind, config, dims, reader)


def _config_of(conversion: Conversion, root: Path, folder: Path) -> Path:
    given = Path(conversion.config) if conversion.config else None
    if given is not None:
        path = given / CONFIG if given.is_dir() else given
        if not path.is_file():
            raise UserError(Problem(f"config = {given}", f"no {CONFIG} there"))
        return path
    for place in (root, folder, root.parent):
        if (place / CONFIG).is_file():
            return place / CONFIG
    rule = f"no {CONFIG} in it, and the shape of the model is read from that"
    raise UserError(Problem(str(root), rule, "name the HF folder of the model with --config"))


def convert(
    conversion: Conversion,
    *,
    pool: Executor | None = None,
    force: bool = False,
    progress: OnProgress = lambda what, done, total: None,
) -> Converted:
    """Converts, or finds an earlier result; problems are raised before anything is written. `pool`:
    processes that write files, of which a lost one raises Transient; None: this one does."""
    started = time.monotonic()
    check_apart(Path(conversion.source), Path(conversion.target))
    opened = open_source(conversion)
    recipe = _settled(conversion, opened)
    target = Path(conversion.target)
    request = _request(recipe)
    flags = "" if recipe.to == "hf" else command_line(opened.dims)
    known = read_record(target) if target.is_dir() else None
    same = known is not None and known.request == request and is_whole(target, known)
    if known and same and known.source["stats"] == stats_of(opened.files()):
        return _ended(target, "found", known, started, flags)
    output = _output(recipe, opened)
    if recipe.to != "hf" or recipe.dequantize:
        warn_left_out(map_of(opened.dims), opened.reader)
    source = read_source(opened.files(), progress)
    _check_unharmed(opened, source)
    identity = json_digest({"request": request, "source": source.digests})
    if known and same and known.identity == identity:
        return _ended(target, "found", known, started, flags)
    is_damaged = known is not None and known.identity == identity
    check_target(target, force=force or is_damaged)
    with write_aside(target) as aside:
        folder = aside if recipe.to == "hf" else aside / checkpoint_name(recipe.iteration)
        written = write_files(output, build_output, recipe, folder, pool=pool, progress=progress)
        output.finish(folder, {name: file.notes for name, file in written.items()})
        _write_companions(recipe, opened, aside)
        if stats_of(opened.files()) != source.stats:
            raise RunError(f"{conversion.source}: changed while it was read; run it again")
        record = _record(identity, request, source, written, folder.relative_to(aside), opened)
        write_record(aside, record)
    return _ended(target, "written", record, started, flags)


def check_apart(source: Path, target: Path) -> None:
    """UserError if one folder contains the other: the conversion would overwrite its source."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        rule = f"is inside the source, {source}, or contains it"
        raise UserError(Problem(str(target), rule, "give a folder elsewhere"))


def _check_unharmed(opened: Opened, source: SourceFiles) -> None:
    """Checks that the source, if it is an earlier conversion, is unchanged; otherwise a flipped bit
    would not be noticed."""
    record = read_record(opened.root)
    known = record.files if record else {}
    inside = opened.folder.relative_to(opened.root)
    problems = [
        Problem(
            str(opened.folder / name),
            f"differs from the file recorded in {RECORD}",
            f"convert again; if the change is intended, remove {RECORD} from it",
        )
        for name, digest in source.digests.items()
        if known.get(str(inside / name), [0, digest])[1] != digest
    ]
    raise_problems(problems)


def _settled(conversion: Conversion, opened: Opened) -> Conversion:
    """The request, completed by values of the source, so that worker processes use the same."""
    source = str(Path(conversion.source).absolute())
    recipe = replace(conversion, source=source, target=str(Path(conversion.target).absolute()))
    recipe = replace(recipe, model=path_of(opened.dims.family), config=str(opened.config))
    if recipe.dequantize and recipe.dtype is None:
        recipe = replace(recipe, dtype=_own_dtype(read_config(opened.config)))
    if opened.kind != "hf":
        name, iteration = opened.folder.name, iteration_of(opened.folder)
        inside = opened.folder != opened.root
        recipe = replace(recipe, checkpoint=name if inside else None, iteration=iteration)
    return recipe


def _own_dtype(config: Mapping[str, Any]) -> str:
    """The dtype of the model that a quantised folder stands for."""
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return name if name in DTYPES else "bfloat16"


def _request(recipe: Conversion) -> dict[str, Any]:
    """The request without paths, for comparison with a record."""
    out = asdict(recipe)
    for place in ("source", "target", "config", "checkpoint"):
        del out[place]
    if not recipe.dequantize:
        del out["dequantize"]  # as in records from before there was the key
    return {**out, "version": VERSION}


def _ended(
    target: Path,
    status: Literal["written", "found"],
    record: ConversionRecord,
    started: float,
    flags: str,
) -> Converted:
    size = sum(size for size, _ in record.files.values())
    seconds = time.monotonic() - started
    return Converted(target, status, record.identity, len(record.files), size, seconds, flags)


def build_output(recipe: Conversion) -> Output:
    """Builds the output of a request in a worker process."""
    return _output(recipe, open_source(recipe))


def _output(recipe: Conversion, opened: Opened) -> Output:
    dims = opened.dims
    filler = Filler(opened.reader, _dtype(recipe))
    if recipe.to == "hf":
        _refuse_axes(recipe)
        if recipe.dequantize:
            _check_source(map_of(dims), opened.reader)
        return HfOutput(_hf_plan(recipe, opened), filler, map_of(dims))
    layout = build_layout(
        dims, tp=recipe.tp, pp=recipe.pp, vpp=recipe.vpp, ep=recipe.ep, etp=recipe.etp
    )
    if recipe.to == "legacy":
        check_rank_files(layout)
    raise_problems(unsayable(dims))  # first, because the column of such a model is incomplete
    vocab_rows = padded_vocab(dims.vocab_size, layout.tp, recipe.vocab_divisor)
    column = column_of(dims, vocab_rows)
    _check_source(column.map, opened.reader)
    embedding = next(iter(column.map.sources))
    args = build_args(
        dims,
        layout,
        vocab_rows=vocab_rows,
        vocab_divisor=recipe.vocab_divisor,
        file_format=recipe.to,
        spelling=recipe.spec,
        dtype=filler.dtype or opened.reader.infos[embedding].dtype,
    )
    args.iteration = recipe.iteration or 0
    if recipe.to == "legacy":
        return LegacyOutput(
            column, layout, filler, args, iteration=recipe.iteration, spelling=recipe.spec
        )
    return DistOutput(
        column,
        filler,
        args,
        iteration=recipe.iteration,
        form=_form(recipe, dims),
        spelling=recipe.spec,
        shard_bytes=recipe.shard_bytes,
    )


def _refuse_axes(recipe: Conversion) -> None:
    sizes = {"tp": recipe.tp, "pp": recipe.pp, "vpp": recipe.vpp, "ep": recipe.ep}
    cut = [f"{axis} = {n}" for axis, n in {**sizes, "etp": recipe.etp or 1}.items() if n != 1]
    if cut:
        rule = "splits Megatron's files, and a HF folder is not split"
        raise UserError(Problem(", ".join(cut), rule, "leave it out"))


def _form(recipe: Conversion, dims: ModelDims) -> Form:
    """The torch_dist form: stacked if all layers are alike, else separate."""
    mixed = any(dims.moe_layers) and not all(dims.moe_layers)
    return "separate" if mixed or recipe.separate_layers else "stacked"


def _dtype(recipe: Conversion) -> torch.dtype | None:
    if recipe.dtype is None:
        return None
    if recipe.dtype not in DTYPES:
        names = ", ".join(DTYPES)
        raise UserError(Problem(f"dtype = {recipe.dtype}", "no such type", f"use one of {names}"))
    return DTYPES[recipe.dtype]


def _check_source(weight_map: WeightMap, reader: Reader) -> None:
    """Checks that all needed tensors and no others are present, and that tied ones agree."""
    nothing = transfer.Shard(torch.empty(0), ())
    transfer.check(dict.fromkeys(weight_map.entries, nothing), weight_map, reader)
    transfer.check_tied(weight_map, reader)


def _hf_plan(recipe: Conversion, opened: Opened) -> list[HfFile]:
    """The file split of the original HF folder, if known."""
    if isinstance(opened.reader, HfFolder):
        return hf_files_of(opened.reader)
    known = _hf_files_of_record(opened.root)
    tied = map_of(opened.dims).tied
    named = {name for file in known for name in file.tensors}
    if known and named >= opened.reader.infos.keys() >= named - tied.keys():
        return known
    sources, dtype = map_of(opened.dims).sources, _dtype(recipe)
    infos = {
        name: replace(info, dtype=transfer.written_dtype(sources[name], dtype) or info.dtype)
        for name, info in opened.reader.infos.items()
        if name in sources
    }
    return hf_files(plan_files(infos, recipe.shard_bytes))


def _hf_files_of_record(root: Path) -> list[HfFile]:
    record = read_record(root)
    if record is None:
        return []
    files = record.extra.get("hf_files", [])
    return [HfFile(name, tuple(tensors), metadata) for name, tensors, metadata in files]


def _write_companions(recipe: Conversion, opened: Opened, root: Path) -> None:
    """Writes config and tokenizer beside the weights, so that the folder can be converted back."""
    copy_companions(opened.companions(), root)
    config = read_config(opened.config)
    quantization = config.pop(QUANTIZATION, None)
    changes: dict[str, Any] = {}
    if recipe.to != "hf" or not isinstance(opened.reader, HfFolder):
        changes = dict(spec_of(opened.dims.family).saved_config)
    if recipe.to == "hf" and recipe.dtype is not None:
        changes["dtype"] = recipe.dtype
        config.pop("torch_dtype", None)
    if config == config | changes and quantization is None:
        shutil.copyfile(opened.config, root / CONFIG)
    else:
        write_json(root / CONFIG, config | changes)
    if recipe.to != "hf":
        write_tracker(root, recipe.iteration)


def _record(
    identity: str,
    request: dict[str, Any],
    source: SourceFiles,
    written: Mapping[str, WrittenFile],
    inside: Path,
    opened: Opened,
) -> ConversionRecord:
    files = {str(inside / n): [file.size_bytes, file.digest] for n, file in written.items()}
    if isinstance(opened.reader, HfFolder):
        known = hf_files_of(opened.reader)
    else:
        known = _hf_files_of_record(opened.root)
    plan = [[file.name, list(file.tensors), dict(file.metadata)] for file in known]
    return ConversionRecord(identity, request, asdict(source), files, {"hf_files": plan})
