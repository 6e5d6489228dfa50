"""Runs scenarios in sequence and compares each with the same run without faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pentad_tools.chaos.broken_run import Broken, ChaosRun
from pentad_tools.chaos.invariants import ALWAYS, CHECKS
from pentad_tools.chaos.scenarios import SCENARIOS, Scenario
from pentad_tools.chaos.workloads import Workload, WorkloadKind


@dataclass(frozen=True, slots=True)
class Result:
    scenario: Scenario
    done: str
    seconds: float
    recovery_s: float | None
    held: tuple[str, ...]
    """The invariants that hold."""
    broken: str = ""
    """Message on the violated invariant; empty if all hold."""


@dataclass(slots=True)
class Suite:
    workloads: dict[WorkloadKind, Workload]
    folder: Path
    seed: int
    whole: dict[str, ChaosRun] = field(default_factory=dict)
    """Workload -> run without a fault."""

    def run(self, scenario: Scenario, number: int = 0) -> Result:
        """Runs a scenario; repetitions with other `number`s choose other ranks and steps."""
        workload = self.workloads[scenario.kind]
        name = f"{scenario.name}-{number}" if number else scenario.name
        draw = random.Random(f"{self.seed} {scenario.name} {number}")
        trial = ChaosRun(workload, self.folder, name, draw, restarts=scenario.restarts)
        held: list[str] = []
        begun = time.monotonic()
        try:
            scenario.act(trial)
            promised = ["equal"] * scenario.is_equal + ["near"] * scenario.is_near
            compared = self.reference(workload) if promised else None
            for check in (*ALWAYS, *promised):
                CHECKS[check](trial, compared)
                held.append(check)
        except Broken as error:
            broken = str(error)
        else:
            broken = ""
        finally:
            trial.close()
        seconds = time.monotonic() - begun
        return Result(scenario, trial.done, seconds, trial.recovery_s, tuple(held), broken)

    def reference(self, workload: Workload) -> ChaosRun:
        """The reference run without faults; run once per workload."""
        if workload.name not in self.whole:
            name = f"whole-{len(self.whole)}"
            trial = ChaosRun(workload, self.folder, name, random.Random(0))
            try:
                trial.start()
                trial.wait_end()
                for check in ALWAYS:
                    CHECKS[check](trial, None)
            finally:
                trial.close()
            self.whole[workload.name] = trial
        return self.whole[workload.name]


def fitting(workloads: dict[WorkloadKind, Workload], names: Sequence[str] = ()) -> list[Scenario]:
    """The scenarios that these workloads support, filtered by `names`."""
    found = [one for one in SCENARIOS if one.kind in workloads]
    return [one for one in found if not names or one.name in names]


def soak(suite: Suite, num_faults: int, report: Callable[[Result], None]) -> list[Result]:
    """Runs `num_faults` random recoverable faults, chosen by the seed."""
    draw = random.Random(f"{suite.seed} soak")
    known = [one for one in fitting(suite.workloads) if one.is_soaked]
    results = []
    for number in range(1, num_faults + 1):
        results.append(suite.run(draw.choice(known), number))
        report(results[-1])
    return results
