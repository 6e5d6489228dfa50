"""The house rules a machine can check: imports flow one way, light packages stay light."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from pentad_tools.docs import ROWS

PACKAGE = "pentad"
ROOT = Path(__file__).parents[1] / PACKAGE
TOOLS = Path(__file__).parents[1] / "pentad_tools"
BOTH = (ROOT, TOOLS)
LAYERS = [set(row.split()) for row in ROWS]  # a package imports only from rows above its own
LEVEL = {name: row for row, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "triton", "transformers", "ray", "sglang", "vllm", "numpy"}
LIGHT = {"config", "planner"}
NO_CONFIG = {
    *("core", "ops", "weights", "models", "parallel", "data", "runtime"),
    *("engine", "infer", "sync", "checkpoint"),
}
OPTIONAL = {
    *("ray", "vllm", "sglang", "boto3", "tensorboard", "wandb", "trackio", "megatron", "pyarrow"),
    *("starlette", "uvicorn", "transfer_queue"),
}


@dataclass(frozen=True)
class Source:
    """What the rules ask of a file."""

    nodes: tuple[ast.Import | ast.ImportFrom | ast.ClassDef, ...]
    """Its imports and classes, wherever they stand in it."""
    names: frozenset[str]
    """What it defines or imports, at whatever depth."""
    aliases: tuple[tuple[str, int, str], ...]
    """(name, line, what it stands for) of its type aliases."""
    docstring: str | None


@cache
def source_of(path: Path) -> Source:
    tree, nodes, names = ast.parse(path.read_text()), [], set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            nodes.append(node)
    aliases = tuple(aliases_of(tree))
    return Source(tuple(nodes), frozenset(names), aliases, ast.get_docstring(tree))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, lazy and TYPE_CHECKING ones included."""
    found: list[tuple[int, str]] = []
    for node in source_of(path).nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use absolute imports"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


OPEN = {"section", "facts"}
"""Files of keys and tables, without torch."""


def problems_of(root: Path) -> list[str]:
    out = []
    users: dict[tuple[str, str], set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        me = parts[0] if len(parts) > 1 else ""
        if me and me not in LEVEL:
            out.append(f"{path}: {me} is not a package of the house")
            continue
        for line, name in imports_of(path):
            names = name.split(".")
            where = f"{path}:{line}"
            if names[0] == TOOLS.name:
                out.append(f"{where}: {me or root.name} must not import {names[0]}")
            is_light = path.stem in OPEN
            if (me in LIGHT or is_light) and names[0] in HEAVY:
                out.append(f"{where}: {me} must not import {names[0]}")
            if names[0] in OPTIONAL:
                users.setdefault((me, names[0]), set()).add(str(path))
            if names[0] != root.name or set(names[2:3]) & OPEN:
                continue  # keys and tables without torch: any package may read another's
            if is_light and names[1] != "core":
                out.append(
                    f"{where}: a {path.stem} file imports core, sections and facts only, not {name}"
                )
            if len(names) < 2 or names[1] == me or names[1] not in LEVEL:
                continue
            faces = {root / "__init__.py": "api", root / "__main__.py": "cli"}
            if faces.get(path) == names[1]:
                continue  # the package as a module, and as a program
            if not me or LEVEL[names[1]] >= LEVEL[me]:
                out.append(f"{where}: {me} (row {LEVEL.get(me)}) imports {names[1]}")
            if me in NO_CONFIG and names[1] == "config":
                out.append(f"{where}: {me} must not import config")
    for (me, stack), files in users.items():
        if len(files) > 1:
            out.append(f"{me}: {stack} is imported in several files: {sorted(files)}")
    return out


def circles_of(root: Path) -> list[list[str]]:
    """Files that import each other, directly or through others, as sorted lists of modules."""
    modules = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }
    edges = {
        module: {
            found
            for _, name in imports_of(path)
            for found in (name, name.rpartition(".")[0])
            if found in modules and found != module
        }
        for module, path in modules.items()
    }
    while ends := [module for module, wanted in edges.items() if not wanted & edges.keys()]:
        for module in ends:  # no circle passes through it
            del edges[module]
    edges = {module: wanted & edges.keys() for module, wanted in edges.items()}
    reached = {module: _reached(module, edges) for module in edges}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in edges
        if module in reached[module]
    }
    return sorted(sorted(circle) for circle in circles)


