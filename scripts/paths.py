"""Files that one prompt, weight, key, checkpoint and rank failure pass: `python scripts/paths.py`.

It traces a GRPO run of four steps: an embedded sampler and two ranks in processes of their own, a
checkpoint after every step, and a rank that is killed in the last. `paths.json` has the spans of
each path, pairs (first, last) of functions. Every file of the package with a function on the stack
from `first` to `last`, when `last` is called in any of the processes, is counted; without `first`,
from the beginning of the task or thread. A path has several spans, because stacks end where a
message, a task or a thread takes over. The layers of the model are not counted. Reward workers are
confined and not traced: their files are listed (`unseen`). `--stacks` prints the stacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HOME = Path(__file__).parents[1]
OWN = str(HOME / "pentad") + "/"
PATHS: dict[str, Any] = json.loads((HOME / "scripts" / "paths.json").read_text())
ROOTS = ("/asyncio/events.py", "/threading.py", "/concurrent/futures/thread.py")
"""Files of Python that begin the stack of a task or a thread."""
NOTES = "PENTAD_TRACED_STACKS"
"""Environment variable: the file to which every process of the run adds the stacks it finds."""


class Tracer:
    """Writes the stacks of all spans to a file, each once."""

    def __init__(self, notes: str, spans: Iterable[Sequence[str]]) -> None:
        self.notes = notes
        self.firsts: dict[str, set[str]] = {}
        for first, last in spans:
            self.firsts.setdefault(last, set()).add(first)
        self.wanted: dict[CodeType, str] = {}
        self.seen: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code not in self.wanted:
                name = name_of(code)
                self.wanted[code] = name if name in self.firsts else ""
            if last := self.wanted[code]:
                self.note(frame, last)

    def note(self, frame: FrameType | None, last: str) -> None:
        stack: list[str] = []
        while frame is not None and not frame.f_code.co_filename.endswith(ROOTS):
            if name := name_of(frame.f_code):
                stack.insert(0, name)
                if name in self.firsts[last]:
                    self.write([name, last, stack])
            frame = frame.f_back
        if "" in self.firsts[last]:
            self.write(["", last, stack])

    def write(self, found: list[Any]) -> None:
        line = json.dumps(found) + "\n"
        if line not in self.seen:
            self.seen.add(line)
            with open(self.notes, "a") as file:  # noqa: PTH123 (one append of all processes)
                file.write(line)


def name_of(code: CodeType) -> str:
    """The function as `file:Class.function`; empty if it is not of the package."""
    is_own = code.co_filename.startswith(OWN)
    return f"{code.co_filename[len(OWN) :]}:{code.co_qualname}" if is_own else ""


def trace() -> None:
    """Called in every process of the run."""
    spans = [span for path in PATHS["paths"] for span in path["spans"]]
    tracer = Tracer(os.environ[NOTES], spans)
    threading.setprofile(tracer)
    sys.setprofile(tracer)


def traced_run(folder: Path) -> list[list[Any]]:
    """Every [first, last, functions from one to the other] of a run."""
    sys.path.insert(0, str(HOME))
    from pentad.data.toy import write_model, write_task

    write_model(folder / "model")
    write_task(folder, seed=1, num_train=64, num_sft=64, num_valid=8)
    (folder / "sitecustomize.py").write_text("import paths; paths.trace()\n")
    cli = HOME / "pentad" / "cli"
    places = {
        "folder": folder,
        "recipe": cli / "recipes/demo_grpo.yaml",
        "starters": cli / "starters",
    }
    words = [word.format(**places) for word in PATHS["run"]]
    environment = {
        **os.environ,
        NOTES: str(folder / "stacks"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PENTAD_FAULT": PATHS["fault"].format(folder=folder),
        "PYTHONPATH": f"{folder}:{HOME / 'scripts'}:{HOME}",
    }
    command = [sys.executable, "-m", "pentad.cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the traced run failed:\n{done.stderr}")
    return [json.loads(line) for line in (folder / "stacks").read_text().splitlines()]


def files_of(path: dict[str, Any], stacks: list[list[Any]]) -> set[str]:
    files = set(path.get("unseen", ()))
    for span in path["spans"]:
        found = [stack for *ends, stack in stacks if ends == span]
        if not found:
            raise SystemExit(f"one {path['what']}: the run has no stack {span}")
        files |= {name.partition(":")[0] for stack in found for name in stack}
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stacks", action="store_true", help="print the stacks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stacks = traced_run(Path(folder))
    for _, _, stack in stacks if given.stacks else ():
        print(" > ".join(stack))
    print(json.dumps({path["what"]: len(files_of(path, stacks)) for path in PATHS["paths"]}))


if __name__ == "__main__":
    main()
