"""What the page reads of a run's files while they grow, are torn, replaced, missing or huge."""

import json

import pytest

from pentad.telemetry.record import scalars
from pentad.telemetry.steps import supersede
from pentad.view import lines, samples, steps
from pentad.view.app import differing_keys, field_meanings, first_parting
from pentad.view.lines import GrowingLines
from pentad.view.run import RunView, find_runs
from pentad.view.samples import SampleFilter, SampleIndex
from pentad.view.steps import StepIndex, numbers_of
from tests.unit.view.conftest import sample_line, step_line, write_lines


def test_a_torn_last_line_is_read_when_it_is_whole(make_run):
    path = make_run(num_steps=3) / "steps.jsonl"
    index = StepIndex(path)
    whole = json.dumps(step_line(4))
    with path.open("a") as file:
        file.write(whole[:50])
    index.advance(1)
    assert index.columns.num_rows == 3 and index.num_unreadable == 0
    with path.open("a") as file:
        file.write(whole[50:] + "\n")
    index.advance(1)
    assert index.last["step"] == 4 and index.series(["loss"], None, None, 10)["step"] == [
        1,
        2,
        3,
        4,
    ]


def test_steps_that_a_resumed_run_does_again_are_left_out(make_run):
    path = make_run(num_steps=6) / "steps.jsonl"
    index = StepIndex(path)
    index.advance(1)
    supersede(path, after=4)
    write_lines(path, [step_line(5, loss=9.0)])
    index.advance(1)
    found = index.series(["loss"], None, None, 10)
    assert found["step"] == [1, 2, 3, 4, 5] and found["series"]["loss"]["mean"][-1] == 9.0


def test_numbers_are_those_that_sinks_draw():
    record = step_line(7)
    found = numbers_of(record)
    assert {k: v for k, v in found.items() if k in scalars(record)} == scalars(record)


def test_many_steps_are_cut_down_to_mean_and_range(make_run):
    index = StepIndex(make_run(num_steps=100) / "steps.jsonl")
    index.advance(1)
    found = index.series(["rl/reward_mean", "no/such"], None, None, 10)
    curve = found["series"]["rl/reward_mean"]
    assert found["step"] == list(range(10, 101, 10)) and list(found["series"]) == ["rl/reward_mean"]
    assert curve["mean"][0] == pytest.approx(0.055) and curve["min"][0] == 0.01
    assert curve["max"][-1] == 1.0
    assert index.series(["loss"], 31, 40, 100)["step"] == list(range(31, 41))
    assert index.record(37)["step"] == 37 and index.record(1000) is None