def _reached(module: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        fresh = edges[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


@pytest.mark.parametrize("root", BOTH, ids=lambda root: root.name)
def test_files_do_not_import_each_other_in_circles(root):
    assert circles_of(root) == []


def test_a_circle_through_three_files_is_seen(tmp_path):
    package = tmp_path / "pentad" / "core"
    package.mkdir(parents=True)
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / f"{name}.py").write_text(f"from pentad.core.{other} import x\n")
    wanted = [f"pentad.core.{name}" for name in "abc"]
    assert circles_of(tmp_path / "pentad") == [wanted]


def test_imports_flow_one_way():
    assert problems_of(ROOT) == []


def missing_names(root: Path, *folders: Path) -> list[str]:
    """Names that files of these folders import from the packages in `root`, which lack them."""
    packages = {path.name for path in BOTH}
    wanted = {
        (path, node.module, alias.name)
        for folder in folders
        for path in folder.rglob("*.py")
        for node in source_of(path).nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages
        for alias in node.names
    }
    return sorted(
        f"{path.relative_to(root)}: {module} has no {name}"
        for path, module, name in wanted
        if name not in names_in(root.joinpath(*module.split(".")))
    )


@cache
def names_in(module: Path) -> set[str]:
    """What a module or a package defines or imports, at whatever depth; and its modules."""
    file = module.with_suffix(".py")
    file = file if file.exists() else module / "__init__.py"
    modules = {path.stem for path in module.glob("*")}
    return modules | source_of(file).names if file.exists() else modules


def test_tests_and_benchmarks_import_what_is_there():
    home = ROOT.parent
    folders = [home / name for name in ("tests", "benchmarks", "recipes", "examples")]
    assert missing_names(home, *folders) == []


def test_an_import_of_what_is_gone_is_seen(tmp_path):
    (tmp_path / "pentad" / "core").mkdir(parents=True)
    (tmp_path / "pentad" / "core" / "a.py").write_text("def f(): ...\nX: int = 1")
    (tmp_path / "tests").mkdir()
    code = "from pentad.core import a, b\nfrom pentad.core.a import X, f, g"
    (tmp_path / "tests" / "test_a.py").write_text(code)
    assert missing_names(tmp_path, tmp_path / "tests") == [
        "tests/test_a.py: pentad.core has no b",
        "tests/test_a.py: pentad.core.a has no g",
    ]


OF_ANOTHER = {
    "triton": "torch brings it where there is a GPU",
    "vllm": "the file runs in the environment of a vLLM server",
    "sglang": "the file runs in the environment of an SGLang server",
    "verifiers": "the file runs in the environment of verifiers",
}
DISTRIBUTIONS = {  # else the module's name
    "yaml": "pyyaml",
    "transfer_queue": "transferqueue",
    "megatron": "megatron-core",
}


def undeclared(root: Path, pyproject: str) -> list[str]:
    """Imports of what neither Python has nor a dependency or an extra for users names."""
    project = tomllib.loads(pyproject)["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "test"}
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in wanted}
    known = {*sys.stdlib_module_names, *OF_ANOTHER, root.name, PACKAGE}
    out = []
    for path in sorted(root.rglob("*.py")):
        for line, name in imports_of(path):
            top = name.split(".")[0]
            if top not in known and DISTRIBUTIONS.get(top, top).replace("_", "-") not in declared:
                out.append(f"{path}:{line}: imports {top}, which pyproject.toml does not name")
    return out


@pytest.mark.parametrize("root", BOTH, ids=lambda root: root.name)
def test_every_import_is_declared(root):
    assert undeclared(root, (ROOT.parent / "pyproject.toml").read_text()) == []


def test_the_product_names_the_tools_where_it_adds_their_commands_and_nowhere_else():
    found = {path for path in ROOT.rglob("*.py") if TOOLS.name in path.read_text()}
    assert found == {ROOT / "cli" / "main.py", ROOT / "cli" / "errors.py"}


def test_an_undeclared_import_is_caught(tmp_path):
    (tmp_path / "x.py").write_text("import yaml\ndef f():\n    from attrs import define")
    text = "[project]\ndependencies = ['PyYAML>=6']\n[project.optional-dependencies]\n"
    (found,) = undeclared(tmp_path, text + "test = ['attrs']")
    assert "x.py:3: imports attrs, which" in found


@pytest.mark.parametrize(
    ("package", "code", "expected"),
    [
        ("rl", "from pentad.models.families import qwen3", "row 1) imports models"),
        ("models", "def f():\n    import pentad.data.ledger", "row 3) imports data"),
        (
            "ops",
            "if TYPE_CHECKING:\n    from pentad.config.schema import Config",
            "must not import config",
        ),
        ("config", "def f():\n    import torch", "must not import torch"),
        ("cli", "def f():\n    import pentad_tools.docs", "must not import pentad_tools"),
        ("stuff", "", "not a package"),
    ],
)
def test_the_check_catches(tmp_path, package, code, expected):
    root = tmp_path / PACKAGE
    (root / package).mkdir(parents=True)
    (root / package / "x.py").write_text(code)
    assert any(expected in problem for problem in problems_of(root))


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("x", "from pentad.rewards.section import RewardConfig", None),
        ("x", "from pentad.rewards.scorer import RewardScorer", "row 1) imports rewards"),
        ("section", "from pentad.rewards.section import RewardConfig", None),
        ("section", "from pentad.rl.losses import clipped", "a section file imports core"),
        ("section", "import torch", "must not import torch"),
    ],
)
def test_sections_are_light_and_open_to_all_packages(tmp_path, name, code, expected):
    root = tmp_path / PACKAGE
    (root / "rl").mkdir(parents=True)
    (root / "rl" / f"{name}.py").write_text(code)
    found = problems_of(root)
    assert not found if expected is None else expected in found[0]


