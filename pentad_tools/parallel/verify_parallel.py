"""`pentad verify-parallel`: compares layouts of a model with one rank, on this machine.

By default the model is shrunk first: fewer and narrower layers. Its heads, experts and options
stay, since those determine the sharding.
"""

from __future__ import annotations

import json as jsonlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from pentad.cli.output import make_table, print_parts
from pentad.config.rules.start import too_many_ranks
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.fit import default_stages_per_rank
from pentad.models.families import dims_of
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import rank_from_environment
from pentad.telemetry.record import finite
from pentad_tools.parallel.parallel_cases import (
    LayoutCase,
    ParallelSubject,
    choose_cases,
    config_at,
    read_subject,
    shrink,
)

GRADIENT_TOLERANCE = 5e-5
"""Relative to a tensor's norm: sums of some thousand fp32 terms in another order."""
VALUE_TOLERANCE = 2e-5
"""Relative tolerance of losses and norms, for the same reason."""
NEXT_TOLERANCE = 1e-3
"""Relative tolerance of the next loss: AdamW moves weights with tiny gradients by their sign."""
ROUTES_TOLERANCE = 0.02
"""Share of choices that may flip: two experts can be equal within rounding."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Result of one layout."""

    text: str
    measured: dict[str, Any]
    """Fields of `parallel_ranks.StepMeasurement`; empty if it failed."""
    faults: tuple[str, ...]


def run_verify_parallel(
    words: list[str],
    *,
    world: int | None = None,
    layouts: list[str] | None = None,
    full: bool = False,
    device: str = "auto",
    seed: int = 1,
    json: bool = False,
) -> int:
    """Returns 0 if every layout agrees with one rank, else 1."""
    if rank_from_environment() is not None:
        rule, remedy = "verify-parallel starts its ranks itself", "start it without torchrun"
        raise UserError(Problem("WORLD_SIZE is set", rule, remedy))
    subject = read_subject(words)
    check_devices(world or 1, device)  # fail before searching layouts
    cases = choose_cases(subject, world, layouts or [])
    check_devices(max(case.layout.world for case in cases), device)
    folder = Path(tempfile.mkdtemp(prefix="pentad-verify-"))
    is_kept = False  # logs of failed ranks are kept
    try:
        payload = make_payload(subject, cases, folder, full=full, device=device, seed=seed)
        from pentad_tools.parallel.parallel_ranks import measure_alone

        alone = asdict(measure_alone(payload))
        if not json:
            print(describe(subject, payload))
        found = dict(run_cases(cases, payload, subject, alone, folder))
        outcomes = [found[number] for number in sorted(found)]
        is_kept = any(not outcome.measured for outcome in outcomes)
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    if json:
        report = {"alone": alone, "layouts": [asdict(outcome) for outcome in outcomes]}
        # JSON has no infinity: non-finite values become null, and the fault has them.
        print(jsonlib.dumps(finite(report), indent=2, allow_nan=False))
    else:
        show(subject, alone, outcomes, is_cuda=payload["is_cuda"])
    return 1 if any(outcome.faults for outcome in outcomes) else 0


# Running


def check_devices(most: int, device: str) -> None:
    """Raises unless there is a GPU per rank, or the CPU can run that many processes."""
    from pentad.core.device import pick_device

    if pick_device(device).type == "cpu":
        if rule := too_many_ranks(most):
            raise UserError(Problem(f"--world {most}", rule, "give fewer"))
        return
    import torch

    count = torch.cuda.device_count()
    if most > count:
        rule = f"{most} ranks need as many GPUs, there are {count}"
        raise UserError(Problem(f"--device {device}", rule, "give --device cpu"))


def make_payload(
    subject: ParallelSubject,
    cases: list[LayoutCase],
    folder: Path,
    *,
    full: bool,
    device: str,
    seed: int,
) -> dict[str, Any]:
    from pentad.core.device import pick_device

    archon = subject.config.actor.archon
    stages_per_rank = archon.stages_per_rank or default_stages_per_rank(archon.pp_schedule)
    stages = max(c.layout.pp * stages_per_rank if c.layout.pp > 1 else 1 for c in cases)
    small = shrink(subject.hf_config, subject.dims, cases, stages)
    return {
        "config": subject.hf_config if full else small,
        "source": subject.folder if full else None,
        "folder": str(folder),
        "device": device,
        "is_cuda": pick_device(device).type == "cuda",
        "seed": seed,
        "num_rows": max(12, *(2 * c.layout.dp * stages for c in cases)),
        "is_full": full,
        "backend": cases[0].backend,
    }


