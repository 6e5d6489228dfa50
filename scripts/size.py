"""Size of the code: `python scripts/size.py [FOLDER ...]` counts lines by package and by kind.

`--table` prints the tables of docs/architecture.md: lines and files, countable properties of the
design, the number of functions that two steps of SFT and of GRPO execute, the files that a prompt
or a key passes (`paths.py`), and the lines of each capability added since commit 67e9f47.
`size_table.json` names the classes and functions that are counted, and the files of the
capabilities. `--limits` prints tests/size_limits.json, which
`tests/test_house.py` enforces.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import logging
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HOME = Path(__file__).parents[1]
PACKAGES = (HOME / "pentad", HOME / "pentad_tools")
TABLE = json.loads((HOME / "scripts" / "size_table.json").read_text())
PATHS = json.loads((HOME / "scripts" / "paths.json").read_text())["paths"]
KINDS = ("code", "docstrings", "comments", "imports", "blank")
WRITERS = HOME / "pentad" / "core" / "files.py"
"""The module whose renames are not counted."""


def kinds_of(text: str) -> Counter[str]:
    """Number of lines of each kind in a file; each line counts once."""
    found: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        found[number] = "code" if line.strip() else "blank"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            found[token.start[0]] = "comments"
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import() | ast.ImportFrom():
                kind = "imports"
            case ast.Expr(value=ast.Constant(value=str())):
                kind = "docstrings"
            case _:
                continue
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            found[number] = kind
    return Counter(found.values())


def packages_of(root: Path) -> dict[str, Counter[str]]:
    """Package -> lines of each kind, `lines` and `files`; "" has files outside packages."""
    packages: dict[str, Counter[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        package = packages.setdefault(parts[0] if len(parts) > 1 else "", Counter())
        kinds = kinds_of(path.read_text())
        package.update(kinds, lines=kinds.total(), files=1)
    return packages


def lines_of(*roots: Path) -> Counter[str]:
    """Lines of each package, by its name such as pentad/engine."""
    found: Counter[str] = Counter()
    for root in roots:
        for path in root.rglob("*/*.py"):
            package = path.relative_to(root).parts[0]
            found[f"{root.name}/{package}"] += len(path.read_text().splitlines())
    return found


def sites_of(root: Path) -> Counter[str]:
    """Counts of operations that belong in few places."""
    found: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.startswith("Of "):
                    found["docstrings that begin with Of"] += 1
                case ast.Call(func=ast.Attribute(attr="Popen")):
                    found["subprocess.Popen"] += 1
                case ast.Call(func=ast.Attribute(attr="Thread")):
                    found["threading.Thread"] += 1
                case ast.Call(func=ast.Attribute(attr="rename" | "replace"), args=[_], keywords=[]):
                    found["renames"] += path != WRITERS
                case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="rename" | "replace")):
                    found["renames"] += path != WRITERS
                case ast.Call(func=ast.Attribute(value=ast.Name("disk"), attr="rename")):
                    found["renames"] += path != WRITERS
    return found


def limits() -> dict[str, dict[str, int]]:
    """Limits: lines of each package plus 2%, and the present counts of `sites_of`."""
    lines = {name: round(1.02 * number) for name, number in lines_of(*PACKAGES).items()}
    sites = sum((sites_of(root) for root in PACKAGES), Counter())
    return {"lines": lines, "sites": {name: sites[name] for name in sorted(sites)}}


def defined_in(path: Path) -> set[str]:
    """Classes, functions and `Class.method` of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        n for n in ast.parse(path.read_text()).body if isinstance(n, (*functions, ast.ClassDef))
    ]
    return {node.name for node in found} | {
        f"{node.name}.{inner.name}"
        for node in found
        for inner in node.body
        if isinstance(node, ast.ClassDef) and isinstance(inner, functions)
    }


