"""Sums of two-digit numbers as questions: `python examples/math/sums.py FOLDER`.

Writes train.jsonl and test.jsonl, which share no pair of numbers. `sums.yaml` trains on them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_TEST = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(1).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:NUM_TEST]), ("train", pairs[NUM_TEST:])):
        rows = (
            {"question": f"What is {left} + {right}?", "answer": str(left + right)}
            for left, right in part
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
