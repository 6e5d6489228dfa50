"""A hook of mkdocs: the pages of the site that lie outside docs/, with links that hold in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> page of the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=page_text(source)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links of docs/ to those files lead to their pages. In code in a table a pipe is escaped for
    GitHub; mkdocs would show the backslash."""
    markdown = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), markdown)
    for source, page in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


def page_text(source: str) -> str:
    """The file with its links as they are from inside docs/."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = re.sub(r'(\]\(|src="|srcset="|href=")docs/', r"\1", text)
    for other, page in PAGES.items():
        text = text.replace(f"]({other}", f"]({page}")
    return text