def missing_names() -> list[str]:
    """Names in size_table.json and paths.json that do not exist in the package."""
    lacks, names = [], [name for concept in TABLE["concepts"] for name in concept["names"]]
    names += [name for path in PATHS for span in path["spans"] for name in span if name]
    for name in names:
        file, _, defined = name.partition(":")
        defined = defined.partition(".<locals>")[0]
        if not (PACKAGES[0] / file).exists() or defined not in defined_in(PACKAGES[0] / file):
            lacks.append(name)
    patterns = [pattern for files in TABLE["files"].values() for pattern in files]
    patterns += [file for path in PATHS for file in path.get("unseen", ())]
    return lacks + [pattern for pattern in patterns if not any(PACKAGES[0].glob(pattern))]


def lines_added() -> dict[str, int]:
    """Lines of each capability: new files since commit 67e9f47, and growth of others."""
    before: dict[str, int] = TABLE["lines_before"]
    added = {}
    for capability, patterns in TABLE["files"].items():
        files = {path for pattern in patterns for path in PACKAGES[0].glob(pattern)}
        added[capability] = sum(
            len(path.read_text().splitlines())
            - before.get(path.relative_to(PACKAGES[0]).as_posix(), 0)
            for path in files
        )
    return added


def print_packages(roots: list[Path]) -> None:
    print(f"{'':22}{'files':>8}{'lines':>8}" + "".join(f"{kind:>12}" for kind in KINDS))
    for root in roots:
        packages = packages_of(root)
        for name, package in {**packages, "all": sum(packages.values(), Counter())}.items():
            counts = "".join(f"{package[kind]:12}" for kind in KINDS)
            print(f"{f'{root.name} {name}':22}{package['files']:8}{package['lines']:8}{counts}")


def print_table() -> None:
    packages, tools = map(packages_of, PACKAGES)
    all_packages, all_tools = (sum(one.values(), Counter()) for one in (packages, tools))
    sites = sum((sites_of(root) for root in PACKAGES), Counter())
    sft, grpo = (count_in_a_process(command) for command in ("sft", "train"))
    rows = (
        (all_packages["lines"], all_tools["lines"]),
        (all_packages["files"], all_tools["files"]),
        (sft, grpo),
        (sites["subprocess.Popen"], sites["threading.Thread"]),
        (sites["renames"],),
        (sites["docstrings that begin with Of"],),
        tuple(json.loads(output_of("paths.py")).values()),
    )
    if found := missing_names():
        raise SystemExit(f"the tables in scripts/ have unknown names: {', '.join(found)}")
    print("| counted | at 67e9f47 | goal | now |\n|---|---|---|---|")
    for (name, goal, *before), now in zip(BEFORE, rows, strict=True):
        cells = (" / ".join(f"{number:,}" for number in numbers) for numbers in (before, goal, now))
        print(f"| {name} | {' | '.join(cells)} |")
    for concept in TABLE["concepts"]:
        cells = (concept["before"], concept["goal"], len(concept["names"]))
        print(f"| {concept['what']} | {' | '.join(map(str, cells))} |")
    print()
    for concept in TABLE["concepts"]:
        names = ", ".join(f"`{name}`" for name in concept["names"])
        why = f". {concept['why'][0].upper()}{concept['why'][1:]}" if concept["why"] else ""
        print(f"- {concept['what'].capitalize()}: {names}{why}.")
    print_packages_table(packages)
    added = lines_added()
    rest = all_packages["lines"] - sum(added.values())
    print("\n| lines of `pentad` | |\n|---|---|")
    for name, lines in sorted(added.items(), key=lambda item: -item[1]):
        print(f"| {name} | {lines:,} |")
    print(f"| all of these | {sum(added.values()):,} |")
    print(
        f"| everything else (at 67e9f47, without what are tools now: {CORE_BEFORE:,}) | {rest:,} |"
    )


