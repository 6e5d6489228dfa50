"""How soon `pentad view` shows a large run and its new lines in a browser, and what its server
takes.

    python benchmarks/view_large.py [FOLDER] [--steps 100000] [--gb 1.0]

Writes a run of so many steps and so many GB of samples into the folder (a temporary one), opens its
views in Chromium, waits until all is indexed, shows five new steps one by one, and lets the run
grow by 2,000 steps. CPU seconds are those of the server; wall seconds depend on what else runs."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from pentad.telemetry.record import Funnel, Infra, MemoryUse, Rl, StepRecord
from pentad_tools.browser import Browser, find_browser
from pentad_tools.pictures import start_view

SAMPLES_PER_STEP = 4
NUM_LINES = 5
"""New lines that are followed one by one."""
VIEWS = {
    "overview": ".chart canvas",
    "samples": ".card",
    "time": ".lane .block",
    "samples?step=50&open=50.50.0": ".answer-box",
}


def step_line(step: int) -> str:
    record = StepRecord(
        step=step,
        version=step,
        time_s=1.7e9 + step,
        loss=1.0 / step,
        grad_norm=1.0,
        num_tokens=4096,
        tokens_per_sec=4e3,
        wall_clock_ms=900.0,
        phases={"rollout": 500.0, "train": 380.0, "publish": 15.0, "other": 5.0},
        gates={"staleness": 400.0},
        rl=Rl(
            reward_mean=step % 97 / 97, reward_parts={"correct": 0.5}, staleness={"0": 9, "1": 3}
        ),
        funnel=Funnel(drawn=step, trained=step, dropped={}, in_flight=0),
        infra=Infra(),
        memory=MemoryUse(host_rss_gb=1.0),
    )
    return json.dumps(record.as_json()) + "\n"


def sample_line(step: int, index: int, text: str) -> str:
    pick = ("best", "worst", "random", "random")[index]
    head = {"step": step, "pick": pick, "gid": step, "index": index, "environment": None}
    rest = {"epoch": 0, "attempt": 0, "question": f"question {step % 1000}", "prompt": "p"}
    rest |= {"expected": "1", "text": text, "turns": [], "reward": index / 4, "reward_parts": {}}
    rest |= {"finish": "stop", "num_sampled": 100, "min_version": step - 1, "max_version": step}
    return json.dumps(head | rest | {"ids": [1, 2], "trained_spans": [[1, 2]]}) + "\n"


def timeline_line(step: int) -> str:
    spans = [["learner", "train", 500, 380], ["rollout-0", "generates", 0, 480]]
    spans += [["rollout waits", f"staleness: batch {step} waits", 480, 400]]
    line = {"step": step, "generation": 0, "from_s": 1.7e9 + step - 1, "spans": spans}
    return json.dumps(line) + "\n"


def write_run(folder: Path, num_steps: int, size_gb: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"total_train_steps": num_steps, "trial_name": "large"}
    manifest = {"format": 1, "config_digest": "d", "seed": 1, "config": config, "starts": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    text = "an answer " * max(1, int(size_gb * 1e9 / num_steps / SAMPLES_PER_STEP / 10) - 35)
    append(folder, 1, num_steps, text)


def append(folder: Path, first: int, last: int, text: str) -> None:
    makers = {"steps.jsonl": step_line, "timeline.jsonl": timeline_line}
    steps = range(first, last + 1)
    for name, make in makers.items():
        with (folder / name).open("a") as file:
            file.writelines(make(step) for step in steps)
    with (folder / "samples.jsonl").open("a") as file:
        every = ((step, n) for step in steps for n in range(SAMPLES_PER_STEP))
        file.writelines(sample_line(step, n, text) for step, n in every)


def until_read(address: str) -> None:
    """Asks as the page does until both files are indexed."""
    progress = 0.0
    while progress < 1.0:
        for what in ("run", "samples"):
            with urllib.request.urlopen(f"{address}api/{what}?run=logs~large") as answer:
                found = json.load(answer)
        progress = min(found["progress"], 1.0)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("folder", nargs="?", type=Path)
    words.add_argument("--steps", type=int, default=100_000)
    words.add_argument("--gb", type=float, default=1.0)
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch)) / "logs" / "large"
        if not (folder / "manifest.json").exists():
            write_run(folder, given.steps, given.gb)
        sizes = {path.name: path.stat().st_size / 1e6 for path in folder.glob("*.jsonl")}
        print(", ".join(f"{name} {size:.0f} MB" for name, size in sorted(sizes.items())))
        measure(folder, given.steps)


def measure(folder: Path, num_steps: int) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium is installed here: apt-get install chromium")
    child, address = start_view([folder])
    server = psutil.Process(child.pid)

    def cpu_s() -> float:
        return float(sum(server.cpu_times()[:2]))

    try:
        with Browser(program) as browser:
            browser.resize(1280, 800)
            for view, part in VIEWS.items():
                browser.open("about:blank")
                began, before_s = time.monotonic(), cpu_s()
                browser.open(f"{address}#/{view}")
                browser.wait_for(f"document.querySelector('{part}')")
                took = f"{time.monotonic() - began:5.2f} s, {cpu_s() - before_s:.2f} CPU s"
                print(f"{view:<30} shown after {took}")
            began = time.monotonic()
            until_read(address)
            rss = server.memory_info().rss / 1e6
            took = f"{time.monotonic() - began:.0f} s more, {cpu_s():.0f} CPU s in all"
            print(f"all indexed after {took}; server {rss:.0f} MB")
            follow(browser, address, folder, num_steps)
        for round in range(4):
            first = num_steps + NUM_LINES + 1 + 500 * round
            append(folder, first, first + 499, "a new answer")
            until_read(address)
            print(f"500 steps more: {server.memory_info().rss / 1e6 - rss:+.1f} MB")
    finally:
        child.end()


def follow(browser: Browser, address: str, folder: Path, num_steps: int) -> None:
    """From a line in the file to its number on the page."""
    browser.open("about:blank")
    browser.open(address)
    shown = "document.querySelector('.stat .value')?.textContent"
    browser.wait_for(shown)
    took_s = []
    for step in range(num_steps + 1, num_steps + NUM_LINES + 1):
        append(folder, step, step, "a new answer")
        began = time.monotonic()
        browser.wait_for(f"{shown} === '{step}'")
        took_s.append(time.monotonic() - began)
    print("a new line shown after " + ", ".join(f"{one:.2f}" for one in took_s) + " s")


if __name__ == "__main__":
    main()
