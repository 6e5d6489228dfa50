"""Takes the pictures of the docs: each view of `pentad view`, light and dark, from local runs.

    pentad demo
    pentad train runs/logs/*/demo-grpo/seed1/config.yaml trial_name=rloo algorithm.name=rloo
    pentad train runs/logs/*/demo-grpo/seed1/config.yaml trial_name=async mode=async \\
        'allocation_mode=embedded[rollout]:d2+archon[actor]:d2+archon[ref]:d1' max_staleness=2 \\
        algorithm.kl_coef=0.01 train_dataset.batch_size=8 gconfig.n_samples=8 \\
        evaluator.freq_steps=8 recover.mode=auto recover.freq_steps=5 total_train_steps=24
    python -m pentad_tools.pictures runs docs/pictures
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from pentad.runtime.process import Child, bound
from pentad_tools.browser import Browser, find_browser

WIDTH, HEIGHT = 1280, 800
SETTLE_S = 1.5
"""Seconds from the last element of a view to its drawing."""
READY = {
    **{"overview": ".chart canvas", "compare": ".compared table", "samples": ".answer-box .tokens"},
    **{"time": ".lanes .block", "processes": ".lanes .block", "plan": ".meter"},
}
"""View -> element that exists when the view is complete."""


def start_view(places: list[Path]) -> tuple[Child, str]:
    """Starts the server of the page; returns process and address."""
    program = [sys.executable, "-m", "pentad.cli.main", "view", *map(str, places), "--port", "0"]
    child = Child.start(bound(program), stdout=subprocess.PIPE)
    assert child.stdout is not None, "it was started with a pipe"
    for line in child.stdout:
        if line.startswith(b"page: "):
            return child, line.decode().removeprefix("page: ").strip()
    raise RuntimeError(f"pentad view ended: {child.ended()}")


def views_of(address: str) -> dict[str, str]:
    """Maps the name of each picture to the page's URL for it."""
    with urllib.request.urlopen(f"{address}api/runs") as answer:
        runs = json.load(answer)["runs"]
    complete = {run["id"] for run in runs if run["state"] == "complete"}
    if missing := {f"demo-grpo~{name}" for name in ("seed1", "rloo", "async")} - complete:
        raise SystemExit(f"no complete run {', '.join(sorted(missing))}; see this file's docstring")
    demo = "demo-grpo~seed1"
    found = {name: f"#/{name}?run={demo}" for name in ("overview", "samples", "plan")}
    found["samples"] += "&color=logprob"
    found["time"] = "#/time?run=demo-grpo~async&step=12"
    found["compare"] = f"#/overview?run={demo}&run=demo-grpo~rloo"
    found["processes"] = "#/time?run=demo-grpo~async&step=12"
    return found


def main(runs: str, target: str) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium is installed here: apt-get install chromium")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    child, address = start_view([Path(runs)])
    try:
        with Browser(program) as browser:
            browser.resize(WIDTH, HEIGHT)
            for name, place in views_of(address).items():
                for theme in ("light", "dark"):
                    browser.set_dark(theme == "dark")
                    browser.open("about:blank")
                    browser.open(address + place)
                    browser.wait_for(f"document.querySelector('{READY[name]}')")
                    time.sleep(SETTLE_S)
                    if name == "processes":
                        browser.run("document.querySelector('.lanes').scrollIntoView()")
                        browser.run("scrollBy(0, -64)")
                    browser.picture(folder / f"{name}-{theme}.png")
    finally:
        child.end()


if __name__ == "__main__":
    main(*sys.argv[1:3])
