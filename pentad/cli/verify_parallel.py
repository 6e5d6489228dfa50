"""`pentad verify-parallel`: layouts of a model run on this machine and held against one rank.

By default the model is made small first: fewer layers and narrow, with its own heads, experts and
switches, since those decide how it is cut.
"""

from __future__ import annotations

import json as jsonlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pentad.cli.plan import make_console
from pentad.config.catalog import known_model
from pentad.config.load import load_config
from pentad.config.rules import layout_problems
from pentad.config.schema import Config
from pentad.core.dims import ModelDims, dims_from_hf
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.layout import Component, Layout, divisors, parse_allocation
from pentad.core.stages import default_stages_per_rank, splits_backward
from pentad.models.families import known_families, read_config
from pentad.runtime.launch import LaunchSettings, run_ranks
from pentad.runtime.rank import rank_from_environment

GRADIENT_TOLERANCE = 5e-5
"""Of a tensor's norm: sums of some thousand fp32 terms in another order."""
VALUE_TOLERANCE = 2e-5
"""Of losses and norms, for the same reason."""
NEXT_TOLERANCE = 1e-3
"""Of the loss after a step: AdamW moves weights with a gradient near zero by its sign."""
ROUTES_TOLERANCE = 0.02
"""Share of choices that may flip: two experts can be equal within rounding."""
TIMEOUT_S = 300.0
TARGET = "pentad.cli.parallel_ranks:measure_layouts"
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 8,
    "vocab_size": 509,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
"""509 is prime: every tp cuts the vocabulary unevenly."""
FAMILY: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
FAMILY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified: a model, and the settings a recipe gives its engine."""

    name: str
    hf_config: dict[str, Any]
    dims: ModelDims
    config: Config
    folder: str | None = None
    """Where its weights are, if it has some."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout to run."""

    text: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found of one layout."""

    text: str
    measured: dict[str, Any]
    """Fields of `parallel_ranks.Measured`; empty if it failed."""
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
    """0 when every layout gives one rank's numbers, 1 otherwise."""
    if rank_from_environment() is not None:
        rule, remedy = "verify-parallel starts its ranks itself", "start it without torchrun"
        raise UserError(Problem("WORLD_SIZE is set", rule, remedy))
    subject = read_subject(words)
    cases = choose_cases(subject, world, layouts or [])
    check_devices(cases, device)
    folder = Path(tempfile.mkdtemp(prefix="pentad-verify-"))
    payload = make_payload(subject, cases, folder, full=full, device=device, seed=seed)
    from pentad.cli.parallel_ranks import measure_alone

    alone = asdict(measure_alone(payload))
    if not json:
        print(describe(subject, payload))
    outcomes = [outcome for _, outcome in sorted(run_cases(cases, payload, subject, alone, folder))]
    if json:
        report = {"alone": alone, "layouts": [asdict(outcome) for outcome in outcomes]}
        print(jsonlib.dumps(report, indent=2))
    else:
        show(subject, alone, outcomes, is_cuda=payload["is_cuda"])
    failed = any(outcome.faults for outcome in outcomes)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


# What is verified


def read_subject(words: list[str]) -> Subject:
    """From a recipe, a model's folder, a public name, or the name of a family."""
    if not words or "=" in words[0]:
        remedy = "name a recipe, a model's folder, a public name or a family, such as qwen3_moe"
        raise UserError(Problem("model", "is not given", remedy))
    name, *overrides = words
    if Path(name).suffix in (".yaml", ".yml"):
        config = load_config(name, overrides)
        if config.actor.path is None:
            raise UserError(Problem(f"{name}: actor.path", "is not given", "add actor.path=..."))
        name = config.actor.path
    else:
        config = load_config(None, overrides)
    if (Path(name) / "config.json").is_file():
        hf_config = read_config(name)
        has_weights = any(Path(name).glob("*.safetensors"))
        return Subject(
            name, hf_config, dims_from_hf(hf_config), config, name if has_weights else None
        )
    known = known_model(name)
    if known is not None:
        return Subject(name, config_of(known), known, config)
    if name in known_families():
        experts = FAMILY_EXPERTS if "moe" in name else {}
        hf_config = {"model_type": name, "tie_word_embeddings": not experts, **FAMILY, **experts}
        return Subject(name, hf_config, dims_from_hf(hf_config), config)
    families = ", ".join(known_families())
    remedy = (
        f"give a recipe, a folder with config.json, a public name such as Qwen3-8B, or {families}"
    )
    raise UserError(Problem(f"model = {name}", "is neither a folder nor known", remedy))


