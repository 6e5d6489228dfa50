"""Megatron's layouts and folders: layers, experts and rows of each model-parallel rank, and paths
of a checkpoint.

A legacy checkpoint has one file per rank of tp x pp x ep; within a pipeline rank, there are `vpp`
chunks of layers. Experts are sharded by ep and etp over the same ranks, in Megatron's default
order: of the ranks r of a pipeline rank, tp = r % TP, etp = r % ETP, ep = r // ETP % EP.

FOLDER/latest_checkpointed_iteration.txt     "release", or the iteration
FOLDER/release or FOLDER/iter_0000100        one checkpoint: mp_rank folders, or torch_dist
FOLDER/config.json and tokenizer files       beside them, where a converter put them
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.folders import INDEX as HF_INDEX
from pentad.core.folders import SINGLE, recovery_problem
from pentad.core.layout import divisors

RANK_FILE = "model_optim_rng.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d\d+)(?:_(\d\d\d+))?(?:_(\d\d\d+))?")


@dataclass(frozen=True, slots=True)
class MegatronRank:
    """The coordinates of a rank file: tp, pp and ep."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Sizes of the model-parallel axes, and the number of layers of each pipeline stage."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each stage in the order of the model: stage v * pp + p is chunk v of rank p."""

    def layers(self, pp: int, chunk: int) -> range:
        """Global indices of the layers in one chunk of a pipeline rank."""
        stage = chunk * self.pp + pp
        start = sum(self.stages[:stage])
        return range(start, start + self.stages[stage])

    def ranks(self) -> list[MegatronRank]:
        """Ranks with their own file: each pair of tp and ep that occurs."""
        pairs = {
            (r % self.tp, r // self.etp % self.ep)
            for r in range(math.lcm(self.tp, self.etp * self.ep))
        }
        return [MegatronRank(tp, pp, ep) for pp in range(self.pp) for tp, ep in sorted(pairs)]

    def folder(self, rank: MegatronRank) -> str:
        """The name of a rank's folder, `mp_rank_01_003`; axes of size 1 are left out."""
        name = f"mp_rank_{rank.tp:02d}"
        if self.pp > 1:
            name += f"_{rank.pp:03d}"
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")

    def folders(self) -> set[str]:
        """Names of the folders that ranks of this layout read."""
        return {self.folder(rank) for rank in self.ranks()}

    def grid(self) -> set[str]:
        """Names of all tp x pp x ep folders; some are unread replicas if etp is not tp."""
        spots = itertools.product(range(self.tp), range(self.pp), range(self.ep))
        return {self.folder(MegatronRank(*spot)) for spot in spots}

    def coords(self, rank: MegatronRank) -> dict[str, tuple[int, int]]:
        """(index, size) per axis of a rank, for the parallel plan."""
        return {"tp": (self.tp, rank.tp), "etp": (self.etp, rank.tp % self.etp)}

    def chunks(self) -> list[str]:
        """Keys of the model chunks in a rank file."""
        return ["model"] if self.vpp == 1 else [f"model{v}" for v in range(self.vpp)]

    @property
    def sizes(self) -> dict[str, int | None]:
        """Axis sizes as Megatron's arguments: without chunks vpp is None."""
        vpp = self.vpp if self.vpp > 1 else None
        return {"tp": self.tp, "pp": self.pp, "vpp": vpp, "ep": self.ep, "etp": self.etp}

    def __str__(self) -> str:
        sizes = [f"{axis} {size}" for axis, size in self.sizes.items() if size and size > 1]
        return " ".join(sizes) or "one rank"


def build_layout(
    dims: ModelDims, *, tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, etp: int | None = None
) -> MegatronLayout:
    """Builds a layout with equal stages; raises UserError listing every violated rule.

    `etp` is `tp` unless given, as in Megatron; without experts it does not matter and is 1.
    """
    default = tp if dims.num_experts else 1
    etp_size = default if etp is None else etp
    given = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp_size}
    problems = [Problem(f"{a} = {n}", "must be at least 1") for a, n in given.items() if n < 1]
    if not problems:
        problems = _problems(dims, etp_was_given=etp is not None, **given)
    raise_problems(problems)
    stages = (dims.num_layers // (pp * vpp),) * (pp * vpp)
    return MegatronLayout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp_size, stages=stages)


