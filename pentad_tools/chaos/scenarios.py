"""Fault scenarios by name: the injected faults and the expected invariants of each."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pentad.checkpoint.folders import list_steps
from pentad.runtime.slots import Slots
from pentad_tools.chaos.broken_run import ChaosRun, Restart, require
from pentad_tools.chaos.invariants import check_groups, newest_state
from pentad_tools.chaos.workloads import WorkloadKind

Act = Callable[[ChaosRun], None]
RECOVERED = "recovered"
STOPPED = "stopped, cause named"
CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    act: Act
    """Breaks the run and waits for its end; describes the fault in `ChaosRun.done`."""
    outcome: str
    kind: WorkloadKind = "ranks"
    is_equal: bool = True
    """Whether the result must be bitwise equal to the run without a fault."""
    is_near: bool = False
    """Whether losses must be equal up to rounding, because the number of ranks changes."""
    restarts: frozenset[Restart] = frozenset()
    """The only components that may be restarted within a start of the run."""
    is_soaked: bool = False
    """Whether `--soak` may choose this fault."""


# Lost ranks


def kill_rank(trial: ChaosRun, at: str, rank: int | None = None) -> None:
    rank, step = trial.some_rank() if rank is None else rank, trial.some_step()
    trial.done = f"SIGKILL of rank {rank} in {at}, step {step}"
    fault = trial.fault(at, "kill", rank=rank, step=step)
    trial.start_until(fault)
    trial.wait_end()
    says(trial, f"rank {rank} of {trial.workload.world}, ", "signal 9 (SIGKILL)")
    says(trial, f"it is started again after step {step - 1}")


def kill_two(trial: ChaosRun) -> None:
    one, step = trial.some_rank(), trial.some_step()
    other = trial.some_rank(but=one)
    trial.done = f"SIGKILL of ranks {one} and {other} in backward, step {step}"
    faults = [trial.fault("backward", "kill", rank=rank, step=step) for rank in (one, other)]
    trial.start_until(*faults)
    trial.wait_end()
    says(trial, f"it is started again after step {step - 1}")


def kill_in_recovery(trial: ChaosRun) -> None:
    one, other, step = trial.some_rank(), trial.some_rank(), trial.some_step()
    trial.done = f"SIGKILL of rank {one} in step {step}, then of rank {other} as it loads"
    first = trial.fault("forward", "kill", rank=one, step=step)
    second = trial.fault("load", "kill", rank=other)
    trial.start_until(first, second)
    trial.wait_end()
    says(trial, "(try 2 of recover.retries = 3 without a new step)")


def stop_rank(trial: ChaosRun) -> None:
    rank, step = trial.some_rank(), trial.some_step()
    trial.done = f"SIGSTOP of rank {rank} in forward, step {step}"
    fault = trial.fault("forward", "stop", rank=rank, step=step)
    trial.start_until(fault, words=["stall_abort_s=10"])
    trial.wait_end()
    says(trial, f"rank {rank} of {trial.workload.world}, ", "does not run (it is stopped)")
    other = trial.some_rank(but=rank)
    stack = (trial.records / "ranks" / f"rank-{other}.log").read_text(errors="replace")
    require("most recent call first" in stack, f"rank {other} wrote no stack")


def slow_rank(trial: ChaosRun) -> None:
    rank = trial.some_rank()
    trial.done = f"rank {rank} sleeps 1.5 s in every forward"
    fault = trial.fault("forward", "sleep", rank=rank, times=0, seconds=1.5)
    trial.start_until(fault)
    trial.struck_at = None
    trial.wait_end()
    says(trial, f"straggler: rank {rank} of {trial.workload.world}, ")
    named = {line["infra"]["straggler"] for line in trial.lines} - {None}
    require(named == {rank}, f"records name {named} as straggler")
    require(len(starts(trial)) == 1, "a slow rank was taken for a dead one")


def starts(trial: ChaosRun) -> list[str]:
    """The start (generation) that trained each step."""
    return sorted({str(line["generation"]) for line in trial.lines})


def shrink(trial: ChaosRun, *, grows: bool) -> None:
    slot, slots = trial.some_rank(), Slots(trial.records / "slots")
    first, second = (trial.fault("forward", "hold", step=step) for step in (2, 4))
    trial.done = f"the place of rank {slot} is gone in step 2"
    words = ["elastic.enabled=true", "elastic.standbys=false", "elastic.drop_grace_s=0"]
    trial.start(*((first, second) if grows else (first,)), words=words)
    trial.wait_fault(first)
    samplers = trial.roles("rollout")
    slots.drop(slot, "its device is gone")
    trial.release(first)
    if grows:
        trial.done += ", and back in step 4"
        trial.wait_steps(3)
        trial.look()
        took = trial.recovery_s
        trial.wait_fault(second)
        require(trial.roles("rollout") == samplers, "a sampler was started again")
        slots.join(slot)
        trial.release(second)
        trial.recovery_s = took
    trial.wait_end()
    says(trial, f"elastic: slot {slot} is lost", f"has {trial.workload.world - 1} ranks")
    if grows:
        says(trial, "ranks have returned, the group is re-formed after step")


# Exceptions in code


def poison(trial: ChaosRun) -> None:
    step = trial.some_step()
    trial.done = f"an exception in forward of step {step}, every time"
    fault = trial.fault("forward", "raise", step=step, times=0)
    trial.start_until(fault)
    trial.wait_end(1)
    trial.struck_at = None
    says(trial, "requested a failure in forward", "it is not started again")
    require(len(trial.lines) == step - 1, f"{len(trial.lines)} steps, not {step - 1}")


def crash_loop(trial: ChaosRun) -> None:
    rank, step = trial.some_rank(), trial.some_step()
    trial.done = f"SIGKILL of rank {rank} in forward of step {step}, every time"
    fault = trial.fault("forward", "kill", rank=rank, step=step, times=0)
    trial.start_until(fault, words=["recover.retries=9"])
    trial.wait_end(1)
    trial.struck_at = None
    says(trial, f"rank {rank} of {trial.workload.world}, ", "SIGKILL")
    says(trial, f"step {step} failed 3 times in a row, so its data or computation")
    require(len(trial.lines) == step - 1, f"{len(trial.lines)} steps, not {step - 1}")


def no_number(trial: ChaosRun) -> None:
    rank, step = trial.some_rank(), trial.some_step()
    trial.done = f"no number in the gradient of rank {rank}, step {step}"
    fault = trial.fault("all-reduce", "nan", rank=rank, step=step)
    trial.start_until(fault)
    trial.struck_at = None
    trial.wait_end()
    says(trial, f"step {step}: nothing was updated")
    after = [line for line in trial.lines if line["step"] > step]
    finite = [abs(line["loss"]) < 1e6 and line["grad_norm"] > 0 for line in after]
    require(after and all(finite), "the step after it has no finite loss")


# Scheduler killed, stopped, or started twice


def preempt(trial: ChaosRun) -> None:
    rank, step = trial.some_rank(), trial.some_step()
    trial.done = f"SIGTERM of the run in backward, step {step}"
    fault = trial.fault("backward", "hold", rank=rank, step=step)
    rare = ["recover.freq_steps=1000"]
    trial.start_until(fault, words=rare)
    trial.kill([trial.pid], signal.SIGTERM)
    trial.release(fault)
    trial.wait_end(1)
    says(trial, f"stopped by SIGTERM after {step} of {trial.workload.steps} steps")
    says(trial, f"started again, the run resumes after step {step}")
    marker = json.loads((trial.records / "exit.json").read_text())
    found = marker["end"], marker["saved_step"]
    require(found == ("stopped", step), f"exit.json says {found}, not stopped after {step}")
    trial.struck_at, trial.recovery_s = None, None
    trial.start(words=rare)
    trial.wait_end()
    says(trial, f"resumed after step {step} from")


def kill_run(trial: ChaosRun, at: str, where: str) -> None:
    """Kills the scheduler with SIGKILL while a fault pauses it or its ranks."""
    step = trial.some_step()
    trial.done = f"SIGKILL of {where} step {step}"
    fault = trial.fault(at, "hold", step=step)
    trial.start_until(fault)
    again(trial)
    says(trial, f"resumed after step {step - 1} from")


def kill_scheduler(trial: ChaosRun, at: str = "optimizer") -> None:
    kill_run(trial, at, f"the scheduler while ranks are in {at},")


def again(trial: ChaosRun) -> None:
    """Kills the run, waits until its processes have ended, and starts the command again."""
    trial.kill_run()
    trial.start()
    trial.wait_end()


def two_schedulers(trial: ChaosRun) -> None:
    step = trial.some_step()
    trial.done = f"a second start of the run in step {step}"
    fault = trial.fault("forward", "hold", step=step)
    trial.start_until(fault)
    second = trial.start_beside()
    second.join()
    code = second.exitcode
    trial.release(fault)
    trial.struck_at = None
    trial.wait_end()
    require(code == 2, f"the second start ended with {code}, not 2")
    says(trial, "another program runs in it")


def stale_writer(trial: ChaosRun) -> None:
    fault = trial.fault("commit", "hold")
    beside = ["saver.mode=async"]
    # Saves are asynchronous, so the next saved step is not known: any after the first will do.
    steps = range(2, trial.workload.steps + 1)
    trial.start(*(replace(fault, step=step) for step in steps), words=beside)
    step = trial.wait_fault(fault)["step"]
    trial.done = f"SIGKILL of the scheduler while step {step} is just not committed"
    trial.kill_run()
    left = trial.checkpoints / f"recover_info/globalstep{step - 1}"
    require(not (left / "COMMIT").exists(), "a writer of a run that is gone has committed")
    trial.start(words=beside)
    trial.wait_end()
    says(trial, "resumed after step ")


def says(trial: ChaosRun, *sentences: str) -> None:
    for sentence in sentences:
        require(sentence in trial.said, f'the run does not say "{sentence}"')


# Samplers, publishing, rewards

NUM_BAD = 2
"""Number of rows whose reward fails."""


def kill_sampler(trial: ChaosRun, at: str, words: tuple[str, ...] = ()) -> None:
    version = trial.draw.randint(1, trial.workload.steps - 2)
    what = {"generate": "as it samples with", "install": "between weights and receipt of"}
    trial.done = f"SIGKILL of a sampler {what[at]} version {version}"
    fault = trial.fault(at, "kill", step=version)
    trial.start_until(fault, words=words)
    trial.wait_end()
    says(trial, "is lost: ", "SIGKILL")
    note_served(trial)
    check_groups(trial, None)


def note_served(trial: ChaosRun) -> None:
    """Reads the sampler's downtime from the log; a step sampled before may end meanwhile."""
    found = re.findall(r"serves again ([0-9.]+) s after it was lost", trial.said)
    trial.recovery_s = max(map(float, found), default=None)