def config_of(dims: ModelDims) -> dict[str, Any]:
    """A HF config with the given dimensions."""
    found: dict[str, Any] = {
        "model_type": dims.family,
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": dims.max_position,
        "rope_theta": dims.rope_theta,
        "tie_word_embeddings": dims.tie_embeddings,
    }
    if dims.num_experts:
        found |= {
            "num_experts": dims.num_experts,
            "num_experts_per_tok": dims.num_experts_per_token,
            "moe_intermediate_size": dims.moe_intermediate_size,
            "norm_topk_prob": dims.norm_topk_prob,
        }
    return found


def shrink(hf_config: dict[str, Any], dims: ModelDims, cases: list[Case], stages: int) -> dict:
    """The config made small; heads, experts and switches stay, and what layouts must divide."""
    layers = min(dims.num_layers, max(4, stages))
    ways = math.lcm(*(case.layout.tp for case in cases))
    found = {**hf_config, **SMALL, "num_hidden_layers": layers, "intermediate_size": 16 * ways}
    for key in ("dtype", "torch_dtype", "pad_token_id", "bos_token_id", "eos_token_id"):
        found.pop(key, None)
    if found.get("layer_types"):
        found["layer_types"] = found["layer_types"][:layers]
    if dims.sliding_window is not None:
        found |= {"sliding_window": 7, "max_window_layers": layers // 2}
    if dims.num_experts:
        found["moe_intermediate_size"] = 8 * math.lcm(*(case.layout.etp for case in cases))
        found["mlp_only_layers"] = [i for i in range(layers) if not dims.is_moe(i)]
        found["decoder_sparse_step"] = 1
    return found


# Which layouts


def choose_cases(subject: Subject, world: int | None, texts: list[str]) -> list[Case]:
    """The layouts asked for; else the recipe's own, or all plain ones of the world."""
    written = [text for item in texts for text in item.replace(",", " ").split()]
    own = subject.config.allocation_mode
    if written:
        cases = read_cases(subject, written)
        wrong = [case for case in cases if world is not None and case.layout.world != world]
        if wrong:
            found = wrong[0]
            rule = f"needs {found.layout.world} ranks, --world is {world}"
            raise UserError(Problem(f"--layouts {found.text}", rule, "leave --world out"))
    elif own is not None and world in (None, actor_of(own).world):
        cases = read_cases(subject, [str(actor_of(own))])
    elif world is None:
        raise UserError(Problem("--world", "is not given", "give --world 4, or --layouts"))
    else:
        cases = list(plain_cases(subject, world))
    alone = [case for case in cases if case.layout.world == 1]
    if alone:
        rule = "one rank is what the others are held against"
        raise UserError(Problem(f"layout = {alone[0].text}", rule, "give layouts of several ranks"))
    if not cases:
        rule = f"no layout of {world} ranks fits the model"
        raise UserError(Problem(f"--world {world}", rule, "try another number"))
    return cases


def actor_of(allocation: str) -> Component:
    """The component that trains."""
    found = parse_allocation(allocation)
    trained = found.find("actor") or next((c for c in found if not c.is_inference), None)
    if trained is None:
        rule = "has no component that trains"
        raise UserError(Problem(f"allocation_mode = {allocation}", rule, "add archon:..."))
    return trained


def read_cases(subject: Subject, texts: list[str]) -> list[Case]:
    """Layouts such as archon:d2t2, also without the backend; refused as a run would refuse them,
    all at once."""
    texts = [text if ":" in text.split("(")[0] else f"archon:{text}" for text in texts]
    problems = [problem for text in texts for problem in case_problems(subject, text)]
    if problems:
        raise UserError(problems)
    replicas = subject.config.actor.archon.dp_replicate
    return [Case(text, actor_of(text).layout(replicas)) for text in texts]


def case_problems(subject: Subject, text: str) -> list[Problem]:
    """All that `plan` would say against the layout."""
    config = subject.config.model_copy(update={"allocation_mode": text, "resource": None})
    problems = layout_problems(config, subject.dims)
    if problems:
        return problems
    backends = {component.backend for component in parse_allocation(text)}
    if backends != {"archon"}:
        rule = f"only archon is run here, not {', '.join(sorted(backends - {'archon'}))}"
        return [Problem(f"layout = {text}", rule, "give the training layout alone")]
    return []


def plain_cases(subject: Subject, world: int) -> Iterator[Case]:
    """Every way to deal the world over data, pipeline, tensor and context, experts as wide as can
    be, that fits the model."""
    for d, p, t in product(divisors(world), repeat=3):
        if world % (d * p * t):
            continue
        sizes = {"d": d, "p": p, "t": t, "c": world // (d * p * t)}
        dense = "archon:" + "".join(f"{letter}{n}" for letter, n in sizes.items() if n > 1)
        experts = subject.dims.num_experts
        ranks = world // p
        widths = [e for e in divisors(ranks) if e > 1 and experts and experts % e == 0]
        for text in [dense, *([f"{dense}e{widths[-1]}"] if widths else [])]:
            if not case_problems(subject, text):
                yield from read_cases(subject, [text])


def check_devices(cases: list[Case], device: str) -> None:
    """Ranks on GPUs need one each."""
    from pentad.core.device import pick_device

    if pick_device(device).type == "cpu":
        return
    import torch

    count, most = torch.cuda.device_count(), max(case.layout.world for case in cases)
    if most > count:
        rule = f"{most} ranks need as many GPUs, there are {count}"
        raise UserError(Problem(f"--device {device}", rule, "give --device cpu"))


# Running


def make_payload(
    subject: Subject, cases: list[Case], folder: Path, *, full: bool, device: str, seed: int
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
    }


def engine_settings_of(subject: Subject, layout: Layout) -> dict[str, Any]:
    """What the recipe says about the engine, in full precision and without compilation."""
    actor = subject.config.actor
    archon = actor.archon
    found: dict[str, Any] = {
        "gradient_checkpointing": actor.gradient_checkpointing,
        "ac_mode": archon.ac_mode if archon.ac_mode in ("selective", "full") else "none",
        "ac_selective": archon.ac_selective or "op",
    }
    if layout.pp > 1:
        zero_bubble = splits_backward(archon.pp_schedule)
        found |= {
            "pp_schedule": archon.pp_schedule,
            "stages_per_rank": archon.stages_per_rank,
            "reshard_after_forward": not zero_bubble,
        }
        if zero_bubble and archon.ac_selective is None:
            found["ac_selective"] = 2
    return found


def run_cases(
    cases: list[Case],
    payload: dict[str, Any],
    subject: Subject,
    alone: dict[str, Any],
    folder: Path,
) -> Iterator[tuple[int, Outcome]]:
    """Layouts of equal size in one group of processes; after a failure the rest in a new one."""
    by_world: dict[int, list[int]] = {}
    for number, case in enumerate(cases):
        by_world.setdefault(case.layout.world, []).append(number)
    settings = LaunchSettings(device=payload["device"], timeout_s=TIMEOUT_S, stall_s=2 * TIMEOUT_S)
    for world, numbers in by_world.items():
        left = list(numbers)
        while left:
            listed = [
                {
                    "layout": asdict(cases[number].layout),
                    "settings": engine_settings_of(subject, cases[number].layout),
                }
                for number in left
            ]
            asked = {**payload, "cases": list(zip(left, listed, strict=True))}
            failure = ""
            try:
                run_ranks(TARGET, asked, world=world, log_folder=folder, settings=settings)
            except (RunError, UserError) as error:
                failure = str(error)
            for number in list(left):
                file = folder / f"case-{number}.json"
                if file.exists():
                    left.remove(number)
                    measured = jsonlib.loads(file.read_text())
                    yield number, judge(cases[number].text, measured, alone)
            if failure:
                number = left.pop(0)
                yield number, Outcome(cases[number].text, {}, (failure,))


def judge(text: str, measured: dict[str, Any], alone: dict[str, Any]) -> Outcome:
    """Every number that is not one rank's, with both values."""
    faults = []
    limits = {
        "loss": VALUE_TOLERANCE,
        "grad_norm": VALUE_TOLERANCE,
        "next_loss": NEXT_TOLERANCE,
    }
    for name, limit in limits.items():
        mine, wanted = measured[name], alone[name]
        if not abs(mine - wanted) <= limit * abs(wanted):
            faults.append(f"{name} is {mine:.7g}, on one rank {wanted:.7g}")
    if not measured["gradient_error"] <= GRADIENT_TOLERANCE:
        error = measured["gradient_error"]
        faults.append(f"the gradient of {measured['worst']} is off by {error:.1e} of its norm")
    if not measured["routes_differ"] <= ROUTES_TOLERANCE:
        faults.append(f"{measured['routes_differ']:.1%} of the tokens choose other experts")
    return Outcome(text, measured, tuple(faults))


# Showing


def describe(subject: Subject, payload: dict[str, Any]) -> str:
    dims = dims_from_hf(payload["config"])
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
    subject: Subject, alone: dict[str, Any], outcomes: list[Outcome], *, is_cuda: bool
) -> None:
    has_experts = bool(subject.dims.num_experts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layout", no_wrap=True, min_width=max(len(o.text) for o in outcomes))
    memory = "peak MiB" if is_cuda else "held MiB"
    titles = ["loss", "grad norm", "gradient error", memory, "seconds"]
    for title in [*titles, *(["routes differ"] if has_experts else [])]:
        table.add_column(title, justify="right")
    table.add_column("")
    table.add_row(*_row("one rank", alone, has_experts, is_alone=True), "")
    for outcome in outcomes:
        verdict = Text("DIFFERS", "bold red") if outcome.faults else Text("same", "green")
        if not outcome.measured:
            verdict = Text("FAILED", "bold red")
            blanks = [""] * (6 if has_experts else 5)
            table.add_row(outcome.text, *blanks, verdict)
        else:
            table.add_row(*_row(outcome.text, outcome.measured, has_experts), verdict)
    console = make_console()
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    failed = [outcome for outcome in outcomes if outcome.faults]
    for outcome in failed:
        print(f"\n{outcome.text}: " + "; ".join(outcome.faults))
    if failed:
        print(f"\n{len(failed)} of {len(outcomes)} layouts do not give one rank's numbers.")
    else:
        count = "The layout gives" if len(outcomes) == 1 else f"All {len(outcomes)} layouts give"
        print(f"\n{count} one rank's numbers.")


def _row(
    text: str, found: dict[str, Any], has_experts: bool, *, is_alone: bool = False
) -> list[str]:
    row = [
        text,
        f"{found['loss']:.6f}",
        f"{found['grad_norm']:.6f}",
        "" if is_alone else f"{found['gradient_error']:.1e}",
        f"{found['size_bytes'] / 2**20:.2f}",
        f"{found['seconds']:.2f}",
    ]
    if has_experts:
        row.append("" if is_alone else f"{found['routes_differ']:.2%}")
    return row
