"""The command `pentad`: what can be typed, and which function does it.

Commands import their work when they run, so that `pentad --help` stays quick and `plan` and
`doctor` need no GPU stack.
"""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from pentad.cli.errors import reporting
from pentad.cli.recipe import Recipe, takes_recipe

app = typer.Typer(
    name="pentad",
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would cut the names of long options short
)

Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew in a folder that has a run.")]


def show_version(wanted: bool) -> None:
    if wanted:
        from pentad import __version__

        typer.echo(f"pentad {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
@reporting
@takes_recipe
def train(recipe: Recipe, fresh: Fresh = False) -> None:
    """Train a model with reinforcement learning.

    For example: pentad train recipe.yaml gconfig.n_samples=16
    """
    config, notes = recipe.prepare("train")
    from pentad.trainer.assemble import run_train

    run_train(config, notes, fresh)


@app.command()
@reporting
@functools.partial(takes_recipe, switches=False)
def sft(recipe: Recipe, fresh: Fresh = False) -> None:
    """Train a model on given answers, without rollout."""
    config, notes = recipe.prepare("sft")
    from pentad.trainer.assemble import run_sft

    run_sft(config, notes, fresh)


@app.command()
@reporting
@takes_recipe
def plan(
    recipe: Recipe,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, help="GiB of each GPU, instead of what is found here.", metavar="GIB"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Check a recipe, draw its layout, estimate its memory.

    Needs no GPU and no download: public models are known by name.
    """
    config, notes = recipe.prepare("plan")
    from pentad.cli.plan import run_plan

    raise typer.Exit(run_plan(config, notes, gpu_memory, json))


@app.command()
@reporting
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine can run and what is missing."""
    from pentad.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(json))


@app.command()
@reporting
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 1,
    fileroot: Annotated[str, typer.Option(help="Folder for records and the model.")] = "runs",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Teach a tiny model to sort, here and now, in minutes."""
    from pentad.cli.demo import run_demo

    run_demo(seed=seed, fileroot=fileroot, device=device)


@app.command(name="verify-model")
@reporting
def verify_model(
    model: Annotated[str, typer.Argument(help="A family, a model file, or a HF folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove a model file against transformers, on the CPU."""
    from pentad.cli.verify_model import run_verify_model

    raise typer.Exit(run_verify_model(model, json))


@app.command(name="new-model")
@reporting
def new_model(
    config: Annotated[str, typer.Argument(help="A HF folder, a config.json, or a model_type.")],
    out: Annotated[str | None, typer.Option(help="The file to write.")] = None,
) -> None:
    """Draft the file of a new model family from its HF config."""
    from pentad.cli.new_model import run_new_model

    run_new_model(config, out)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
