"""The page's server: its answers, its checks, and the exported file."""

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from starlette.testclient import TestClient

import pentad.view
from pentad.cli.view import check_places, describe_address, listen, plan_of
from pentad.core.errors import UserError
from pentad.telemetry.record import Rl
from pentad.view.app import RunPages, ViewGuard
from tests.unit.view.conftest import sample_line, step_line, write_lines

STATIC = Path(pentad.view.__file__).parent / "static"
FRONTEND = Path(__file__).parents[3] / "frontend"


def client_of(*places: Path, token: str | None = None) -> TestClient:
    app = ViewGuard(RunPages(list(places)).app(), token=token)
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


def test_a_run_is_answered_as_json(make_run):
    client = client_of(make_run())
    (brief,) = client.get("/api/runs").json()["runs"]
    run = client.get("/api/run", params={"run": brief["id"]}).json()
    assert run["step"] == 20 and run["state"] == "interrupted"
    same = client.get("/api/run", params={"run": brief["id"], "sign": run["sign"]}).json()
    assert same == {}
    given = {"run": brief["id"], "keys": "loss,rl/reward_mean", "points": 5}
    series = client.get("/api/series", params=given).json()
    assert len(series["step"]) == 5 and set(series["series"]) == {"loss", "rl/reward_mean"}
    found = client.get("/api/samples", params={"run": brief["id"], "last": 1}).json()
    assert {s["step"] for s in found["samples"]} == {20} and "ids" not in found["samples"][0]
    lines = client.get("/export.csv", params={"run": brief["id"]}).text.splitlines()
    assert lines[0].startswith("step,") and len(lines) == 21


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/api/run?run=no", "run = no: no run of this name"),
        ("/api/step?run=exp~trial0&step=99", "step = 99: steps.jsonl"),
        ("/api/step?run=exp~trial0&step=x", "step = x: must be a number"),
        ("/api/plan?run=exp~trial0", "there is no plan for it"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(make_run, path, sentence):
    answer = client_of(make_run()).get(path)
    assert answer.status_code == 404 and sentence in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "line", "path"),
    [
        ("steps.jsonl", {"step": 21, "time_s": "noon", "rl": 3}, "/api/run"),
        ("timeline.jsonl", {"from_s": 1e9, "spans": 3}, "/api/timeline?to=2e9&from=0"),
        ("manifest.json", {"format": 99, "starts": [], "config": {}}, "/api/run"),
        ("samples.jsonl", {"step": 20, "reward": [], "question": 3}, "/api/samples?last=1"),
    ],
)
def test_records_of_another_version_are_shown_or_named(make_run, name, line, path):
    folder = make_run()
    (folder / name).write_text(json.dumps(line) + "\n")
    answer = client_of(folder).get(f"{path}{'&' if '?' in path else '?'}run=exp~trial0")
    words = answer.json() or {}  # of a timeline: no line that can be shown
    said = words.get("error") or " ".join(words.get("notes", ["shown"]))
    assert "another form" in said or "this version reads" in said or said == "shown"


def test_a_page_at_loopback_answers_to_its_own_names_and_only_reads(make_run):
    client = client_of(make_run())
    answer = client.get("/")
    assert (
        answer.status_code == 200
        and "script-src 'self'" in answer.headers["content-security-policy"]
    )
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.post("/api/runs").status_code == 405


def test_elsewhere_the_address_has_a_token(make_run):
    client = client_of(make_run(), token="secret")
    assert client.get("/").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    answer = client.get("/?token=secret")
    assert answer.status_code == 303 and "HttpOnly" in answer.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200  # by the cookie


def test_an_exported_file_holds_its_records_and_no_markup_of_a_sample(make_run):
    folder = make_run()
    bad = "</script><script>alert(1)</script>"
    write_lines(folder / "samples.jsonl", [sample_line(20, 3, text=bad)])
    client = client_of(folder)
    page = client.get("/export.html", params={"run": "exp~trial0"}).text
    assert bad not in page and "\\u003c/script>" in page and page.count("<script") == 2
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["samples"][-1]["text"] == bad


RECIPE = Path(__file__).parents[3] / "examples" / "archon_qwen3_moe.yaml"