def test_contributing_has_the_same_rows():
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", page, re.M)
    assert [set(row.replace("`", "").split()) for row in rows] == LAYERS


def aliases_of(tree: ast.Module) -> list[tuple[str, int, str]]:
    """(name, line, what it stands for) of the type aliases of a file."""
    found = []
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) and node.value is not None:
                    found.append((name, node.lineno, ast.unparse(node.value)))
    return found


def twice_defined(*roots: Path) -> dict[str, list[str]]:
    """Names of classes and type aliases that stand for two things."""
    places: dict[str, list[str]] = {}
    meanings: dict[str, set[str]] = {}
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        found = [
            (node.name, node.lineno, f"class {path}:{node.lineno}")
            for node in source_of(path).nodes
            if isinstance(node, ast.ClassDef)
        ]
        for name, line, meaning in found + [*source_of(path).aliases]:
            places.setdefault(name, []).append(f"{path.name}:{line}")
            meanings.setdefault(name, set()).add(meaning)
    return {name: found for name, found in places.items() if len(meanings[name]) > 1}


def test_every_type_name_has_one_meaning():
    assert not twice_defined(*BOTH)


def test_a_type_name_with_two_meanings_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("class Plan: ...\nPairs = list[int]\nCut = int | None")
    (tmp_path / "b.py").write_text("def f():\n    class Plan: ...\nPairs = list[int]\nCut = str")
    assert twice_defined(tmp_path) == {"Plan": ["a.py:1", "b.py:2"], "Cut": ["a.py:3", "b.py:4"]}


def test_layers_are_swapped_in_one_place():
    found = {path for path in ROOT.rglob("*.py") if re.search(r"__class__ = ", path.read_text())}
    assert found == {ROOT / "core" / "swap.py"}


def test_no_empty_packages():
    packages = [path for root in BOTH for path in root.iterdir() if path.is_dir()]
    for package in [package for package in packages if package.name != "__pycache__"]:
        code = [p for p in package.rglob("*.py") if p.name != "__init__.py"]
        assert code, f"{package} holds nothing"


def test_every_module_says_what_it_owns():
    for path in [path for root in BOTH for path in root.rglob("*.py")]:
        if path.name == "__init__.py" and not path.read_text():
            continue
        assert source_of(path).docstring, f"{path} has no first sentence"


def light_modules() -> list[str]:
    packages = [ROOT / package for package in LIGHT if (ROOT / package).is_dir()]
    files = [path for package in packages for path in package.rglob("*.py")]
    files += [path for stem in OPEN for path in ROOT.glob(f"*/{stem}.py")]
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names)


SIZE = runpy.run_path(str(ROOT.parent / "scripts" / "size.py"))
LIMITS = json.loads((Path(__file__).parent / "size_limits.json").read_text())


