"""The command `pentad`: its subcommands, their options and the functions they call.

Commands import their modules when they run: `pentad --help` stays quick, and `plan` and `doctor`
need no GPU libraries.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Exit, Option

from pentad.cli.errors import leaving, reporting
from pentad.cli.options import (
    ConvertOptions,
    DeviceOption,
    Figures,
    Findings,
    ServeOptions,
    takes_options,
)
from pentad.cli.recipe import KEEPS_OPTIONS, Recipe, takes_recipe, takes_subject
from pentad.cli.runs import SMOKE_STEPS, run_command

app = typer.Typer(
    name="pentad",
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would truncate long option names
)

View = Annotated[
    bool, Option("--view", help="Show the run on a local page, and print its address.")
]
Fresh = Annotated[bool, Option("--fresh", help="Start over in a folder that already holds a run.")]


def show_version(wanted: bool) -> None:
    if wanted:
        from pentad import __version__

        typer.echo(f"pentad {__version__}")
        raise Exit


Version = Annotated[
    bool, Option("--version", callback=show_version, is_eager=True, help="Print the version.")
]


@app.callback()
def options(version: Version = False) -> None:
    pass


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@takes_recipe
def train(recipe: Recipe, fresh: Fresh = False, view: View = False) -> None:
    """Train a model with reinforcement learning.

    For example: pentad train recipe.yaml gconfig.n_samples=16
    """
    run_command(recipe, "train", fresh, view=view)


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@functools.partial(takes_recipe, switches=False)
def sft(recipe: Recipe, fresh: Fresh = False, view: View = False) -> None:
    """Supervised fine-tuning: train a model on given answers."""
    run_command(recipe, "sft", fresh, view=view)


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@functools.partial(takes_recipe, switches=False)
def pretrain(
    recipe: Recipe,
    fresh: Fresh = False,
    view: View = False,
    smoke: Annotated[
        bool, Option("--smoke", help=f"Stop after {SMOKE_STEPS} steps at most.")
    ] = False,
) -> None:
    """Train a model on token shards or texts.

    For example: pentad pretrain recipe.yaml train_dataset.path=data/shards
    """
    most_steps = SMOKE_STEPS if smoke else None
    run_command(recipe, "pretrain", fresh, view=view, most_steps=most_steps)


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@functools.partial(takes_recipe, switches=False)
def dpo(recipe: Recipe, fresh: Fresh = False, view: View = False) -> None:
    """Train a model on preferences: DPO, IPO or KTO.

    For example: pentad dpo actor.path=MODEL train_dataset.path=pairs.jsonl preference.beta=0.1
    """
    run_command(recipe, "dpo", fresh, view=view)


@app.command("reward-model", context_settings=KEEPS_OPTIONS)
@reporting
@functools.partial(takes_recipe, switches=False)
def reward_model(recipe: Recipe, fresh: Fresh = False, view: View = False) -> None:
    """Train a reward model on pairs of answers.

    Each row has a preferred and a rejected answer.

    For example: pentad reward-model actor.path=MODEL train_dataset.path=pairs.jsonl
    """
    run_command(recipe, "reward-model", fresh, view=view)


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@takes_recipe
def plan(
    recipe: Recipe,
    gpu_memory: Annotated[
        float | None,
        Option(
            min=1,
            max=1e6,
            help="Memory of each GPU in GiB, default: as on this machine.",
            metavar="GIB",
        ),
    ] = None,
    json: Figures = False,
    world: Annotated[
        int | None, Option(min=1, help="Plan for this number of remaining training ranks.")
    ] = None,
) -> None:
    """Check a recipe; show its placement and memory.

    Needs no GPU and no download: public models are known by name.
    """
    from pentad.cli.look import input_problems
    from pentad.cli.plan import run_plan

    look = functools.partial(input_problems, gpu_memory=gpu_memory)
    config, notes = recipe.prepare("plan", gpu_memory, look=look)
    raise Exit(run_plan(config, notes, gpu_memory, json, world))


@app.command()
@reporting
def doctor(json: Findings = False) -> None:
    """Report what this machine can run and what is missing."""
    from pentad.cli.doctor import run_doctor

    raise Exit(run_doctor(json))


@app.command()
@reporting
def slots(
    folder: Annotated[str, Argument(help="Folder of the records of an elastic run.")],
    drop: Annotated[
        list[int] | None, Option(help="Remove this slot; the run continues without it.")
    ] = None,
    join: Annotated[
        list[int] | None, Option(help="Add the slot again; it joins at the next checkpoint.")
    ] = None,
) -> None:
    """Show the slots of an elastic run, drop or add slots."""
    from pentad.cli.slots import run_slots

    run_slots(folder, drop or [], join or [])


@app.command()
@reporting
def init(
    folder: Annotated[str | None, Argument(help="A new folder, or an empty one.")] = None,
    task: Annotated[str | None, Option(help="math, code, agent or sft; default: math.")] = None,
    model: Annotated[
        str | None,
        Option(help="A Hub name, a folder, or tiny for a generated model; default: tiny."),
    ] = None,
    device: Annotated[str | None, Option(help="cpu, cuda or auto; default: auto.")] = None,
) -> None:
    """Write a recipe, a reward and data for a new task.

    They run without changes.

    For example: pentad init mytask --task math --model Qwen/Qwen3-0.6B
    """
    from pentad.cli.init import run_init

    run_init(folder, task, model, device)


@app.command()
@reporting
def demo(
    seed: Annotated[int, Option(min=0, help="Seed of all random numbers.")] = 1,
    fileroot: Annotated[str, Option(help="Folder for records and the model.")] = "runs",
    device: DeviceOption = "auto",
    steps: Annotated[
        int | None, Option(min=1, help="Steps of reinforcement learning; default: 250.")
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Train a tiny model in minutes, without a GPU.

    It learns to sort digits.
    An interrupted demo is resumed, a complete one starts again.
    """
    from pentad.cli.demo import run_demo

    run_demo(seed=seed, fileroot=fileroot, device=device, steps=steps, fresh=fresh)