def _problems(
    dims: ModelDims, *, tp: int, pp: int, vpp: int, ep: int, etp: int, etp_was_given: bool
) -> list[Problem]:
    found = []
    if dims.num_layers % (pp * vpp):
        rule = f"pp * vpp = {pp * vpp} must divide num_layers = {dims.num_layers}"
        found.append(Problem(f"pp = {pp}, vpp = {vpp}", rule, _fits(dims.num_layers)))
    if vpp > 1 and pp == 1:
        found.append(Problem(f"vpp = {vpp}", "needs a pipeline, and pp = 1", "give pp too"))
    kv = dims.num_kv_heads
    if dims.num_heads % tp:
        rule = f"must divide num_heads = {dims.num_heads}"
        found.append(Problem(f"tp = {tp}", rule, _fits(dims.num_heads)))
    elif kv % tp and tp % kv:
        rule = f"must divide num_kv_heads = {kv}, or be a multiple of it"
        found.append(Problem(f"tp = {tp}", rule, _fits(kv)))
    elif (dims.q_dim + 2 * dims.kv_dim) % tp:
        rule = f"must divide the {dims.q_dim + 2 * dims.kv_dim} rows of the fused qkv"
        found.append(Problem(f"tp = {tp}", rule, _fits(dims.q_dim + 2 * dims.kv_dim)))
    is_dense = any(not dims.is_moe(layer) for layer in range(dims.num_layers))
    if is_dense and dims.intermediate_size % tp:
        rule = f"must divide intermediate_size = {dims.intermediate_size}"
        found.append(Problem(f"tp = {tp}", rule, _fits(dims.intermediate_size)))
    if dims.shared_expert_size % tp:
        rule = f"must divide shared_expert_intermediate_size = {dims.shared_expert_size}"
        found.append(Problem(f"tp = {tp}", rule, _fits(dims.shared_expert_size)))
    if not dims.num_experts:
        if ep > 1 or etp_was_given:
            rule = f"{dims.family} has no experts"
            found.append(Problem(f"ep = {ep}, etp = {etp}", rule, "leave both out"))
        return found
    if dims.num_experts % ep:
        rule = f"must divide num_experts = {dims.num_experts}"
        found.append(Problem(f"ep = {ep}", rule, _fits(dims.num_experts)))
    if dims.moe_intermediate_size % etp:
        rule = f"must divide moe_intermediate_size = {dims.moe_intermediate_size}"
        why = "" if etp_was_given else " (it is tp unless given)"
        fits = _fits(dims.moe_intermediate_size)
        found.append(Problem(f"etp = {etp}{why}", rule, fits))
    return found


def _fits(number: int) -> str:
    return f"use one of {', '.join(map(str, divisors(number)))}"


def check_rank_files(layout: MegatronLayout) -> None:
    """Raises if rank files would collide: folders are named by tp, pp and ep, without etp."""
    if layout.tp % layout.etp:
        where = f"etp = {layout.etp}"
        rule = f"must divide tp = {layout.tp} in legacy folders, whose names do not tell etp"
        raise UserError(Problem(where, rule, "use torch_dist, or an etp that divides tp"))


@dataclass(frozen=True, slots=True)
class FoundRank:
    """Contents of one rank folder: indices and layers."""

    indices: tuple[int, int | None, int | None]
    """Numbers in its name: tp, pp and ep."""
    layers: tuple[int, ...]
    """Number of layers of each chunk."""
    expert_rows: int | None
    """Rows of an expert's first matrix."""