def above_limits(found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    return [f"{k}: {n} > {allowed.get(k, 0)}" for k, n in found.items() if n > allowed.get(k, 0)]


def test_no_package_grows_beyond_its_limit():
    """A package that has to grow gets a higher limit in the same change, which reviewers see."""
    found = SIZE["lines_of"](*BOTH)
    assert len(found) > 20 and above_limits(found, LIMITS["lines"]) == []


def test_what_belongs_in_few_places_is_in_no_more():
    """Processes, threads and renames have their places, and docstrings begin with their subject."""
    found = {root.name: SIZE["sites_of"](root) for root in BOTH}
    assert above_limits(sum(found.values(), Counter()), LIMITS["sites"]) == []


def test_what_belongs_in_few_places_is_counted(tmp_path):
    code = """
import subprocess, threading
'''Of nothing.'''
subprocess.Popen(["a"]), threading.Thread(target=f), aside.rename(path), aside.replace(path)
text.replace("a", "b"), replace(settings, a=1)
"""
    (tmp_path / "a.py").write_text(code)
    found = SIZE["sites_of"](tmp_path)
    assert dict(found) == {
        "docstrings that begin with Of": 1,
        "subprocess.Popen": 1,
        "threading.Thread": 1,
        "renames": 2,
    }
    assert above_limits(found, {**found, "renames": 1}) == ["renames: 2 > 1"]


def test_the_table_of_sizes_names_what_is_there(monkeypatch):
    assert SIZE["missing_names"]() == []
    files = [pattern for patterns in SIZE["TABLE"]["files"].values() for pattern in patterns]
    assert len(files) == len(set(files)) > 50
    known = SIZE["TABLE"]["concepts"][0]
    monkeypatch.setitem(known, "names", ["trainer/run.py:Run", "trainer/run.py:Walk", "gone.py:x"])
    assert SIZE["missing_names"]() == ["trainer/run.py:Walk", "gone.py:x"]


STYLE = ROOT.parent / "docs" / "style.md"
PROSE = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md"]
PROSE += [page for page in (ROOT.parent / "docs").glob("*.md") if page != STYLE]


BETWEEN = r"""[\s#]*(?:[ \n#]|["']\s+f?["'])[\s#]*"""
"""What may stand between two words: a space, the end of a line, of a string or of a comment."""


def unwanted_words() -> re.Pattern[str]:
    """The words in the table of docs/style.md, also where a line ends between them. In backticks
    they are names."""
    table = STYLE.read_text().partition("## Checked words")[2]
    words = [word for row in re.findall(r"^\| (`.*?) \|", table, re.M) for word in row.split(", ")]
    assert len(words) > 10
    spaced = "|".join(word.strip("`").replace(" ", BETWEEN) for word in words)
    return re.compile(rf"(?<!`)\b(?:{spaced})\b(?!`)", re.IGNORECASE)


def unwanted_in(paths: list[Path]) -> list[str]:
    pattern = unwanted_words()
    out = []
    for path in sorted(paths):
        text = path.read_text()
        for match in pattern.finditer(text):
            if not match[0].isupper():  # a constant
                line = text[: match.start()].count("\n") + 1
                out.append(f"{path}:{line}: {match[0]!r}, see docs/style.md")
    return out


def test_texts_avoid_the_words_of_the_style_page():
    assert unwanted_in([*PROSE, *(path for root in BOTH for path in root.rglob("*.py"))]) == []


def test_an_unwanted_word_is_seen(tmp_path):
    (tmp_path / "a.py").write_text('"""It goes\n    on."""\nNOBODY = 1  # as `nobody`\n')
    (tmp_path / "b.md").write_text("Whoever reads this.")
    found = [
        line.partition(str(tmp_path))[2].partition(",")[0]
        for line in unwanted_in([tmp_path / "a.py", tmp_path / "b.md"])
    ]
    assert found == ["/a.py:1: 'goes\\n    on'", "/b.md:1: 'Whoever'"]


def test_config_loads_no_heavy_library():
    code = f"import sys, importlib\nfor m in {light_modules()!r}: importlib.import_module(m)\n"
    code += f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config):
    passed_over = pytestconfig.getini("norecursedirs")
    for path in Path(__file__).parent.rglob("test_*.py"):
        parts = path.relative_to(Path(__file__).parent).parts[:-1]
        assert not [p for p in parts if any(fnmatch(p, glob) for glob in passed_over)], path


def test_test_files_have_names_of_their_own():
    """pytest imports them by name: of two with one name the second is not collected."""
    found = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert len(found) > 100 and [name for name, times in found.items() if times > 1] == []
