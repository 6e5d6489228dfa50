"""What a repository shows besides code: the container file, the page for coding assistants, issue
forms and the changelog name what exists."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pentad import __version__
from pentad.cli.main import app

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
AGENTS = (ROOT / "AGENTS.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}


def is_builder(name):
    """A docker client without its daemon builds nothing."""
    return shutil.which(name) and not subprocess.run([name, "info"], capture_output=True).returncode


def instructions(text):
    """(word, rest) of each instruction, continued lines joined, remarks left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def lint(text):
    """What is wrong with a container file: a small part of what hadolint looks at."""
    found, defaults, steps = [], {}, instructions(text)
    for word, rest in steps:
        if word == "ARG":
            name, _, value = rest.partition("=")
            defaults[name] = value
        elif word == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda match: defaults.get(match[1], ""), rest)
            if not re.search(r":\d[\w.-]*$", base):
                found.append(f"the base is not pinned: {base}")
        elif word == "COPY":
            sources = [one for one in rest.split()[:-1] if not one.startswith("dist/")]
            found += [f"nothing to copy: {one}" for one in sources if not (ROOT / one).exists()]
        elif word == "RUN" and "pip install" in rest and "--no-cache-dir" not in rest:
            found.append("pip keeps its cache in the image")
        elif word == "RUN" and "apt-get install" in rest and "rm -rf /var/lib/apt" not in rest:
            found.append("apt keeps its lists in the image")
        if word == "RUN" and re.search(r"https?://", rest):
            found.append(f"a host is written down: {rest}")
    words = [word for word, _ in steps]
    if "USER" not in words:
        found.append("everything runs as root")
    return found


def test_the_container_file_is_clean():
    assert lint(DOCKERFILE) == []
    assert instructions(DOCKERFILE)[-2:] == [("ENTRYPOINT", '["pentad"]'), ("CMD", '["--help"]')]
    assert "!dist/pentad-*.whl" in (ROOT / ".dockerignore").read_text()


def test_each_fault_of_a_container_file_is_found():
    text = (
        "FROM python:latest\nCOPY gone.txt /\nRUN pip install --no-cache-dir \\\n  -i https://x y\n"
        "RUN pip install x\nRUN apt-get install gcc\n"
    )
    assert [one.split(":")[0] for one in lint(text)] == [
        "the base is not pinned",
        "nothing to copy",
        "a host is written down",
        "pip keeps its cache in the image",
        "apt keeps its lists in the image",
        "everything runs as root",
    ]


@pytest.mark.optional
@pytest.mark.timeout(3600)
@pytest.mark.skipif("PENTAD_TEST_IMAGE" not in os.environ, reason="make test-image runs it")
def test_the_container_is_built_and_trains():
    """PENTAD_TEST_IMAGE: options of the build."""
    builder = next(filter(is_builder, ("docker", "podman", "buildah")), None)
    assert builder, "none of docker, podman and buildah is here, or its daemon does not run"
    options = shlex.split(os.environ["PENTAD_TEST_IMAGE"])
    subprocess.run([builder, "build", "-t", "pentad-test", *options, ROOT], check=True)
    run = [builder, "run", "--rm", "pentad-test"]
    if builder == "buildah":  # it passes over the entry point
        made = _output([builder, "from", "--pull-never", "localhost/pentad-test"])
        run = [builder, "run", made.strip(), "--", "pentad"]
    assert _output([*run, "--version"]).strip() == f"pentad {__version__}"
    assert "held-out accuracy" in _output([*run, "demo", "--steps", "2"])


def _output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_assistants_are_sent_to_files_and_commands_that_exist():
    code = re.findall(r"`([^`]+)`", AGENTS)
    files = {
        one
        for text in code
        for one in re.findall(
            r"(?:^|\s)((?:pentad|pentad_tools|tests|docs|scripts)/[\w./-]*)", text
        )
    }
    assert len(files) >= 15
    assert [file for file in files if not (ROOT / file).exists()] == []
    targets = {one for text in code for one in re.findall(r"\bmake ([a-z-]+)", text)}
    assert len(targets) >= 6 and targets <= TARGETS
    commands = {one for text in code for one in re.findall(r"\bpentad ([a-z][a-z-]+)", text)}
    assert len(commands) >= 6 and commands <= COMMANDS


def test_the_release_page_names_targets_that_exist():
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "docs/releasing.md").read_text()))
    assert len(named) >= 8 and named <= TARGETS


@pytest.mark.parametrize("file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_issue_forms_have_what_a_code_host_asks_for(file):
    form = yaml.safe_load(file.read_text())
    if file.name == "config.yml":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in ("input", "textarea") and field["attributes"]["label"]


def test_the_changelog_has_a_section_for_each_version_and_for_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    for section in sections[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", section), section
    assert f"[{__version__}]" in text or f"{__version__}, is not released" in text
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert kinds <= allowed
    said = set(re.findall(r"`([a-z-]+)`", text.split("**Recipes**")[0]))
    assert said >= COMMANDS