def print_packages_table(packages: dict[str, Counter[str]]) -> None:
    """Prints the table of packages, two in a row."""
    ordered = sorted((item for item in packages.items() if item[0]), key=lambda x: -x[1]["lines"])
    cells = [f"`{name}` | {package['files']} | {package['lines']:,}" for name, package in ordered]
    half = -(-len(cells) // 2)
    cells += [" | | "] * (2 * half - len(cells))
    print("\n| package | files | lines | package | files | lines |\n|---|---|---|---|---|---|")
    for left, right in zip(cells[:half], cells[half:], strict=True):
        print(f"| {left} | {right} |")


BEFORE: tuple[tuple[Any, ...], ...] = (
    ("lines of `pentad` / `pentad_tools`", (54_000, 5_000), 70_045, 0),
    ("files of `pentad` / `pentad_tools`", (), 361, 0),
    ("functions that 2 steps of SFT / GRPO execute in one process", (800, 1_200), 1_012, 1_549),
    ("calls of `subprocess.Popen` / `threading.Thread`", (), 6, 19),
    ("renames of files and folders outside `core/files.py`", (), 23),
    ('docstrings that begin with "Of"', (0,), 198),
    (
        "files that a prompt / a weight / a key / a checkpoint / a rank failure passes",
        (30, 8, 5, 7, 6),
        *(54, 17, 14, 13, 16),  # by reading the code
    ),
)
"""(name, goals if any, counts at that commit) of each row."""
CORE_BEFORE = 65_373
"""Lines at that commit without bench, chaos, verify-model, verify-parallel and the docs writers."""


def count_in_a_process(command: str) -> int:
    """Counts functions in a separate process, because caches affect the count."""
    return int(output_of("size.py", "--functions", command).split()[-1])


def output_of(script: str, *options: str) -> str:
    words = [sys.executable, str(HOME / "scripts" / script), *options]
    done = subprocess.run(words, cwd=HOME, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def count_functions(command: str) -> int:
    """Functions of the package that a run executes, from reading its recipe to its end."""
    sys.path.insert(0, str(HOME))
    from pentad.data.toy import write_model, write_task
    from pentad.planner.prepare import prepare
    from pentad.trainer.sources.examples import run_sft
    from pentad.trainer.sources.rollouts import run_train

    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        write_task(Path(folder), seed=1, num_train=64, num_sft=64, num_valid=8)
        recipe, run = ("demo_sft", run_sft) if command == "sft" else ("demo_grpo", run_train)
        threading.setprofile(note)
        sys.setprofile(note)
        words = list(run_words(Path(folder), command))
        config, notes = prepare(HOME / f"pentad/cli/recipes/{recipe}.yaml", words, command)
        run(config, notes, fresh=True, device="cpu")
        sys.setprofile(None)
        threading.setprofile(None)
    own = str(HOME / "pentad") + "/"
    return sum(one.co_filename.startswith(own) and one.co_name[0] != "<" for one in seen)


def run_words(folder: Path, command: str) -> Iterator[str]:
    yield from (f"fileroot={folder}", "total_train_steps=2", "train_dataset.batch_size=8")
    yield from (f"actor.path={folder / 'model'}", "actor.init_from_scratch=true")
    name = "sft" if command == "sft" else "train"
    yield f"train_dataset.path={folder / f'{name}.jsonl'}"
    if command != "sft":
        yield from ("gconfig.n_samples=4", f"valid_dataset.path={folder / 'valid.jsonl'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=list(PACKAGES))
    parser.add_argument("--table", action="store_true", help="print architecture tables")
    parser.add_argument("--limits", action="store_true", help="print tests/size_limits.json")
    parser.add_argument(
        "--functions", choices=("sft", "train"), help="count functions that a run executes"
    )
    given = parser.parse_args()
    if given.functions:
        logging.disable()
        print(count_functions(given.functions))
    elif given.table:
        print_table()
    elif given.limits:
        print(json.dumps(limits(), indent=2))
    else:
        print_packages(given.folders)


if __name__ == "__main__":
    main()
