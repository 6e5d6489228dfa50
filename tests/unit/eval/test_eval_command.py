"""`pentad eval` as people use it, on a tiny model; every figure found again in its answers."""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.data.rows import open_rows
from pentad.data.toy import write_byte_model, write_model, write_task
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.trainer.sources.rollouts import run_train


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, so that greedy answers differ between prompts."""
    bare = tmp_path_factory.mktemp("bare")
    write_model(bare)
    made = create_model(dims_of(bare), seed=3)
    folder = tmp_path_factory.mktemp("models") / "m"
    save_model(made, folder, source_folder=bare, tokenizer_folder=bare)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_task(folder, seed=1, num_train=1, num_sft=1, num_valid=12)
    return folder / "valid.jsonl"


def pentad(*args):
    return CliRunner().invoke(cli.app, ["eval", *map(str, args), "--device", "cpu"])


def figures(*args):
    done = pentad(*args, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_accuracy_is_the_share_of_rows_whose_answer_is_the_models_own(model, data, tmp_path):
    first = tmp_path / "first.jsonl"
    figures(model, "--data", data, "--reward", "exact_match", "--max-new-tokens", 6, "--out", first)
    said = {line["prompt"]: line["text"] for line in lines(first)}
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for index, row in enumerate(rows):
        row["gold"] = said[row["prompt"]] if index < 7 else "no"
    # Parquet, columns of other names, only the first ten rows.
    path = tmp_path / "rows.parquet"
    table = {"q": [r["prompt"] for r in rows], "gold": [r["gold"] for r in rows]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    options = ["--reward", "exact_match", "--prompt-key", "q", "--answer-key", "gold"]
    found = figures(model, "--data", path, *options, "--limit", 10, "--max-new-tokens", 6)
    assert (found["accuracy"], found["num_prompts"], found["num_failed"]) == (0.7, 10, 0)
    assert found["accuracy_low"] == pytest.approx(0.3968, abs=1e-4)  # Wilson at 7 of 10
    assert found["accuracy_high"] == pytest.approx(0.8922, abs=1e-4)
    assert found["no_majority"] == "one answer per prompt"


def test_answers_go_through_a_pipe_or_a_link_and_replace_neither(model, data, tmp_path):
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file.name)
    os.mkfifo(pipe)
    common = [model, "--data", data, "--reward", "numeric", "--max-new-tokens", 2, "--limit", 2]
    figures(*common, "--out", link)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text)
        figures(*common, "--out", pipe)
        assert text.result(timeout=20) == file.read_text() and len(lines(file)) == 2
    assert link.is_symlink() and pipe.is_fifo() and file.is_file()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    done = pentad(*common, "--out", full)
    assert done.exit_code == 1 and f"No space left on device: '{full}'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link", "pipe"]
    assert full.is_char_device()


def test_every_figure_follows_from_the_answers_written(model, data, tmp_path):
    out = tmp_path / "deep" / "answers.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    task = tmp_path / "task.jsonl"  # an answer of one digit is hit by chance
    task.write_text("".join(json.dumps({**r, "answer": r["prompt"][0]}) + "\n" for r in rows))
    found = figures(
        *(model, "--data", task, "--reward", "numeric", "--samples", 5, "--temperature", 1),
        *("--max-new-tokens", 2, "--out", out),
    )
    groups = {}
    for line in lines(out):
        groups.setdefault(line["gid"], []).append(line)
    assert {gid: len(own) for gid, own in groups.items()} == {gid: 5 for gid in range(12)}
    verdicts = [[s["reward_parts"]["correct"] for s in own] for own in groups.values()]
    assert 0 < found["accuracy"] < 1
    assert found["accuracy"] == pytest.approx(sum(map(sum, verdicts)) / 60)
    assert list(found["pass_at"]) == ["1", "2", "4", "5"]
    for k, value in found["pass_at"].items():
        shares = [[any(draw) for draw in combinations(own, int(k))] for own in verdicts]
        assert value == pytest.approx(sum(sum(s) / len(s) for s in shares) / 12)
    expected = []
    for own in groups.values():
        votes = Counter(s["result"] for s in own if s["result"] is not None)
        top = [vote for vote, n in votes.items() if n == max(votes.values())]
        expected.append(sum(v == str(int(own[0]["answer"])) for v in top) / max(len(top), 1))
    assert found["majority"] == pytest.approx(sum(expected) / 12)
    samples = [line for own in groups.values() for line in own]
    assert found["length_mean"] == pytest.approx(sum(s["num_sampled"] for s in samples) / 60)
    cut = sum(s["finish"] == "length" for s in samples)
    assert found["truncated_share"] == pytest.approx(cut / 60)
    assert not list(out.parent.glob("*.part"))


def test_a_seed_gives_the_same_answers_and_another_gives_others(model, data, tmp_path):
    def texts(name, seed):
        out = tmp_path / name
        options = ["--reward", "numeric", "--temperature", 1, "--max-new-tokens", 6, "--out", out]
        figures(model, "--data", data, *options, f"seed={seed}")
        return {line["gid"]: line["text"] for line in lines(out)}

    assert texts("a", 1) == texts("b", 1)
    assert texts("c", 2) != texts("a", 1)


def test_a_recipe_names_model_and_data(model, data, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"actor: {{path: {model}}}\nvalid_dataset: {{path: {data}, limit: 5}}\n"
        "reward: {fn: sort_digits}\nevaluator: {max_new_tokens: 6}\n"
    )
    found = figures(recipe, "--limit", 4)
    assert (found["num_prompts"], found["reward"], found["max_new_tokens"]) == (
        4,
        "sort_digits",
        6,
    )
    done = pentad(recipe, "valid_dataset.limit=3", "--limit", 4)
    assert done.exit_code == 2
    assert "--limit and valid_dataset.limit=3: both set valid_dataset.limit" in done.stderr


def test_the_table_says_what_does_not_apply(model, data, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def score(completion):\n    return float(len(completion))\n")
    options = ["--reward", f"{mine}:score", "--samples", 2, "--temperature", 1]
    done = pentad(model, "--data", data, *options, "--max-new-tokens", 4)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert 'accuracy none: the reward has no part "correct"' in said
    assert "maj@2 does not apply: the reward" in said
    assert "of the answers were cut at 4 tokens" in said


def test_rows_that_do_not_fit_are_counted_and_said(tmp_path):
    bare = tmp_path / "bare"
    write_byte_model(bare)
    folder = tmp_path / "m"
    save_model(create_model(dims_of(bare)), folder, source_folder=bare, tokenizer_folder=bare)
    data = tmp_path / "d.jsonl"
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (5, 2000, 7)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pentad(folder, "--data", data, "--reward", "numeric", "--max-new-tokens", 4)
    assert done.exit_code == 0, done.stderr
    assert "2 prompts" in done.stdout
    assert "note: 1 rows were left out (too_long) and count nowhere." in done.stdout
    assert len(open_rows(str(data))) == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "model: is not given"),
        (["http://x/v1"], "give it, and --address http://x/v1"),
        (["nowhere", "--reward", "numeric"], "actor.path = nowhere: there is no such folder"),
        (["nowhere", "--reward", "numeric"], "valid_dataset.path: is not set; give --data"),
        (["nowhere", "--reward", "nonsense"], "reward.fn = nonsense"),
        (["nowhere", "--data", "none.jsonl"], "there is no such file or folder"),
        (["nowhere"], "reward.fn: is not set, so answers cannot be scored"),
        (["nowhere", "--samples", "4"], "at evaluator.temperature = 0 all answers"),
        (["nowhere", "--samples", "0"], "evaluator.n_samples = 0"),
        (["nowhere", "--temperature", "-1"], "evaluator.temperature = -1"),
        (["nowhere", "--format", "xml"], "valid_dataset.format = xml"),
    ],
)
def test_bad_input_is_a_sentence(args, said):
    done = pentad(*args)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_model_without_weights_and_an_answer_without_room_are_refused(tmp_path, model, data):
    bare = tmp_path / "bare"
    write_model(bare)
    done = pentad(bare, "--data", data, "--reward", "numeric", "actor.init_from_scratch=true")
    assert (done.exit_code, "random weights" in done.stderr) == (2, True)
    done = pentad(model, "--data", data, "--reward", "numeric", "--max-new-tokens", 128)
    assert done.exit_code == 2
    assert "evaluator.max_new_tokens = 128: leaves no room for a prompt" in done.stderr
    four = ["--max-new-tokens", 4]
    done = pentad(model, "--data", data, "--reward", "numeric", "--answer-key", "gold", *four)
    assert done.exit_code == 2
    assert "valid_dataset.answer_key = gold: reward.fn = numeric compares with it" in done.stderr
    options = ["--reward", "numeric", *four, "--out", "/proc/nowhere/x"]
    done = pentad(model, "--data", data, *options)
    assert (done.exit_code, "cannot be written" in done.stderr) == (2, True)


def test_held_out_accuracy_of_a_run_is_that_of_eval_on_the_same_prompts(tmp_path):
    """`valid_dataset` names only its path: prompts are put in the template all the same."""
    write_byte_model(tmp_path / "m")
    write_task(tmp_path, seed=1, num_train=8, num_sft=1, num_valid=12)
    (tmp_path / "mine.py").write_text(
        "def odd(completion):\n    return {'correct': sum(map(ord, completion)) % 2}\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""\
fileroot: {tmp_path}
actor: {{path: {tmp_path}/m, init_from_scratch: true, gradient_checkpointing: false}}
train_dataset: {{path: {tmp_path}/train.jsonl, chat_template: true, batch_size: 2}}
valid_dataset: {{path: {tmp_path}/valid.jsonl}}
gconfig: {{n_samples: 4, max_new_tokens: 8}}
reward: {{fn: "{tmp_path}/mine.py:odd"}}
total_train_steps: 1
"""
    )
    config, notes = prepare(recipe, [], "train")
    summary = run_train(config, notes, device="cpu")
    made = [f"actor.path={summary.model}", "actor.init_from_scratch=false"]
    same = ("accuracy", "reward_mean", "length_mean", "num_prompts")
    found = figures(recipe, *made)
    assert {name: found[name] for name in same} == {name: summary.evals[-1][name] for name in same}
    assert 0 < found["accuracy"] < 1
    assert figures(recipe, *made, "--no-chat")["accuracy"] != found["accuracy"]
