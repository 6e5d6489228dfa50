"""Commands of `pentad` that measure, verify and inject faults; `pentad.cli.main` adds them by name.

Each command imports its code when it runs, to keep the start-up of the CLI fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import typer
from typer import Argument, Exit, Option

from pentad.cli.errors import reporting
from pentad.cli.options import DeviceOption, Figures, Findings
from pentad.cli.recipe import read_recipe


def verify_parallel(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL|RECIPE KEY=VALUE",
            help="A model's folder, a public name, a family or a YAML file, then overrides.",
        ),
    ] = None,
    world: Annotated[int | None, Option(min=2, help="Number of ranks.")] = None,
    layouts: Annotated[
        list[str] | None, Option(help='Such as "d2t2 p2t2" or "archon:(attn:d2t2|ffn:d1e4)".')
    ] = None,
    full: Annotated[
        bool, Option("--full", help="Use the full model size, without reduction.")
    ] = False,
    device: DeviceOption = "auto",
    seed: Annotated[int, Option(min=0, help="Seed of weights and rows.")] = 1,
    json: Figures = False,
) -> None:
    """Run layouts here and compare each with one rank.

    For example: pentad verify-parallel qwen3_moe --world 8 --layouts "d2p2t2 d1p2t2c2"
    """
    from pentad_tools.parallel.verify_parallel import run_verify_parallel

    code = run_verify_parallel(
        words or [], world=world, layouts=layouts, full=full, device=device, seed=seed, json=json
    )
    raise Exit(code)


def bench(
    parts: Annotated[
        list[str] | None, Argument(help="train, router, mixture, head, rl; default: all.")
    ] = None,
    models: Annotated[
        list[str] | None, Option(help="Run only training cases whose name contains this.")
    ] = None,
    steps: Annotated[int, Option(min=1, help="Timed steps of each training case.")] = 5,
    device: DeviceOption = "auto",
    baselines: Annotated[
        str, Option(help="Folder of earlier figures, one file per type of machine.")
    ] = "benchmarks/baselines",
    save: Annotated[bool, Option("--save", help="Store these figures as the baseline.")] = False,
    json: Figures = False,
) -> None:
    """Measure speed and memory on this machine.

    Compares with transformers and with stored figures.

    On a GPU: whole RL steps and training of Qwen3 models, router, mixture, log-probs. On a CPU:
    small cases.
    """
    from pentad_tools.bench.bench import run_bench

    code = run_bench(
        parts or [],
        device=device,
        models=models or [],
        num_steps=steps,
        baselines=baselines,
        save=save,
        json=json,
    )
    raise Exit(code)


def chaos(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="RECIPE KEY=VALUE",
            help="A YAML file, then overrides; default: small built-in runs.",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None, Option(help="Run only this scenario; default: all.")
    ] = None,
    list_: Annotated[bool, Option("--list", help="List the scenarios and exit.")] = False,
    seed: Annotated[int, Option(min=0, help="Seed for the ranks and steps of the faults.")] = 1,
    command: Annotated[
        Literal["train", "sft", "pretrain"], Option(help="Command that runs the recipe.")
    ] = "pretrain",
    soak: Annotated[
        int, Option(min=0, help="Inject this many random faults instead.", metavar="N")
    ] = 0,
    keep: Annotated[bool, Option("--keep", help="Keep the folders of the runs.")] = False,
) -> None:
    """Inject faults into real runs and check the results.

    For example: pentad chaos --scenario kill-backward --seed 7
    """
    from pentad_tools.chaos.chaos import list_scenarios, run_chaos

    if list_:
        list_scenarios()
        return
    recipe = read_recipe(words) if words else None
    code = run_chaos(recipe, scenario or [], command=command, seed=seed, num_soak=soak, keep=keep)
    raise Exit(code)


def verify_model(
    model: Annotated[
        str | None, Argument(help="A family, a model file, or a HF folder.", show_default=False)
    ] = None,
    table: Annotated[
        bool, Option("--table", help="Try the most used model types; print them as Markdown.")
    ] = False,
    json: Findings = False,
) -> None:
    """Compare a model file with transformers, on the CPU."""
    from pentad_tools.models.model_commands import run_types_table, run_verify_model

    raise Exit(run_types_table(model) if table else run_verify_model(model, json))


def new_model(
    config: Annotated[str, Argument(help="A HF folder, a config.json, or a model_type.")],
    out: Annotated[str | None, Option(help="The file to write.")] = None,
    plain: Annotated[
        bool, Option("--plain", help="Ignore the package's own file of this family.")
    ] = False,
) -> None:
    """Draft a model file from an HF config."""
    from pentad_tools.models.model_commands import run_new_model

    run_new_model(config, out, plain=plain)


COMMANDS: dict[str, Callable[..., None]] = {
    "verify-parallel": verify_parallel,
    "verify-model": verify_model,
    "new-model": new_model,
    "bench": bench,
    "chaos": chaos,
}


def add_to(app: typer.Typer) -> None:
    for name, command in COMMANDS.items():
        app.command(name=name)(reporting(command))
