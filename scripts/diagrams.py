"""Draws the diagrams of docs/: `python scripts/diagrams.py` writes docs/pictures/diagram-*.svg.

Boxes have a light fill with dark text, and what stands outside of them a mid grey, so that the same
picture can be read on a light and on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
INK, GREY = "#1c2430", "#7b8794"
FILLS = {
    "blue": ("#dbe7ff", "#4a72d4"),
    "green": ("#d8f3df", "#3b9a57"),
    "amber": ("#ffecc7", "#c98a1a"),
    "rose": ("#ffdede", "#cf5757"),
    "violet": ("#e9e0ff", "#7e5bd0"),
    "grey": ("#eceff3", "#8a94a3"),
}
"""Fill and border of a kind of box."""
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass
class Drawing:
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, text: str, kind: str = "grey") -> None:
        """The first line of the text is the name, the others are smaller."""
        fill, edge = FILLS[kind]
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='7' fill='{fill}' stroke='{edge}'"
            " stroke-width='1.4'/>"
        )
        lines = text.split("\n")
        top = y + h / 2 - (len(lines) - 1) * 8 + 4.5
        for row, line in enumerate(lines):
            look = "font-weight='600' font-size='13.5'" if row == 0 else "font-size='11.5'"
            self.text(x + w / 2, top + row * 16, line, look, INK)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        look: str = "font-size='12'",
        ink: str = GREY,
        anchor: str = "middle",
    ) -> None:
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='{ink}' {look} {FONT}>"
            f"{escape(text)}</text>"
        )

    def frame(self, x: int, y: int, w: int, h: int, title: str) -> None:
        """A dashed frame: a process, a machine or a group."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='10' fill='none' stroke='{GREY}'"
            " stroke-width='1.2' stroke-dasharray='5 4'/>"
        )
        self.text(x + 12, y + 18, title, "font-size='12' font-weight='600'", anchor="start")

    def arrow(
        self,
        *points: tuple[int, int],
        label: str = "",
        at: tuple[int, int] | None = None,
        dashed: bool = False,
    ) -> None:
        """Through these points; the label is at `at`, else above the middle of the first leg."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{GREY}' stroke-width='1.6'{dash}"
            " marker-end='url(#head)'/>"
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            x, y = at or ((x0 + x1) // 2, (y0 + y1) // 2 - 7)
            for row, line in enumerate(label.split("\n")):
                self.text(x, y + row * 14, line, "font-size='11.5'")

    def svg(self) -> str:
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}'"
            f" width='{self.width}' role='img'><title>{escape(self.title)}</title><defs>"
            "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7'"
            " markerHeight='7' orient='auto-start-reverse'>"
            f"<path d='M0,0.6 L10,5 L0,9.4 z' fill='{GREY}'/></marker></defs>"
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


def architecture() -> Drawing:
    d = Drawing(900, 430, "A prompt on its way to new weights")
    d.frame(150, 12, 600, 132, "scheduler process")
    d.box(10, 50, 110, 60, "Dataset\nrows, ids", "grey")
    d.box(170, 50, 120, 60, "Prompt stream\ngid = position", "blue")
    d.box(325, 50, 120, 60, "Rollout pump\nbudget, ledger", "blue")
    d.box(480, 50, 120, 60, "Executor\nworkflow, retries", "blue")
    d.box(635, 50, 100, 60, "Checks\nids, log-probs", "blue")
    d.box(485, 190, 110, 56, "Sampler\nengine or server", "green")
    d.box(630, 190, 110, 56, "Rewards\nown processes", "amber")
    d.box(780, 120, 110, 60, "Store\ncolumns by gid", "grey")
    d.arrow((120, 80), (170, 80))
    d.arrow((290, 80), (325, 80))
    d.arrow((445, 80), (480, 80))
    d.arrow((600, 80), (635, 80))
    d.arrow((520, 110), (520, 190), label="prompt", at=(495, 160))
    d.arrow((560, 190), (560, 110), label="tokens,\nversion", at=(588, 152))
    d.arrow((685, 110), (685, 190), label="answer", at=(708, 160))
    d.arrow((735, 70), (835, 70), (835, 120), label="group", at=(792, 62))
    d.frame(150, 290, 600, 128, "learner ranks")
    d.box(600, 325, 130, 66, "Batch update\nadvantages, rows", "violet")
    d.box(430, 325, 130, 66, "Engine\nforward, backward", "violet")
    d.box(260, 325, 130, 66, "Optimizer step\nversion + 1", "violet")
    d.box(10, 325, 110, 66, "Checkpoint\nrecovery, export", "grey")
    d.box(10, 190, 110, 56, "Publisher\ndigest compared", "green")
    d.arrow((835, 180), (835, 358), (730, 358), label="lease by gid", at=(796, 348))
    d.arrow((600, 358), (560, 358))
    d.arrow((430, 358), (390, 358))
    d.arrow((260, 358), (120, 358), label="state", at=(202, 350))
    d.arrow((290, 325), (290, 218), (120, 218), label="weights", at=(205, 210))
    d.arrow(
        (65, 246), (65, 268), (465, 268), (465, 218), (485, 218), label="publish", at=(205, 261)
    )
    d.arrow((360, 325), (360, 110), label="acknowledge", at=(400, 180))
    return d


def modes() -> Drawing:
    d = Drawing(900, 500, "Which device works when, in the three modes")
    left, lane = 150, 34

    def row(y: int, name: str, blocks: list[tuple[int, int, str, str]]) -> None:
        d.text(left - 14, y + 22, name, "font-size='12.5'", anchor="end")
        for x, w, text, kind in blocks:
            d.box(left + x, y, w, lane, text, kind)

    look = "font-size='14' font-weight='600'"
    d.text(
        10,
        24,
        "colocate: one set of devices takes turns; samples have the newest weights",
        look,
        anchor="start",
    )
    row(
        40,
        "all GPUs",
        [
            (0, 150, "sample batch 1", "green"),
            (154, 110, "train 1", "violet"),
            (268, 40, "pub", "amber"),
            (312, 150, "sample batch 2", "green"),
            (466, 110, "train 2", "violet"),
            (580, 40, "pub", "amber"),
            (624, 110, "sample 3 ...", "green"),
        ],
    )
    d.text(
        10,
        124,
        "hybrid: two sets of devices; max_staleness = 1 samples batch n + 1 while n trains",
        look,
        anchor="start",
    )
    row(
        140,
        "rollout GPUs",
        [
            (0, 150, "sample 1 (v0)", "green"),
            (154, 150, "sample 2 (v0)", "green"),
            (312, 150, "sample 3 (v1)", "green"),
            (470, 150, "sample 4 (v2)", "green"),
            (628, 106, "...", "green"),
        ],
    )
    row(
        182,
        "train GPUs",
        [
            (154, 110, "train 1", "violet"),
            (312, 110, "train 2", "violet"),
            (470, 110, "train 3", "violet"),
            (628, 106, "train 4", "violet"),
        ],
    )
    for x, version in ((264, "v1"), (422, "v2"), (580, "v3")):
        d.arrow((left + x, 199), (left + x + 24, 199), (left + x + 24, 174))
        d.text(left + x + 16, 213, version, "font-size='11.5'")
    d.text(
        10,
        262,
        "async: scorers have devices, too; answers continue while weights change",
        look,
        anchor="start",
    )
    row(
        278,
        "rollout GPUs",
        [
            (
                0,
                734,
                "groups of batches n to n + K in flight; each token carries its weight version",
                "green",
            )
        ],
    )
    for x in (260, 374, 488, 602):  # behind the scorers
        d.arrow((left + x + 2, 362), (left + x + 2, 313), dashed=True)
    row(
        320,
        "scorer GPUs",
        [(90, 644, "reference and teacher log-probs of each group as it is finished", "blue")],
    )
    row(
        362,
        "train GPUs",
        [
            (150, 110, "train 1", "violet"),
            (264, 110, "train 2", "violet"),
            (378, 110, "train 3", "violet"),
            (492, 110, "train 4", "violet"),
            (606, 128, "train 5", "violet"),
        ],
    )
    d.text(
        left,
        424,
        "dashed: weights are published while both sides keep working. A group that could become",
        anchor="start",
    )
    d.text(
        left,
        442,
        "more than max_staleness = K versions old is not admitted, so no trained sample is.",
        anchor="start",
    )
    d.text(left, 476, "time", anchor="start")
    d.arrow((left + 34, 472), (left + 734, 472))
    return d


def layouts() -> Drawing:
    d = Drawing(900, 420, "One allocation string, two views of the same ranks")
    look = "font-size='14' font-weight='600'"
    d.text(10, 24, "archon:d2p2t2e4, eight ranks: rank = p * 4 + d * 2 + t", look, anchor="start")
    d.text(
        10,
        50,
        "attention, embeddings, norms: tensor parallel pairs, parameters sharded over d (FSDP2)",
        anchor="start",
    )
    for stage in range(2):
        x0 = 10 + stage * 445
        d.frame(
            x0, 62, 430, 130, f"pipeline stage {stage}: layers {'0-13' if stage == 0 else '14-27'}"
        )
        for rank in range(4):
            data, tensor = divmod(rank, 2)
            d.box(
                x0 + 14 + rank * 103,
                92,
                94,
                86,
                f"rank {stage * 4 + rank}\nd{data}: half the rows\nt{tensor}: half the heads",
                "blue" if data == 0 else "violet",
            )
    d.arrow((440, 135), (455, 135))
    d.text(
        10,
        226,
        "experts: the same four ranks of a stage are one expert-parallel group (e folds d * t)",
        anchor="start",
    )
    for stage in range(2):
        x0 = 10 + stage * 445
        d.frame(x0, 238, 430, 116, f"pipeline stage {stage}")
        for rank in range(4):
            first = rank * 32
            d.box(
                x0 + 14 + rank * 103,
                268,
                94,
                72,
                f"rank {stage * 4 + rank}\nexperts\n{first}-{first + 31}",
                "amber",
            )
    d.text(
        10,
        384,
        "Tokens travel to their experts and back within a stage (all-to-all). In checkpoints every",
        anchor="start",
    )
    d.text(
        10,
        402,
        "weight is one whole tensor, so any layout loads what any other layout saved.",
        anchor="start",
    )
    return d


def checkpoint() -> Drawing:
    d = Drawing(900, 400, "How a recovery checkpoint is committed")
    columns = (
        ("learner ranks", 90, "violet"),
        ("writer processes", 290, "grey"),
        ("disk", 500, "amber"),
        ("scheduler", 700, "blue"),
    )
    for name, x, kind in columns:
        d.box(x - 75, 10, 150, 36, name, kind)
        d.parts.append(
            f"<line x1='{x}' y1='46' x2='{x}' y2='346' stroke='{GREY}' stroke-dasharray='3 5'/>"
        )
    steps = (
        (76, 90, 290, "1 copy state to host memory"),
        (112, 290, 500, "2 pieces with SHA-256, fsync"),
        (152, 290, 90, "3 sizes, digests"),
        (184, 90, 700, "4 all ranks answered"),
        (224, 700, 500, "5 small files, manifest, fsync"),
        (264, 700, 500, "6 COMMIT: fsync, rename, fsync"),
    )
    for y, start, end, label in steps:
        d.arrow((start, y), (end, y), label=label, at=((start + end) // 2, y - 6))
    d.box(516, 280, 368, 30, "the checkpoint exists from here on", "green")
    d.arrow((700, 336), (500, 336), label="7 remove older ones, COMMIT first", at=(604, 330))
    d.box(12, 86, 156, 30, "training continues", "green")
    d.text(
        300,
        366,
        "A kill before 6 leaves the previous checkpoint; the next start removes the rest.",
        anchor="middle",
    )
    d.text(
        300,
        384,
        "With checkpoint.remote_uri a further process then copies it to S3, COMMIT last.",
        anchor="middle",
    )
    return d


def recovery() -> Drawing:
    d = Drawing(900, 420, "What is restarted after a failure")
    d.box(10, 170, 120, 60, "Failure\ndetected", "rose")
    rows = (
        (14, "reward worker", "new worker\nthe job is tried again", "0.5 s"),
        (
            78,
            "sampler or server",
            "restart of that process\nnewest weights, same seeds; others continue",
            "6.8 s",
        ),
        (142, "scorer", "restart of that process\nits groups are scored again", "9.6 s"),
        (
            206,
            "learner rank",
            "restart of all learner ranks\nfrom the newest checkpoint; samplers stay up",
            "18.5 s",
        ),
        (
            270,
            "rank lost for good",
            "fewer ranks (elastic.enabled)\nthe checkpoint is resharded",
            "",
        ),
        (
            334,
            "whole run (kill -9)",
            "same command again\nresumes from the newest verified checkpoint",
            "",
        ),
    )
    for y, what, then, seconds in rows:
        d.box(210, y, 170, 50, what, "blue")
        d.box(440, y, 330, 50, then, "green")
        d.arrow((130, 200), (170, 200), (170, y + 25), (210, y + 25))
        d.arrow((380, y + 25), (440, y + 25))
        if seconds:
            d.text(790, y + 30, seconds, "font-size='13' font-weight='600'", anchor="start")
    d.text(
        10,
        408,
        "Seconds: median until it works again, small CPU runs (python benchmarks/kills.py)."
        " recover.retries and rollout.restarts bound restarts.",
        anchor="start",
    )
    return d


DRAWINGS = (architecture, modes, layouts, checkpoint, recovery)


def main() -> None:
    for draw in DRAWINGS:
        (FOLDER / f"diagram-{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
