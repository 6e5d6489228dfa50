"""Lines of pentad/ by room and by what they are: `python scripts/size.py [FOLDER]`, as a table."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

KINDS = ("code", "docstrings", "comments", "imports", "blank")


def kinds_of(text: str) -> Counter[str]:
    """How many lines of a file are what; a line counts once."""
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


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "pentad")
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "", Counter())
        room += kinds_of(path.read_text())
        room["files"] += 1
    rooms["all"] = sum(rooms.values(), Counter())
    print(f"{'':12}{'files':>8}{'lines':>8}" + "".join(f"{kind:>12}" for kind in KINDS))
    for name, room in rooms.items():
        lines = sum(room[kind] for kind in KINDS)
        counts = "".join(f"{room[kind]:12}" for kind in KINDS)
        print(f"{name:12}{room['files']:8}{lines:8}{counts}")


if __name__ == "__main__":
    main()
