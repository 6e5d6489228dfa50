"""What an installed user meets: a missing package is one sentence, the wheel says what it is."""

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]


def requirement(package):
    (found,) = [line for line in PROJECT["dependencies"] if line.split(">")[0] == package]
    return found


def run(words, folder):
    """`pentad` where a folder comes first on the path of imports."""
    code = "from pentad.cli.main import main; main()"
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=env, cwd=folder
    )


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", ["demo"]),
        ("torch", ["serve", "m"]),
        ("torch", ["verify-model", "qwen3"]),
        ("torch", ["convert", "a", "b"]),
        ("torch", ["train", "m.yaml"]),
        ("transformers", ["verify-model", "qwen3"]),
        ("safetensors", ["convert", "a", "b"]),
    ],
    ids=str,
)
def test_a_missing_package_is_one_sentence_with_the_command(tmp_path, package, words):
    failing = f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
    (tmp_path / f"{package}.py").write_text(failing)
    (tmp_path / "m.yaml").write_text(
        "actor: {path: m, init_from_scratch: true}\ntrain_dataset: {path: d.jsonl}\n"
        "reward: {fn: exact_match}\ngconfig: {max_new_tokens: 4}\n"
    )
    (tmp_path / "m").mkdir()
    config = {"model_type": "qwen3"}
    (tmp_path / "m" / "config.json").write_text(str(config).replace("'", '"'))
    (tmp_path / "d.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    out = run(words, tmp_path)
    assert (out.returncode, "Traceback" in out.stderr) == (2, False), out.stderr
    assert out.stderr.splitlines()[-1].startswith(
        f"* {package}: this command needs it and it is not installed; pip install '{package}"
    )


def test_the_wheel_has_both_packages():
    patterns = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    files = [file for name in ("pentad", "pentad_tools") for file in (ROOT / name).rglob("*.py")]
    packages = {".".join(file.relative_to(ROOT).parent.parts) for file in files}
    assert {"pentad.cli", "pentad_tools", "pentad_tools.chaos"} <= packages
    assert not [name for name in packages if not any(fnmatch(name, one) for one in patterns)]
    assert all((ROOT / name.replace(".", "/") / "__init__.py").exists() for name in packages)


def test_without_the_tools_the_product_has_its_own_commands():
    code = "import sys; sys.modules['pentad_tools'] = None; sys.argv = ['pentad', '--help']\n"
    code += "import importlib.util as u; u.find_spec = lambda name: None\n"
    code += "from pentad.cli.main import main; main()"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0 and " train " in out.stdout and " bench " not in out.stdout


def test_the_wheel_says_what_it_is_and_stays_within_what_was_tested():
    assert PROJECT["readme"] == "README.md" and (ROOT / "README.md").is_file()
    said = {line for line in PROJECT["classifiers"] if line.startswith("Programming Language")}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} < said
    text = (ROOT / "constraints.txt").read_text().lower()
    pins = dict(line.split("==") for line in text.split() if "==" in line)
    for line in PROJECT["dependencies"]:
        package, below = re.split("[<>]", line)[0], line.partition("<")[2]
        assert below, f"{line}: no version is too late for it"
        first_untested = tuple(map(int, below.split(".")))
        pinned = tuple(map(int, pins[package.lower()].split("+")[0].split(".")))
        assert pinned < first_untested <= (pinned[0] + 1,), package