@app.command(context_settings=KEEPS_OPTIONS)
@reporting
@functools.partial(takes_recipe, switches=False)
def reward(
    recipe: Recipe,
    row: Annotated[int, Option(min=0, help="Row of train_dataset, counted from 0.")] = 0,
    completion: Annotated[
        str | None, Option(help="Text to score; default: the row's answer, and an empty text.")
    ] = None,
) -> None:
    """Run the reward of a recipe on a row of its data.

    For example: pentad reward recipe.yaml --row 3 --completion "The answer is 42"
    """
    config, _ = recipe.prepare("reward")
    from pentad.cli.reward import run_reward_command

    run_reward_command(config, row, completion)


@app.command(name="eval", context_settings=KEEPS_OPTIONS)
@reporting
@takes_subject
def evaluate(
    subject: Recipe,
    json: Figures = False,
    out: Annotated[Path | None, Option(help="JSONL file for every answer.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Evaluate a model: accuracy, pass@k, maj@k.

    For example: pentad eval models/m --data test.jsonl --reward gsm8k --prompt-key question
    """
    config, _ = subject.prepare("eval")
    from pentad.cli.evaluate import run_eval_command

    run_eval_command(config, out=out, as_json=json, device=device)


@app.command()
@reporting
@takes_options
def convert(options: ConvertOptions) -> None:
    """Convert weights between formats, or merge an adapter.

    HF to Megatron and back, or a run's recovery checkpoint to HF.

    For example: pentad convert models/qwen3 megatron/qwen3 --to legacy --tp 2 --pp 2
    """
    from pentad.cli.convert import run_convert

    run_convert(options)


@app.command()
@reporting
def export(
    run: Annotated[str, Argument(metavar="RUN", help="The folder of a run's records.")],
    step: Annotated[
        int | None, Option(min=1, help="Step of the model; default: the last one.")
    ] = None,
    push: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="Upload it to the Hub under this name.")
    ] = None,
    public: Annotated[
        bool, Option("--public", help="Create a public repository; default: a private one.")
    ] = False,
) -> None:
    """Write a run's model card; upload model and card.

    For example: pentad export runs/logs/me/gsm8k/trial-0 --push me/gsm8k-grpo
    """
    from pentad.cli.export import run_export

    run_export(run, step=step, push=push, public=public)


@app.command()
@reporting
@takes_options
def serve(options: ServeOptions) -> None:
    """Serve a model at an OpenAI-compatible address."""
    from pentad.cli.serve import run_serve

    run_serve(options)


@app.command()
@reporting
def view(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="RUN|RECIPE KEY=VALUE",
            help="Run folders, or folders that contain runs (default: runs); or recipes.",
        ),
    ] = None,
    host: Annotated[
        str, Option(help="Address to listen on; other than loopback, the page needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        Option(min=0, max=65535, help="Port; default: 8700, or a free one if that is in use."),
    ] = None,
    listener_fd: Annotated[int | None, Option(hidden=True)] = None,
) -> None:
    """Show curves, samples and timings of runs on a page.

    For example: pentad view runs/logs/me/gsm8k/trial-0
    """
    from pentad.cli.view import run_view

    run_view(words or [], host, port, listener_fd)


@app.command()
@reporting
def replay(
    run: Annotated[str, Argument(help="The folder of a run's records.")],
    step: Annotated[int, Option(min=1, help="Step, as numbered in steps.jsonl.")],
    layout: Annotated[
        str | None, Option(help="Allocation, such as archon:d1; default: that of the run.")
    ] = None,
    dump: Annotated[
        str | None, Option(help="JSONL file for the log-probs of the step's tokens.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train a recorded step again and compare the numbers.

    No sampler is needed.

    For example: pentad replay runs/logs/me/gsm8k/trial-0 --step 12
    """
    from pentad.cli.replay import run_replay_command

    raise Exit(run_replay_command(run, step, layout=layout, device=device, dump=dump))


@app.command(name="verify-checkpoint")
@reporting
def verify_checkpoint(
    place: Annotated[
        str, Argument(metavar="PATH", help="A trial's or a checkpoint's folder, or s3://...")
    ],
    other: Annotated[
        str | None, Argument(metavar="PATH2", help="Another checkpoint, to compare with.")
    ] = None,
    endpoint_url: Annotated[
        str | None, Option(help="Endpoint of a store other than Amazon's.")
    ] = None,
    region: Annotated[str | None, Option(help="Region of the store.")] = None,
    restore: Annotated[
        bool,
        Option("--restore", help="Restore checkpoints renamed to .damaged if they are intact."),
    ] = False,
    json: Findings = False,
) -> None:
    """Verify every byte of recovery checkpoints.

    Lists their contents, or the differences of two.

    For example: pentad verify-checkpoint runs/checkpoints/me/gsm8k/trial0
    """
    if restore:
        from pentad.cli.verify_checkpoint import run_restore
        from pentad.core.errors import UserError

        if other is not None or json:
            raise UserError("--restore: takes one PATH, and prints no JSON.")
        raise Exit(run_restore(place, endpoint_url, region))
    from pentad.cli.verify_checkpoint import run_verify_checkpoint

    places = [place] if other is None else [place, other]
    code = run_verify_checkpoint(places, as_json=json, endpoint_url=endpoint_url, region=region)
    raise Exit(code)


TOOLS = "pentad_tools"
"""The package of further commands; it may not be installed."""
if find_spec(TOOLS) is not None:
    import_module(f"{TOOLS}.commands").add_to(app)


def main() -> None:
    with leaving():
        app()


if __name__ == "__main__":
    main()
