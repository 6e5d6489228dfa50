"""The command as people use it: a process with arguments, output and an exit code."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from pentad import __version__
from pentad.cli import main as cli
from pentad.cli.errors import reporting
from pentad.cli.recipe import MODES, SWITCHES, read_recipe
from pentad.config.describe import fields
from pentad.config.load import load_config
from pentad.config.schema import Mode
from pentad.core.errors import Problem, RunError, UserError

EXAMPLE = "actor: {path: Qwen/Qwen3-8B}\ngconfig: {temperature: 0, n_sample: 3}\nmod: hybrid\n"


def pentad(*args, **env):
    command = [sys.executable, "-m", "pentad.cli.main", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **env}
    )


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(EXAMPLE)
    return path


@pytest.mark.parametrize(
    "when, code", [("typer.Typer.__call__ = wait", 130), ("atexit.register(wait)", 0)]
)
def test_ctrl_c_outside_of_commands_shows_no_traceback(when, code):
    program = (
        "import atexit, sys, time, typer\n"
        # Short sleeps: a signal just before one does not interrupt it.
        "def wait(*_):\n    print('now', flush=True)\n    while True: time.sleep(0.1)\n"
        "sys.argv = ['pentad', '--version']\n"
        f"from pentad.cli.main import main\n{when}\nmain()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        while "now" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == code and "Traceback" not in rest
    assert ("interrupted." in rest) == (code == 130)


def measured(code):
    """What the program printed, and the processor's seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return out, sum(after[:2]) - sum(before[:2])


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['pentad', '--help']\n"
        "from pentad.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'omegaconf', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    times, floors = [], []
    for _ in range(3):
        out, seconds = measured(code)
        times.append(seconds)
        floors.append(measured("import typer")[1])
    assert out.stdout.splitlines()[-1] == "[]"
    for command in ("train", "sft", "plan", "doctor", "demo"):
        assert f"  {command} " in out.stdout
    assert min(times) < 5 * min(floors)


def test_of_several_ranks_under_torchrun_one_tells_the_mistakes(recipe):
    ranks = [
        CliRunner().invoke(
            cli.app, ["train", str(recipe)], env={"RANK": str(rank), "WORLD_SIZE": "2"}
        )
        for rank in range(2)
    ]
    assert [rank.exit_code for rank in ranks] == [2, 2]
    assert "nothing was started" in ranks[0].stderr and ranks[1].stderr == ""


@pytest.mark.usefixtures("started_warm")
def test_a_recipe_with_mistakes_ends_with_all_of_them_and_code_2(recipe):
    done = pentad("plan", recipe, "foo=1", "gconfig.top_k=3")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "5 problems, nothing was started:"
    assert all(line.startswith("* ") for line in lines[1:])
    for text in [
        "gconfig.n_sample = 3 (recipe.yaml:2): there is no such key; did you mean gconfig.n_s",
        "mod = hybrid (recipe.yaml:3)",
        "foo = 1 (command line)",
        "gconfig.temperature = 0",
        "gconfig.top_k = 3",
    ]:
        assert sum(text in line for line in lines) == 1, text
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("started_warm")
def test_tracebacks_are_shown_on_request(recipe):
    done = pentad("plan", recipe, PENTAD_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("* ")


@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train"], "recipe: is not given"),
        (["plan", "nope.yaml"], "recipe = nope.yaml: no such file or directory"),
        (["sft", "--config", "nope.yaml"], "recipe = nope.yaml: no such file or directory"),
        (["plan", "actor.path=Qwen/Qwen3-8B", "seed"], 'override "seed"'),
    ],
)
def test_missing_pieces_are_one_sentence(args, said):
    done = pentad(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("started_warm")
def test_a_mistyped_command_or_option_is_named():
    done = pentad("trian")
    assert (done.returncode, "Did you mean 'train'" in done.stderr) == (2, True)
    done = pentad("train", "--max-stalenes", "3")
    assert (done.returncode, "--max-staleness" in done.stderr) == (2, True)


@pytest.mark.usefixtures("started_warm")
def test_version():
    assert pentad("--version").stdout == f"pentad {__version__}\n"


@pytest.fixture
def seen(monkeypatch):
    """Runs commands in this process and keeps the recipe they read."""
    recipes = []

    def prepare(self, command, **_):
        if self.problems:
            raise UserError(self.problems)
        recipes.append((command, self))
        raise typer.Exit(0)

    monkeypatch.setattr(cli.Recipe, "prepare", prepare)
    return recipes


def test_switches_are_overrides(seen):
    resource = '{"actor": [1, 4], "rollout": [1, 4]}'
    args = ["--resource", resource, "--max-staleness", "2", "--num-data-storage-units", "1"]
    args += ["--num-iters-per-train-update", "8", "--balance-data", "--hybrid"]
    args += ["--use-kl-loss", "--no-use-tis", "r.yaml", "seed=3"]
    assert CliRunner().invoke(cli.app, ["train", *args]).exit_code == 0
    ((command, recipe),) = seen
    assert (command, recipe.path) == ("train", Path("r.yaml"))
    assert recipe.overrides[0] == "seed=3"
    assert set(recipe.overrides[1:]) == {
        "mode=hybrid",
        "max_staleness=2",
        "num_iters_per_train_update=8",
        f"resource={resource}",
        "balance_data=true",
        "use_kl_loss=true",
        "use_tis=false",
        "num_data_storage_units=1",
    }
    config = load_config(None, recipe.overrides)
    assert (config.allocation_mode, config.balance_data) == ("embedded:d4+archon:d4", True)
    assert (config.algorithm.kl_in, config.algorithm.correction) == ("loss", "none")


def test_the_file_may_be_named_either_way(seen):
    runner = CliRunner()
    for args in (["r.yaml", "a=1"], ["--config", "r.yaml", "a=1"], ["a=1", "--config", "r.yaml"]):
        assert runner.invoke(cli.app, ["train", *args]).exit_code == 0
    assert {(str(r.path), tuple(r.overrides)) for _, r in seen} == {("r.yaml", ("a=1",))}


def test_every_switch_sets_a_key_of_the_schema():
    assert {switch.key for switch in SWITCHES} <= set(fields())
    for switch in SWITCHES:
        words = " ".join(str(fields()[switch.key].annotation).split())
        assert switch.type.__name__ in words or switch.type is str


def test_switches_that_exclude_each_other_name_the_way_out(seen):
    result = CliRunner().invoke(cli.app, ["train", "r.yaml", "--fully-async", "--colocate"])
    assert result.exit_code == 2
    assert "--colocate --fully-async: do not go together" in result.stderr
    assert "--hybrid" in result.stderr
    result = CliRunner().invoke(cli.app, ["train", "r.yaml", "--hybrid", "--colocate"])
    assert "--colocate --hybrid: each sets the mode" in result.stderr
    assert seen == []


def test_one_key_set_twice_is_refused():
    recipe = read_recipe(["r.yaml", "max_staleness=1"], max_staleness=2)
    (problem,) = recipe.problems
    assert str(problem).startswith("--max-staleness and max_staleness=1: both set max_staleness")
    assert read_recipe(["r.yaml", "mode=hybrid"], colocate=True).problems


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "1e-5"], "--lr 1e-5: there is no such option; keys of the recipe are written wi"),
        (["--lr=1e-5"], "without dashes: actor.optimizer.lr=1e-5 or critic.optimizer.lr=1e-5."),
        (["--learning-rate", "1e-5"], "without dashes: actor.optimizer.lr=1e-5."),
        (["--gconfig.n_samples", "4"], "without dashes: gconfig.n_samples=4."),
        (["--batch-size", "--fresh"], "without dashes: train_dataset.batch_size=VALUE or valid_da"),
        (["--fresch"], "--fresch: there is no such option; did you mean --fresh?"),
        (["--frobnicate", "r.yaml"], "--frobnicate: there is no such option; keys of the recipe a"),
        (["-x"], "-x: there is no such option; keys of the recipe are written as KEY=VALUE"),
    ],
)
def test_an_unknown_option_is_reported_with_the_key_it_means(recipe, words, said):
    for before, after in ([], [recipe]), ([recipe], []):
        result = CliRunner().invoke(cli.app, ["train", *map(str, before), *words, *map(str, after)])
        text = " ".join(result.stderr.split())
        assert result.exit_code == 2 and said in text, text
        assert "gconfig.n_sample" in text or "r.yaml" in words, "beside the problems of the recipe"
    assert CliRunner().invoke(cli.app, ["serve", "m", "--lr", "3"]).exit_code == 2


