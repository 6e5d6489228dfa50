"""The pages as a site: each has its place in the navigation, and every link and anchor leads
somewhere. Without mkdocs; `make site` builds it, where a warning is a failure."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.site_pages import PAGES as ADDED
from scripts.site_pages import on_page_markdown, page_text

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
SECTIONS = "Home, Get started, Guides, Concepts, Reference, Benchmarks, Migrating"


class Loader(yaml.SafeLoader):
    """mkdocs.yml names a function by a tag of its own."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def leaves(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in leaves(value)]


def test_every_page_stands_once_in_the_navigation():
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(leaves(SITE["nav"])) == sorted([*pages, *ADDED.values()])


def test_the_sections_are_those_people_look_for():
    named = ", ".join(name for part in SITE["nav"] for name in part)
    assert named in (SECTIONS, f"{SECTIONS}, FAQ")


def test_pages_are_short():
    """Three are generated from the code."""
    generated = {DOCS / f"{name}.md" for name in ("configuration", "map", "telemetry")}
    long = {page for page in PAGES if len(page.read_text().splitlines()) > 150}
    assert sorted(long - generated - {ROOT / "CHANGELOG.md"}) == []


def test_the_site_asks_no_other_host():
    assert SITE["theme"]["font"] is False and SITE["strict"] is True
    links = SITE["validation"]["links"]
    assert {links[kind] for kind in ("not_found", "anchors")} == {"warn"}


def prose(text):
    """Without blocks of code; in them a bracket is no link."""
    return re.sub(r"^( *)(```+).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """Of its headings, as code hosts make them, and those written as HTML."""
    found = re.findall(r'<a (?:id|name)="([^"]+)"', text)
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        again = sum(one == slug or one.startswith(f"{slug}~") for one in found)
        found.append(f"{slug}~{again}" if again else slug)
    return {slug.replace("~", "-") for slug in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    """A pipe that is not escaped ends its cell."""
    odd = []
    for table in re.findall(r"(?:^ *\|.*\n)+", prose(page.read_text()), re.MULTILINE):
        head, *rows = (len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines())
        odd += [table.splitlines()[n] for n, cells in enumerate(rows, 1) if cells != head]
    assert odd == []


def test_code_in_a_table_shows_its_pipe():
    """Escaped for GitHub, where a pipe in code would end the cell."""
    assert on_page_markdown("| `a\\|b` | a\\|b |") == "| `a|b` | a\\|b |"


def faults(page, text):
    """Links of a page that lead nowhere."""
    body = re.sub(r"`[^`\n]*`", "", prose(text))
    linked = re.findall(r"\]\(([^)\s]+)\)", body)
    linked += re.findall(r'(?:src|srcset|href)="([^"]+)"', body)
    for target in linked:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path
        is_there = file.exists() or not path
        if not is_there or (anchor and anchor not in anchors(file.read_text() if path else text)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page):
    assert list(faults(page, page.read_text())) == []


def test_a_dead_link_and_a_dead_anchor_are_found():
    text = "# One\n\n[a](gone.md) [b](#two) [c](#one) [d](quickstart.md#nothing) [e](quickstart.md)"
    assert list(faults(DOCS / "page.md", text + " `[f](gone.md)`")) == [
        *("gone.md", "#two", "quickstart.md#nothing")
    ]


@pytest.mark.parametrize("source", ADDED)
def test_links_of_added_pages_hold_inside_docs(source):
    others = set(ADDED.values())
    dead = faults(DOCS / ADDED[source], page_text(source))
    assert [target for target in dead if target.partition("#")[0] not in others] == []
