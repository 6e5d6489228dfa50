"""`pentad slots`: shows, drops and adds slots of an elastic run."""

from __future__ import annotations

from pathlib import Path

from pentad.core.errors import Problem, raise_problems
from pentad.runtime.slots import Slots


def run_slots(folder: str, drop: list[int], join: list[int]) -> None:
    slots = Slots(Path(folder).expanduser() / "slots")
    now = slots.now()
    problems = [
        Problem(f"{word} {slot}", f"the run has slots 0 to {now.count - 1}", "give one of them")
        for word, given in (("--drop", drop), ("--join", join))
        for slot in given
        if not 0 <= slot < now.count
    ]
    problems += [
        Problem(f"--drop {slot}", "is given to --join, too", "give one of the two")
        for slot in set(drop) & set(join)
    ]
    raise_problems(problems)
    for slot in drop:
        slots.drop(slot, "dropped by pentad slots")
    for slot in join:
        slots.join(slot)
    away = slots.away()
    print(f"generation {now.generation}: {now.layout} on {len(now.used)} of {now.count} slots")
    for slot in range(now.count):
        used = f"rank {now.used.index(slot)}" if slot in now.used else "idle"
        state = f"away: {away[slot]}" if slot in away else used
        if slot in away and slot in now.used:
            state += " (the run continues without it)"
        print(f"  slot {slot}: {state}")
