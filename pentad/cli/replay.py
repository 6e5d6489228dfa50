"""`pentad replay`: trains a recorded step again and compares its numbers with the record."""

from __future__ import annotations

from pathlib import Path

from pentad.trainer.sources.replay import Replay, ReplayedNumber, run_replay


def run_replay_command(
    run: str, step: int, *, layout: str | None, device: str, dump: str | None
) -> int:
    """Returns 0 if the numbers equal those of the record, 1 otherwise."""
    found = run_replay(Path(run).expanduser(), step, layout=layout, device=device, dump=dump or "")
    print("\n".join(report(found, step)))
    if dump:
        print(f"log-probs of step {step}: {dump}")
    return 0 if found.is_good else 1


def report(found: Replay, step: int) -> list[str]:
    first = found.compared[0].step
    trained = f"step {step} was" if first == step else f"steps {first} to {step} were"
    lines = [
        f"from {found.begin}, {trained} trained again",
        "",
        f"{'step':>6}  {'number':<16}  {'record':>24}  {'replay':>24}  ",
    ]
    lines += [_line(one) for one in found.compared]
    lines.append("")
    if found.differences:
        rule = "sums are computed in another order: numbers may differ in their last digits"
        lines.append(f"{'; '.join(found.differences)}: {rule}")
    num_off = sum(not one.is_within for one in found.compared)
    if num_off:
        lines.append(f"{num_off} of {len(found.compared)} numbers differ from the record")
    else:
        how = "equal to" if all(one.is_equal for one in found.compared) else "close to"
        lines.append(f"all {len(found.compared)} numbers are {how} the record")
    return lines


def _line(one: ReplayedNumber) -> str:
    said = "equal"
    if not one.is_equal:
        word = "within" if one.is_within else "beyond"
        said = f"differs by {one.difference:.2g}, {word} {one.tolerance:.2g}"
    return f"{one.step:>6}  {one.name:<16}  {one.record!r:>24}  {one.replay!r:>24}  {said}"
