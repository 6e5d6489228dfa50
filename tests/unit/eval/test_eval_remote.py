"""`pentad eval --address`: the same figures from a server as from the folder it serves."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.data.toy import write_model, write_task
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    bare, folder = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("models") / "m"
    write_model(bare)
    save_model(
        create_model(dims_of(bare), seed=3), folder, source_folder=bare, tokenizer_folder=bare
    )
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_task(folder, seed=1, num_train=1, num_sft=1, num_valid=12)
    return folder / "valid.jsonl"


@pytest.fixture(scope="module")
def address(model):
    words = ["serve", str(model), "--port", "0", "--device", "cpu", "--drain-s", "1"]
    command = [sys.executable, "-m", "pentad.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        told = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", told)):
            line = server.stdout.readline()
            assert line, told
            told += line
        yield found[0]
        server.terminate()


def pentad(*args):
    return CliRunner().invoke(cli.app, ["eval", *map(str, args), "--device", "cpu"])


@pytest.mark.parametrize("ending", ["", "/v1"])
def test_a_server_gives_the_figures_of_the_folder_it_serves(model, data, address, tmp_path, ending):
    common = [model, "--data", data, "--reward", "sort_digits", "--max-new-tokens", 8]
    common.append("--json")
    answers = {}
    for name, more in {"here": [], "there": ["--address", address + ending]}.items():
        done = pentad(*common, *more, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        answers[name] = {(line["gid"], line["index"]): line["text"] for line in lines}
        answers[name]["accuracy"] = json.loads(done.stdout)["accuracy"]
    # Greedy answers: a server draws with random numbers of its own.
    assert len(answers["here"]) == 13 and answers["here"] == answers["there"]


def test_an_address_without_a_server_is_one_sentence(model, data):
    common = [model, "--data", data, "--reward", "sort_digits", "--max-new-tokens", 8]
    done = pentad(*common, "--address", "http://127.0.0.1:9")
    assert done.exit_code != 0
    assert "rollout.server.addresses = http://127.0.0.1:9: is no OpenAI-compatible" in done.stderr