def run_cases(
    cases: list[LayoutCase],
    payload: dict[str, Any],
    subject: ParallelSubject,
    alone: dict[str, Any],
    folder: Path,
) -> Iterator[tuple[int, LayoutResult]]:
    """Runs layouts of equal size in one process group; after a failure, the rest in a new one."""
    from pentad.runtime.rank_host import specs_of_ranks
    from pentad_tools.parallel.parallel_ranks import LayoutService, engine_settings_of

    by_world: dict[int, list[int]] = {}
    for number, case in enumerate(cases):
        by_world.setdefault(case.layout.world, []).append(number)
    kind = "cuda" if payload["is_cuda"] else "cpu"
    for world, left in by_world.items():
        specs = specs_of_ranks(
            "verify",
            LayoutService,
            payload,
            [folder / f"rank-{rank}.log" for rank in range(world)],
            device=kind,
            devices=range(world) if payload["is_cuda"] else (),
            generation=0,
            deterministic=False,
        )
        while left:
            print(f"{world} ranks: {len(left)} layouts to go", file=sys.stderr, flush=True)
            try:
                with RankGroup(
                    LocalRuntime(), specs, stall_s=2 * TIMEOUT_S, timeout_s=TIMEOUT_S
                ) as ranks:
                    while left:
                        case = cases[left[0]]
                        actor = config_at(subject, case.text).actor
                        given = {
                            "layout": asdict(case.layout),
                            "settings": engine_settings_of(actor, case.layout),
                        }
                        measured = ranks.call_all("measure", number=left[0], **given)
                        yield left.pop(0), judge(case.text, measured, alone)
            except (RunError, UserError) as failure:
                if not left:
                    said = f"the {world} ranks failed after their last layout: {failure}"
                    raise RunError(said) from failure
                number = left.pop(0)
                yield number, LayoutResult(cases[number].text, {}, (str(failure),))


def judge(text: str, measured: dict[str, Any], alone: dict[str, Any]) -> LayoutResult:
    """Compares each number with that of one rank; faults have both values."""
    faults = []
    limits = {"loss": VALUE_TOLERANCE, "grad_norm": VALUE_TOLERANCE, "next_loss": NEXT_TOLERANCE}
    for name, limit in limits.items():
        mine, wanted = measured[name], alone[name]
        if not abs(mine - wanted) <= limit * abs(wanted):
            faults.append(f"{name} is {mine:.7g}, on one rank {wanted:.7g}")
    if not measured["gradient_error"] <= GRADIENT_TOLERANCE:
        error = measured["gradient_error"]
        faults.append(f"the gradient of {measured['worst']} is off by {error:.1e} of its norm")
    if not measured["routes_differ"] <= ROUTES_TOLERANCE:
        faults.append(f"{measured['routes_differ']:.1%} of the tokens choose other experts")
    return LayoutResult(text, measured, tuple(faults))


# Output


def describe(subject: ParallelSubject, payload: dict[str, Any]) -> str:
    dims = dims_of(payload["config"])
    parts = [
        f"{dims.num_layers} layers",
        f"width {dims.hidden_size}",
        f"{dims.num_heads} heads ({dims.num_kv_heads} kv)",
    ]
    if dims.num_experts:
        parts.append(f"{dims.num_experts} experts, {dims.num_experts_per_token} a token")
    device = "GPUs" if payload["is_cuda"] else "CPU processes"
    size = "" if payload["is_full"] else ", made small (--full runs it as it is)"
    return f"{subject.name}: {', '.join(parts)}{size}; float32, {device}\n"


def show(
    subject: ParallelSubject, alone: dict[str, Any], outcomes: list[LayoutResult], *, is_cuda: bool
) -> None:
    titles = ["loss", "grad norm", "gradient error", "peak MiB" if is_cuda else "held MiB"]
    titles += ["seconds", *(["routes differ"] if subject.dims.num_experts else [])]
    rows: list[list[str | Text]] = [
        ["one rank", *_cells(alone, len(titles), is_alone=True), Text("")]
    ]
    for outcome in outcomes:
        verdict = Text("DIFFERS", "bold red") if outcome.faults else Text("same", "green")
        if not outcome.measured:
            verdict = Text("FAILED", "bold red")
        rows.append([outcome.text, *_cells(outcome.measured, len(titles)), verdict])
    table = make_table(["layout", *titles, ""], rows, right=titles)
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max(len(outcome.text) for outcome in outcomes)
    print_parts(table)
    failed = [outcome for outcome in outcomes if outcome.faults]
    for outcome in failed:
        print(f"\n{outcome.text}: " + "; ".join(outcome.faults))
    if failed:
        print(f"\n{len(failed)} of {len(outcomes)} layouts differ from one rank.")
    else:
        count = "The layout gives" if len(outcomes) == 1 else f"All {len(outcomes)} layouts give"
        print(f"\n{count} one rank's numbers.")


def _cells(found: dict[str, Any], number: int, *, is_alone: bool = False) -> list[str | Text]:
    """Table cells of a layout; blank if it failed."""
    if not found:
        return [""] * number
    cells: list[str | Text] = [
        f"{found['loss']:.6f}",
        f"{found['grad_norm']:.6f}",
        "" if is_alone else f"{found['gradient_error']:.1e}",
        f"{found['size_bytes'] / 2**20:.2f}",
        f"{found['seconds']:.2f}",
        "" if is_alone else f"{found['routes_differ']:.2%}",
    ]
    return cells[:number]