def kill_one_of_two(trial: ChaosRun) -> None:
    """Kills one of two samplers; the other takes its groups. Rounding differs."""
    kill_sampler(trial, "generate", ("allocation_mode=embedded:d2|archon:d2",))


def kill_samplers(trial: ChaosRun) -> None:
    version = trial.draw.randint(1, trial.workload.steps - 2)
    trial.done = f"SIGKILL of both samplers while one samples with version {version}"
    fault = trial.fault("generate", "hold", step=version)
    trial.start_until(fault, words=["allocation_mode=embedded:d2|archon:d2"])
    trial.kill(trial.roles("rollout"))
    trial.wait_end()
    says(trial, "serves again")
    note_served(trial)
    check_groups(trial, None)


def shrink_and_grow(trial: ChaosRun) -> None:
    """Removes and adds ranks. Rounding and samples may differ, prompts may not."""
    shrink(trial, grows=True)
    check_groups(trial, None)


HOW = {"hang": "hangs", "crash": "crashes"}


def fail_reward(trial: ChaosRun, how: str) -> None:
    """Makes rewards of two rows always fail; other rows replace them."""
    folder = trial.workload.folder
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in trial.draw.sample(rows[: 4 * trial.workload.steps], NUM_BAD):
        row["answer"] = "BAD"
    data = Path(f"{trial.folder / trial.name}.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trial.done = f"the reward of {NUM_BAD} rows {HOW[how]}"
    words = [f"train_dataset.path={data}", f"reward.fn={folder / 'rewards.py'}:{how}"]
    trial.start(words=[*words, "train_dataset.shuffle=false", "reward.timeout_s=2"])
    trial.wait_end()
    dropped = trial.lines[-1]["funnel"]["dropped"]
    require(sum(dropped.values()) >= NUM_BAD, f"dropped: {dropped}")
    check_groups(trial, None)


# Storage: dead writers, full or stalled disks, damaged checkpoints

BESIDE = ("saver.mode=async", "recover.freq_steps=2")
"""Keys for saves by the writer process during training; the first is after step 2."""


def fail_save(trial: ChaosRun, at: str, do: str, cause: str) -> None:
    step = 2
    what = {"kill": "SIGKILL of the writer", "full": "a full disk"}[do]
    trial.done = f"{what} in the {at} of step {step}"
    fault = trial.fault(at, do, step=step)
    trial.start_until(fault, words=BESIDE)
    trial.wait_end()
    says(trial, f"the recovery checkpoint of step {step} could not be saved: ", cause)
    require(len({line["generation"] for line in trial.lines}) == 1, "the run was started again")


def stall(trial: ChaosRun) -> None:
    trial.done = "the storage stands still in the save of step 2, until step 4 is trained"
    fault = trial.fault("write", "hold", step=2)
    trial.start_until(fault, words=BESIDE)
    trial.wait_steps(4)
    trial.struck_at = None
    trial.release(fault)
    trial.wait_end()


def kill_in_save(trial: ChaosRun, at: str) -> None:
    """Kills the training process, which also writes checkpoints, during a save."""
    kill_run(trial, at, f"the run in the {at} of")


def spoil(trial: ChaosRun, what: str, change: Callable[[ChaosRun], Path], sentence: str) -> None:
    step = max(3, trial.some_step())  # two checkpoints are committed
    trial.done = f"SIGKILL of the run in step {step}; the newest checkpoint {what}"
    fault = trial.fault("forward", "hold", step=step)
    trial.start_until(fault)
    trial.kill_run()
    change(trial)
    trial.start()
    trial.wait_end()
    says(trial, sentence, f"resumed after step {step - 2} from")


def cut(trial: ChaosRun) -> Path:
    path = newest_state(trial)
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip(trial: ChaosRun) -> Path:
    path = newest_state(trial)
    data = bytearray(path.read_bytes())
    data[trial.draw.randrange(len(data))] ^= 1
    path.write_bytes(data)
    return path


def garble(trial: ChaosRun) -> Path:
    step = list_steps(trial.checkpoints)[0]
    path = trial.checkpoints / f"recover_info/globalstep{step}/COMMIT"
    path.write_bytes(path.read_bytes()[:-5])
    return path


def lose(trial: ChaosRun) -> Path:
    step = list_steps(trial.checkpoints)[0]
    path = trial.checkpoints / f"recover_info/globalstep{step}"
    shutil.rmtree(path)
    shutil.rmtree(trial.checkpoints / f"default/recover_checkpoint/globalstep{step}")
    return path


def spoiled(name: str, what: str, change: Callable[[ChaosRun], Path], sentence: str) -> Scenario:
    act = partial(spoil, what=what, change=change, sentence=sentence)
    return Scenario(name, act, RECOVERED, "any", is_soaked=True)


RANKS: frozenset[Restart] = frozenset({"ranks"})
SAMPLERS: frozenset[Restart] = frozenset({"samplers"})

OF_RANKS = (
    *(
        Scenario(f"kill-{at}", partial(kill_rank, at=at), RECOVERED, restarts=RANKS, is_soaked=True)
        for at in ("forward", "backward", "all-reduce", "optimizer")
    ),
    Scenario("kill-rank-0", partial(kill_rank, at="backward", rank=0), RECOVERED, restarts=RANKS),
    Scenario("kill-two", kill_two, RECOVERED, restarts=RANKS, is_soaked=True),
    Scenario("kill-in-recovery", kill_in_recovery, RECOVERED, restarts=RANKS, is_soaked=True),
    Scenario("stop-rank", stop_rank, RECOVERED, restarts=RANKS),
    Scenario("slow-rank", slow_rank, CONTINUED),
    *(
        Scenario(
            name,
            partial(shrink, grows=grows),
            RECOVERED,
            is_equal=False,
            is_near=True,
            restarts=RANKS,
        )
        for name, grows in (("shrink", False), ("shrink-and-grow", True))
    ),
    Scenario("nan-gradient", no_number, CONTINUED, is_equal=False),
    Scenario("poison-batch", poison, STOPPED, is_equal=False, restarts=RANKS),
    Scenario("crash-loop", crash_loop, STOPPED, is_equal=False, restarts=RANKS),
    Scenario("sigterm", preempt, RECOVERED, is_soaked=True),
    Scenario("kill-scheduler", kill_scheduler, RECOVERED, is_soaked=True),
    Scenario("two-schedulers", two_schedulers, CONTINUED),
    Scenario("stale-writer", stale_writer, RECOVERED, is_soaked=True),
)
OF_ROLLOUT = (
    Scenario(
        "kill-sampler",
        partial(kill_sampler, at="generate"),
        RECOVERED,
        "rl",
        restarts=SAMPLERS,
        is_soaked=True,
    ),
    Scenario(
        "kill-one-of-two-samplers",
        kill_one_of_two,
        RECOVERED,
        "rl",
        is_equal=False,
        restarts=frozenset({"samplers, perhaps"}),
    ),
    Scenario(
        "kill-all-samplers", kill_samplers, RECOVERED, "rl", is_equal=False, restarts=SAMPLERS
    ),
    Scenario(
        "cut-weight-sync",
        partial(kill_sampler, at="install"),
        RECOVERED,
        "rl",
        restarts=SAMPLERS,
    ),
    Scenario(
        "kill-learner",
        partial(kill_rank, at="backward"),
        RECOVERED,
        "rl",
        restarts=RANKS,
        is_soaked=True,
    ),
    Scenario(
        "kill-scheduler-rl", partial(kill_scheduler, at="backward"), RECOVERED, "rl", is_soaked=True
    ),
    Scenario(
        "shrink-and-grow-rl", shrink_and_grow, RECOVERED, "rl", is_equal=False, restarts=RANKS
    ),
    Scenario("reward-hang", partial(fail_reward, how="hang"), CONTINUED, "rl", is_equal=False),
    Scenario("reward-crash", partial(fail_reward, how="crash"), CONTINUED, "rl", is_equal=False),
)
OF_STORAGE = (
    *(
        Scenario(name, partial(fail_save, at=at, do=do, cause=cause), CONTINUED, "any")
        for name, at, do, cause in (
            ("kill-writer", "write", "kill", "ended by signal 9"),
            ("disk-full", "write", "full", "No space left on device"),
            ("disk-full-in-commit", "commit", "full", "No space left on device"),
        )
    ),
    Scenario("storage-stall", stall, CONTINUED, "any"),
    *(
        Scenario(name, partial(kill_in_save, at=at), RECOVERED, "any", is_soaked=True)
        for name, at in (("kill-in-write", "write"), ("kill-before-commit", "commit"))
    ),
    spoiled("torn-checkpoint", "is cut short", cut, "the checkpoint is renamed to"),
    spoiled("flipped-bit", "has a flipped bit", flip, "does not have the digest"),
    spoiled("garbled-commit", "has a broken COMMIT", garble, "the checkpoint is renamed to"),
    spoiled("lost-checkpoint", "is gone", lose, "recorded since is repeated"),
)
SCENARIOS = (*OF_RANKS, *OF_STORAGE, *OF_ROLLOUT)