def infer_layout(where: str, found: Mapping[str, FoundRank], dims: ModelDims) -> MegatronLayout:
    """Infers the layout of a legacy folder from names and contents, without its arguments."""
    tp = 1 + max(folder.indices[0] for folder in found.values())
    pp = 1 + max((folder.indices[1] or 0) for folder in found.values())
    ep = 1 + max((folder.indices[2] or 0) for folder in found.values())
    first = found[min(found)]
    # `mp_rank_00_001` is a pipeline rank or an expert rank: only a pipeline rank has fewer layers.
    if first.indices[2] is None and sum(first.layers) == dims.num_layers:
        pp, ep = 1, pp
    by_rank = []
    for p in range(pp):
        names = [n for n, f in found.items() if pp == 1 or (f.indices[1] or 0) == p]
        if not names:
            rule = f"no mp_rank folder of pipeline rank {p} is there"
            raise UserError(Problem(where, rule, "fetch the folder again"))
        by_rank.append(found[min(names)].layers)
    vpp = len(first.layers)
    if any(len(layers) != vpp for layers in by_rank):
        raise UserError(Problem(where, "its ranks hold differing numbers of model chunks"))
    stages = tuple(by_rank[p][v] for v in range(vpp) for p in range(pp))
    if sum(stages) != dims.num_layers:
        rule = f"its files hold {sum(stages)} layers, but the config says {dims.num_layers}"
        raise UserError(Problem(where, rule, "give the config.json that belongs to it"))
    rows = next((f.expert_rows for f in found.values() if f.expert_rows), None)
    etp = max(1, 2 * dims.moe_intermediate_size // rows) if rows else 1
    return MegatronLayout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, stages=stages)


INDEX = ".metadata"
"""File that identifies a torch_dist folder."""
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FolderKind = Literal["hf", "torch_dist", "legacy"]


def checkpoint_name(iteration: int | None) -> str:
    """Folder name of an iteration; None means released weights."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def write_tracker(folder: Path, iteration: int | None) -> None:
    text = RELEASE if iteration is None else str(iteration)
    (folder / TRACKER).write_text(text)


def kind_of(folder: Path) -> FolderKind | None:
    """Format of a checkpoint folder; None if it is not a checkpoint."""
    if (folder / INDEX).is_file():
        return "torch_dist"
    if any(RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir()):
        return "legacy"
    return None


def find_weights(folder: Path, name: str | None = None) -> tuple[Path, FolderKind]:
    """Finds the folder with the weights and its kind. `name` selects a Megatron checkpoint.

    Megatron formats have priority: such folders may contain the index of the source HF model.
    """
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else "there is no such folder"
        raise UserError(Problem(str(folder), rule, "give a HF folder or a Megatron folder"))
    if problem := recovery_problem(str(folder), folder):
        raise UserError(problem)
    kind = kind_of(folder)
    if kind is not None:
        return folder, kind
    found = [path.name for path in folder.iterdir() if path.is_dir()]
    names = sorted(name for name in found if name == RELEASE or name.startswith("iter_"))
    if not names and (folder / TRACKER).is_file():
        raise UserError(Problem(str(folder), f"has {TRACKER}, but no checkpoint it could name"))
    if not names:
        if any((folder / file).exists() for file in (SINGLE, HF_INDEX, "config.json")):
            return folder, "hf"
        rule = "holds neither safetensors nor a Megatron checkpoint"
        raise UserError(Problem(str(folder), rule, "give a HF folder or a Megatron folder"))
    chosen = folder / _choose(folder, names, name)
    kind = kind_of(chosen)
    if kind is None:
        rule = f"holds neither {INDEX} nor mp_rank folders"
        raise UserError(Problem(str(chosen), rule, "fetch the folder again"))
    return chosen, kind


def _choose(folder: Path, names: list[str], name: str | None) -> str:
    there = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    tracker = folder / TRACKER
    if name is None and tracker.is_file():
        name = _tracked(tracker)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None:
        rule = f"{there}, and no {TRACKER} to choose by"
        raise UserError(Problem(str(folder), rule, "name one with --iteration or --release"))
    if name not in names:
        raise UserError(Problem(str(folder / name), f"there is no such checkpoint; {there}"))
    return name


def _tracked(tracker: Path) -> str:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise UserError(Problem(f"{tracker} = {text}", "is neither a number nor release"))
    return checkpoint_name(int(text))


def iteration_of(folder: Path) -> int | None:
    """The iteration in a checkpoint folder's name; None for released weights."""
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else None
