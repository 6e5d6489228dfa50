"""Names of models and datasets on the Hugging Face Hub, and their paths in its cache.

A model is named OWNER/NAME or OWNER/NAME@REVISION. A dataset name may also select files:
OWNER/NAME:CONFIG:SPLIT, OWNER/NAME:SPLIT, or a pattern of files, OWNER/NAME:data/train-*.parquet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HubKind = Literal["model", "dataset"]
REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
HUB_NAME = re.compile(rf"({REPO})(?:@([\w.][\w./-]*))?(?::(.+))?", re.ASCII)
ROW_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".csv", ".txt", ".md")
"""Suffixes of files with rows: OWNER/NAME with such a suffix is a local path."""
IN_CACHE = re.compile(
    r"/(model|dataset)s--([A-Za-z0-9][\w.-]*?)--([\w.-]+)/snapshots/([0-9a-f]{40})(?:/(.+))?",
    re.ASCII,
)
"""Path of a commit of a repository in the cache of huggingface_hub, and a file or pattern in it."""


@dataclass(frozen=True, slots=True)
class HubName:
    kind: HubKind
    repo: str
    revision: str | None = None
    """A branch, a tag or a commit. None: the main branch."""
    part: str = ""
    """CONFIG:SPLIT, SPLIT or a pattern of files of a dataset; empty: not given."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}" + (f":{self.part}" if self.part else "")

    @property
    def is_pattern(self) -> bool:
        """Whether `part` is a pattern of files, not a config and a split."""
        return bool(set(self.part) & set("/.*?["))

    @property
    def download(self) -> str:
        """The command that downloads all files into the cache."""
        option = "" if self.kind == "model" else " --repo-type dataset"
        return f"hf download {self.repo}{option}" + (
            f" --revision {self.revision}" if self.revision else ""
        )


def hub_name(text: str, kind: HubKind) -> HubName | None:
    """The Hub name in a path key, or None if it is a local path. An existing local path takes
    precedence, and OWNER/NAME is a path if a folder OWNER exists or if it ends as a file of rows,
    unless it has a revision."""
    found = HUB_NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    repo, revision, part = found.groups(default="")
    if part and kind == "model":
        return None
    is_file = kind == "dataset" and repo.endswith(ROW_FILES)
    if not revision and not part and (is_file or Path(repo.partition("/")[0]).exists()):
        return None
    return HubName(kind, repo, revision or None, part)


def name_in_cache(path: str) -> HubName | None:
    """Name and commit of a path in the hub's cache; None for other paths."""
    found = IN_CACHE.search(path)
    if found is None or path[found.end() :].strip("/"):
        return None
    kind, owner, name, commit, part = found.groups(default="")
    return HubName("model" if kind == "model" else "dataset", f"{owner}/{name}", commit, part)