def test_a_recipe_is_a_plan_without_a_run(make_run, tmp_path):
    words = ["train_dataset.batch_size=64"]
    pages = RunPages([RECIPE, make_run()], plan_of, words)
    client = TestClient(ViewGuard(pages.app(), token=None), base_url="http://127.0.0.1")
    known = {run["id"]: run["state"] for run in client.get("/api/runs").json()["runs"]}
    id = "examples~archon_qwen3_moe.yaml"
    assert known[id] == "recipe"
    summary = client.get("/api/run", params={"run": id}).json()
    assert summary["has_plan"] and summary["notes"] == []
    plan = client.get("/api/plan", params={"run": id}).json()
    assert plan["batch"]["prompts"] == 64 and plan["trainers"] and plan["processes"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("no_such_key: 1\n")
    with pytest.raises(UserError, match="no_such_key(.|\n)*has no run in it"):
        check_places([bad, empty(tmp_path)])
    with pytest.raises(UserError, match="overrides need a recipe"):
        check_places([tmp_path], words)


def test_a_run_on_examples_has_no_plan_of_samplers(make_run):
    folder = make_run()
    (folder / "config.yaml").write_text("a: 1\n")
    pages = RunPages([folder], lambda recipe, overrides: {})
    client = TestClient(ViewGuard(pages.app(), token=None), base_url="http://127.0.0.1")
    assert not client.get("/api/run?run=exp~trial0").json()["has_plan"]
    write_lines(folder / "steps.jsonl", [step_line(21, funnel={"drawn": 8})])
    assert client.get("/api/run?run=exp~trial0").json()["has_plan"]


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def test_the_spans_of_a_time_are_found_in_a_long_file(make_run):
    folder = make_run()
    spans = [["learner", "train", 0, 900], ["rollout waits", "staleness: batch 2", 100, 300]]
    lines = [{"step": n, "generation": 0, "from_s": 1e9 + n, "spans": spans} for n in range(4000)]
    write_lines(folder / "timeline.jsonl", lines)
    client = client_of(folder)
    given = {"run": "exp~trial0", "from": 1e9 + 2500.5, "to": 1e9 + 2502.5}
    assert [one["step"] for one in client.get("/api/timeline", params=given).json()] == [
        2500,
        2501,
        2502,
    ]
    (folder / "timeline.jsonl").unlink()
    assert client.get("/api/timeline", params=given).json() == []  # the page says so


def test_a_folder_without_runs_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match="has no run in it.*pentad demo"):
        check_places([tmp_path])
    with pytest.raises(UserError, match="there is no such folder"):
        check_places([tmp_path / "no"])


def test_the_address_says_which_port_to_forward(monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        text = describe_address(listener, None)
    assert f"http://127.0.0.1:{port}/" in text and f"ssh -L {port}:127.0.0.1:{port}" in text


def test_the_bundle_is_built_from_its_sources_and_small():
    built = json.loads((STATIC / "build.json").read_text())
    names = ["build.mjs", "package.json", *(f"src/{p.name}" for p in (FRONTEND / "src").iterdir())]
    lines = [f"{name} {sha((FRONTEND / name).read_bytes())}\n" for name in sorted(names)]
    assert sha("".join(lines).encode()) == built["sources"], "run `npm run build` in frontend/"
    files = {path.name: path.read_bytes() for path in STATIC.iterdir()}
    assert {name: sha(files[name]) for name in built["built"]} == built["built"]
    assert sum(map(len, files.values())) < 300_000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ASKED = (
    *("run", "step?step=3", "step", "timeline?from=0&to=2e9", "samples?last=1", "samples?text=a"),
    *("samples?order=best&pick=worst&min_reward=0", "group?step=20&gid=20", "group?step=3&gid=3"),
    "series?keys=loss,rl/reward_mean,phases/train&points=5",
)


def junk(random: Random, depth: int = 0) -> Any:
    """Any JSON value, with names that a run writes among its keys."""
    plain = [None, True, -1, 0, 3, 20, 1e9, 10**30, float("inf"), "", "a<b>", "\ud800", "noon"]
    if depth > 3 or random.random() < 0.4:
        return random.choice(plain)
    if random.random() < 0.4:
        return [junk(random, depth + 1) for _ in range(random.randrange(4))]
    names = [
        *step_line(1),
        *sample_line(1),
        *Rl.__slots__,
        *["starts", "config", "spans", "from_s"],
    ]
    names += ["actor", "path", "generation", "opened_s", "end", "total_train_steps", "version"]
    chosen = random.sample(names, random.randrange(9))
    return {name: junk(random, depth + 1) for name in [*chosen, *names[:2]][: 8 - depth]}


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_files_hold_the_page_has_an_answer(make_run, seed):
    """Values of every type under every name: what can be shown is, and nothing fails."""
    random, folder = Random(seed), make_run()
    for name in ("manifest.json", "exit.json", "run.lock"):
        (folder / name).write_text(json.dumps(junk(random)))
    for name in ("steps", "samples", "evals", "recoveries", "timeline"):
        lines = [junk(random) for _ in range(20)]
        lines = [step_line(3) | line if isinstance(line, dict) else line for line in lines]
        with (folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    client = client_of(folder)
    for asked in ASKED:
        answer = client.get(f"/api/{asked}{'&' if '?' in asked else '?'}run=exp~trial0")
        assert answer.status_code in (200, 404), (asked, answer.text)
    assert client.get("/api/compare?run=exp~trial0&run=exp~trial0").status_code == 200
    assert client.get("/export.csv?run=exp~trial0").status_code == 200
    assert client.get("/export.html?run=exp~trial0").status_code == 200
