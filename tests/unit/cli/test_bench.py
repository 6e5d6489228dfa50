"""`pentad bench` through its command: tables, baselines of the same machine, refusals."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
import torch
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad_tools.bench import bench, bench_rl, bench_train, bench_trl

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch):
    """One dense model small enough to be timed in no time."""
    config = bench_train.TOY | {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1}
    cases = [
        bench_train.TrainCase(
            model="tiny",
            config=config,
            length=8,
            num_tokens=32,
            who=who,
            microbatch=16,
            masters="float32",
            compiled=False,
        )
        for who in ("transformers", "pentad")
    ]
    monkeypatch.setattr(bench_train, "cpu_cases", lambda: cases)
    return cases


def run(*words):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--steps", "1", *words])


def test_figures_are_saved_and_compared_with_the_next_run(tiny, tmp_path):
    folder = str(tmp_path / "kept")
    first = run("train", "--baselines", folder, "--save")
    assert first.exit_code == 0, first.output
    assert "no baseline" in first.output and "x transformers" in first.output
    (file,) = (tmp_path / "kept").iterdir()
    kept = json.loads(file.read_text())
    keys = [
        f"train tiny, {who}, eager, float32 weights [tok/s]" for who in ("transformers", "pentad")
    ]
    assert list(kept["figures"]) == keys and all(x > 0 for x in kept["figures"].values())
    noted = kept["versions"]["torch"].partition("+")[0]
    assert noted == torch.__version__.partition("+")[0] and "host" not in json.dumps(kept)
    kept["figures"][keys[1]] /= 1000
    file.write_text(json.dumps(kept))
    second = run("train", "--baselines", folder)
    assert second.exit_code == 0 and f"baseline: {file}" in second.output
    ours = next(line for line in second.output.splitlines() if line.startswith("pentad"))
    assert float(ours.split()[-1].rstrip("x")) > 100
    assert json.loads(file.read_text()) == kept  # not asked to save


def test_json_has_every_figure(tiny, tmp_path):
    result = run("train", "head", "--baselines", str(tmp_path), "--json")
    found = json.loads(result.stdout)
    units = [key.split()[-1] for key in found["figures"]]
    assert units == ["[tok/s]", "[tok/s]", "[ms]"] and found["problems"] == []


def test_less_is_better_for_times_and_memory(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"figures": {"a [us]": 10.0, "a [tok/s]": 10.0}}))
    baseline = bench.Baseline(file)
    assert baseline.compare(bench.Figure("a", 5.0, "us")) == "2.00x"
    assert baseline.compare(bench.Figure("a", 5.0, "tok/s")) == "0.50x"
    assert baseline.compare(bench.Figure("b", 5.0, "us")) == ""


def test_both_sides_train_on_the_same_tokens_with_the_same_loss(tiny):
    """The same weights give the same first loss, however the step was cut into microbatches."""
    theirs, ours = (bench_train.measure(case, CPU, 1, 1) for case in tiny)
    assert theirs.case.num_tokens == ours.case.num_tokens == 32
    # Different draws of weights with deviation 0.02: both near ln(97) = 4.57.
    assert abs(theirs.loss - 4.575) < 0.05 and abs(ours.loss - 4.575) < 0.05


def test_a_contestant_that_computes_something_else_is_named(tiny, tmp_path, monkeypatch):
    build = bench_train.build_ours

    def wrong(case, device):
        step = build(case, device)
        return lambda: 2 * step()

    monkeypatch.setattr(bench_train, "build_ours", wrong)
    result = run("train", "--baselines", str(tmp_path))
    assert result.exit_code == 1
    assert "train tiny, pentad, eager, float32 weights: the first loss is 9." in result.output


def test_what_cannot_be_measured_is_refused_at_once():
    result = run("train", "speed", "router", "--baselines", "nowhere")
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert "part speed: there is no such part; use train, router, mixture, head" in text
    assert "part router: its kernels run on CUDA, and there is none; leave it out" in text
    result = run("train", "--models", "gpt-5", "--baselines", "nowhere")
    said = "no case has such a name on cpu; use toy dense"
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_whole_rl_steps_are_split_into_phases():
    case = replace(bench_rl.cpu_cases()[0], num_prompts=2, num_samples=2, max_new_tokens=8)
    found = bench_rl.measure(case, torch.device("cpu"), 2, "reward.num_workers=1")
    assert {"rollout", "train", "publish", "record"} <= set(found.phases_ms)
    # Medians of parts need not add up to the median of the whole; means would, to rounding.
    assert 0.5 * found.wall_ms < sum(found.phases_ms.values()) < 2 * found.wall_ms
    assert found.idle_share is None and found.rollout_tokens_per_s > found.tokens_per_s > 0


def test_answers_of_a_case_end_by_chance_and_never_by_the_tokenizers_own_ids():
    case = bench_rl.gpu_cases()[0]
    share = len(case.stop_ids) / case.config["vocab_size"]
    assert abs(share * case.mean_length - 1) < 0.02
    assert min(case.stop_ids) > 300


def test_prompts_of_a_case_have_the_length_it_names(tmp_path):
    case = replace(bench_rl.cpu_cases()[0], num_prompts=2, prompt_length=300)
    bench_rl.write_recipe(case, tmp_path, 3)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    assert {len(prompt) for prompt in prompts} == {300} and len(set(prompts)) == 8


def test_the_idle_share_is_that_of_the_counted_span(tmp_path):
    lines = [f"2026/01/02 03:04:0{i}.500, {busy}" for i, busy in enumerate((0, 100, 50, 0))]
    path = tmp_path / "busy.csv"
    path.write_text("\n".join([*lines, "2026/01/02 03:04:0"]))
    begin = datetime(2026, 1, 2, 3, 4, 1).timestamp()
    assert bench_rl.idle_share(path, begin, begin + 2) == pytest.approx(0.25)
    assert bench_rl.idle_share(path, 0, 1) is None


@pytest.mark.optional
def test_the_peer_takes_the_same_steps():
    pytest.importorskip("trl")
    peer = bench_trl.measure(bench_rl.cpu_cases()[0], CPU, 1)
    assert isinstance(peer, bench_trl.TrlMeasured) and peer.tokens_per_s > 0


@pytest.mark.usefixtures("started_warm")
def test_a_peer_that_fails_is_one_sentence():
    case = replace(bench_rl.cpu_cases()[0], config=bench_train.TOY | {"model_type": "none-such"})
    assert "TRL failed: " in str(bench_trl.measure(case, CPU, 1))