def test_modes_are_those_of_the_schema():
    assert set(MODES.values()) == set(get_args(Mode))


def test_a_path_with_an_equals_sign_is_a_path():
    assert read_recipe(["runs/a=b/config.yaml"]).path == Path("runs/a=b/config.yaml")


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (UserError([Problem("a = 1", "is wrong", "use 2")]), 2, "* a = 1: is wrong; use 2."),
        (RunError("the disk is full."), 1, "* the disk is full."),
        (KeyboardInterrupt(), 130, "* interrupted."),
    ],
)
def test_errors_end_in_a_sentence_and_a_code(capfd, error, code, last):
    @reporting
    def command() -> None:
        print("something before")
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == code
    assert capfd.readouterr().err.splitlines()[-1] == last


def test_the_cause_comes_after_what_a_pipe_still_holds():
    code = (
        "from pentad.cli.errors import reporting\nfrom pentad.core.errors import RunError\n"
        "import typer\n@reporting\ndef f():\n    print('step 3')\n    raise RunError('no space.')\n"
        "try: f()\nexcept typer.Exit as e: raise SystemExit(e.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert (done.returncode, done.stdout) == (1, "step 3\n* no space.\n")


def test_bugs_keep_their_traceback():
    @reporting
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()


@pytest.mark.usefixtures("started_warm")
def test_problems_with_a_caret_keep_their_shape(tmp_path):
    done = pentad("plan", "actor.path=Qwen/Qwen3-8B", "allocation_mode=archon:d1q2")
    *_, line, caret = done.stderr.splitlines()
    assert line.index("q2") == caret.index("^")


@pytest.mark.usefixtures("started_warm")
def test_the_resource_switch_reports_bad_json(tmp_path):
    done = pentad("plan", "actor.path=Qwen/Qwen3-8B", "--resource", json.dumps([1])[:-1])
    assert done.returncode == 2
    assert 'override "resource=[1"' in done.stderr


@pytest.mark.timeout(60)
def test_a_step_that_hangs_ends_the_program_and_not_the_process_of_a_caller():
    """`pentad` leaves at once though a step never returns; a command called within a process of
    its own, as tests and notebooks do, leaves that process alone."""
    program = """
import sys, threading, time
from typer.testing import CliRunner
from pentad.cli.errors import reporting
from pentad.cli.main import app, main
from pentad.core.errors import RunError
def fails():
    raise RunError("the step hangs.")
app.command("fails")(reporting(fails))
threading.Thread(target=time.sleep, args=(600,), name="learner").start()
print("called:", CliRunner().invoke(app, ["fails"]).exit_code, flush=True)
sys.argv = ["pentad", "fails"]
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("called: 1\n", 1), done.stderr