def test_a_large_file_is_shown_at_once_and_read_piece_by_piece(make_run, monkeypatch):
    monkeypatch.setattr(steps, "SMALL_BYTES", 1000)
    monkeypatch.setattr(steps, "FIRST_LOOK", 10)
    monkeypatch.setattr(lines, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(samples, "STEP_BYTES", 2000)
    folder = make_run(num_steps=300)
    run = RunView(folder, "x")
    run.advance(0.0)
    assert run.steps.first_look is not None and run.steps.last["step"] == 300
    assert 10 <= len(run.steps.series(["loss"], None, None, 1000)["step"]) < 100
    run.samples.advance(0.0)
    assert run.samples.share < 1
    latest = run.samples.find(SampleFilter(step=run.samples.last_step()), 0, 10, 60.0)["samples"]
    assert latest and {sample["step"] for sample in latest} == {300}
    early = run.samples.find(SampleFilter(step=150, pick="worst"), 0, 10, 60.0)["samples"]
    assert [sample["index"] for sample in early] == [1]
    assert run.steps.record(150)["step"] == 150
    for _ in range(100):
        run.advance(0.0)
        run.samples.advance(0.0)
    assert run.steps.first_look is None and run.steps.columns.num_rows == 300
    assert run.samples.columns.num_rows == 900


def in_order(step, environment):
    """A line with the fields in the order in which they are written."""
    line = list(sample_line(step).items())
    return dict([*line[:4], ("environment", environment), *line[4:]])


def test_samples_are_found_by_their_fields_and_words(make_run):
    folder = make_run(num_steps=9)
    more = [sample_line(10, text='say "Größe" <b>', finish="length", reward=None)]
    more += [sample_line(11, environment="tools"), in_order(12, "sums"), in_order(13, None)]
    write_lines(folder / "samples.jsonl", more)
    index = SampleIndex(folder / "samples.jsonl")
    index.advance(1)

    def found(**wanted):
        lines_found = index.find(SampleFilter(**wanted), 0, 50, 60.0)["samples"]
        return [(line["step"], line["index"]) for line in lines_found]

    assert found(step=4, order="best") == [(4, 0), (4, 1), (4, 2)]
    assert found(step=4, pick="worst") == [(4, 1)] and found(finish="length") == [(10, 0)]
    assert found(text='"GRÖSSE"') == [] and found(text='"größe" <B') == [(10, 0)]
    assert found(min_reward=0.9, version=3) == [(4, 0)] and found(min_length=4, step=2) == [(2, 2)]
    assert found(environment="tools") == [(11, 0)] and found(environment="sums") == [(12, 0)]
    assert list(index.words["environment"]) == ["tools", "sums"]
    assert found(text="trained_spans") == []  # a key of the file, no word of a sample
    key = index.find(SampleFilter(step=2), 0, 1, 60.0)["samples"][0]["prompt_key"]
    assert {step for step, _ in found(prompt=key)} == {2, 5, 8, 11}


def test_lines_of_another_form_are_parsed_and_broken_ones_counted(make_run):
    path = make_run(num_steps=1) / "samples.jsonl"
    with path.open("a") as file:
        file.write('{"reward": 2, "step":2,"gid":7}\nnot JSON\n[1]\n')
    index = SampleIndex(path)
    index.advance(1)
    assert index.find(SampleFilter(gid=7), 0, 5, 60.0)["samples"][0]["reward"] == 2
    assert index.num_unreadable == 2


def test_the_index_of_a_file_that_grows_holds_no_lines(make_run):
    path = make_run(num_steps=1) / "samples.jsonl"
    file = GrowingLines(path)
    file.look()
    taken = file.take()
    assert [json.loads(line)["index"] for _, line in taken] == [0, 1, 2]
    assert file.at(taken[1][0])["index"] == 1 and file.take() == []


def test_what_is_missing_is_a_sentence(make_run, tmp_path):
    gone = RunView(tmp_path / "nowhere", "x")
    gone.advance()
    assert "no such folder" in gone.summary()["notes"][0] and gone.state() == "waiting"
    folder = make_run(num_steps=2)
    (folder / "manifest.json").write_text("{")
    write_lines(folder / "steps.jsonl", [step_line(3, schema=99)])
    run = RunView(folder, "x")
    run.advance()
    notes = " ".join(run.summary()["notes"])
    assert "manifest.json: missing or being written" in notes and "schema 99" in notes


def test_alarms_restarts_and_recoveries_are_marks_at_their_step(make_run):
    folder = make_run(num_steps=5)
    (folder / "log.txt").write_text(
        "2026-03-01 12:00:00,000 WARNING pentad.telemetry.recorder: step 3: entropy fell\n"
        "2026-03-01 12:00:00,000 INFO    pentad.telemetry.recorder: step 4: nothing\n"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["starts"].append({"time": "2026-03-01T13:00:00+00:00", "from_step": 4})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_lines(folder / "recoveries.jsonl", [{"time": None, "cause": "rank 1", "total_s": 3.5}])
    run = RunView(folder, "x")
    run.advance()
    marks = {mark["kind"]: mark for mark in run.marks()}
    assert marks["alarm"]["step"] == 3 and "entropy fell" in marks["alarm"]["text"]
    assert marks["restart"]["step"] == 4 and "3.5 s: rank 1" in marks["recovery"]["text"]


def test_a_restart_says_what_it_cost(make_run):
    folder = make_run(num_steps=6)
    path = folder / "steps.jsonl"
    supersede(path, after=4)
    again = [step_line(n, generation=1, time_s=1e9 + 100 + 2.0 * n) for n in (5, 6)]
    write_lines(path, again)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["starts"].append({"from_step": 4, "generation": 1, "opened_s": 1e9 + 50})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run = RunView(folder, "x")
    run.advance()
    cost = run.summary()["starts"][1]["cost"]
    assert cost == {  # the last step before it ended at 12 s, and its own first began at 109.6 s
        "away_s": pytest.approx(38.0),
        "until_step_s": pytest.approx(59.599),
        "redone": 2,
        "redone_s": pytest.approx(0.802),
    }
    (mark,) = [mark for mark in run.marks() if mark["kind"] == "restart"]
    assert mark["step"] == 4 and mark["cost"] == cost


@pytest.mark.parametrize(
    "spoil", [lambda data: b"", lambda data: data[:100], lambda data: b"x" * 50]
)
def test_damaged_figures_of_tokens_are_left_out(make_run, spoil):
    run = RunView(make_run(num_steps=5), "x")
    place = run.folder / "batches" / "step5.trained"
    place.write_bytes(spoil(place.read_bytes()))
    (first, *_) = run.groups.group(5, 5, [])["samples"]
    assert {"logprob", "version"} == set(first["tokens"]["columns"])


def test_a_group_has_all_its_samples_and_tokens(make_run):
    run = RunView(make_run(num_steps=5), "x")
    run.samples.advance(1)
    group = run.groups.group(5, 5, run.samples.group(5, 5))
    assert [s["reward"] for s in group["samples"]] == [0, 1, 2, 3]
    first = group["samples"][0]
    assert first["above_mean"] == -1.5 and first["pick"] == "best"
    assert first["tokens"]["columns"]["version"] == [-1, 4, 4]
    assert first["tokens"]["columns"]["advantage"] == [0, -1.5, -1.5]
    assert first["tokens"]["columns"]["ratio"] == [2, 2, 2]
    assert first["tokens"]["words"] == ["5", "6", "7"] and "tokenizer.json" in group["notes"][0]
    old = run.groups.group(3, 3, run.samples.group(3, 3))
    assert (
        len(old["samples"]) == 3
        and "tokens" not in old["samples"][0]
        and "keep_batches" in old["notes"][0]
    )


def test_runs_are_compared_by_their_keys_and_the_first_step_that_differs(make_run):
    one = RunView(make_run("a", lr=1, actor={"path": "m"}), "a")
    folder = make_run("b", lr=2, actor={"path": "m"}, num_steps=6)
    write_lines(folder / "steps.jsonl", [step_line(7, loss=5.0)])
    other = RunView(folder, "b")
    for run in (one, other):
        run.advance()
    assert differing_keys([one.config, other.config]) == {"lr": [1, 2]}
    assert first_parting(one, other) == {"step": 7, "key": "loss", "values": [1 / 7, 5.0]}
    assert first_parting(one, one) is None


def test_runs_are_found_in_a_folder_and_fields_have_their_meaning(make_run, tmp_path):
    folders = {make_run("a"), make_run("b")}
    assert set(find_runs([tmp_path])) == folders and find_runs([tmp_path / "no"]) == []
    assert field_meanings()["rl/entropy"]["unit"] == "nats/token"
