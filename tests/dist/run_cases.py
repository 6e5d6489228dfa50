"""What ranks run in the tests of whole runs: within the pool, and as processes of their own."""

import socket
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.core.errors import RunError
from pentad.core.group_values import gather_values
from pentad.data.tokenizer import load_tokenizer
from pentad.engine.engine import Engine, build_engine
from pentad.engine.held import HeldModel
from pentad.models.families import dims_of
from pentad.parallel.cuts import local
from pentad.planner.prepare import prepare
from pentad.runtime import calls as runtime_calls
from pentad.runtime.calls import RankCalls, serve
from pentad.runtime.rank import Rank
from pentad.trainer.inputs import RowReader
from pentad.trainer.processes.ranks import run_over_ranks, run_rank
from pentad.trainer.processes.supervisor import RunJob
from pentad.trainer.rank import learners
from pentad.trainer.rank.example_service import PretrainService, SftService
from pentad.trainer.rank.preference_service import PreferenceService, RewardModelService
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.run import lead
from pentad.trainer.sources.examples import begin_examples
from pentad.trainer.sources.rollouts import begin_train


def settings_of(task, root, command, trial, *overrides):
    """A small run on the toy's data."""
    return [
        f"fileroot={root}",
        "user=me",
        f"trial_name={trial}",
        f"actor.path={task / 'model'}",
        "actor.init_from_scratch=true",
        "actor.optimizer.lr=1e-2",
        f"train_dataset.path={task / f'{command}.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=6",
        "reward.fn=sort_digits",
        "actor.archon.pp_schedule=1F1B",  # one stage a rank: the toy has two layers
        *overrides,
    ]


def config_of(task, root, command, trial, *overrides):
    return prepare(None, settings_of(Path(task), root, command, trial, *overrides), command)


RUNS = {
    "dpo": (partial(begin_examples, PreferenceService), PreferenceService),
    "reward-model": (partial(begin_examples, RewardModelService), RewardModelService),
    "pretrain": (partial(begin_examples, PretrainService), PretrainService),
    "sft": (partial(begin_examples, SftService), SftService),
    "train": (begin_train, LearnerService),
}


def run_here(command, task, root, trial, overrides):
    """One rank of a run, in a process of the pool."""
    config, notes = config_of(task, root, command, trial, *overrides)
    rank = Rank(dist.get_rank(), dist.get_world_size())
    check, service = RUNS[command]
    job = RunJob(lead, service, check, config, notes)
    summary = run_rank(job, rank, torch.device("cpu"), fresh=False)
    return summary and {"records": str(summary.records), "model": str(summary.model)}


def data_seen(task, root, overrides):
    """The ids of the rows of every step, as the config says."""
    config, _ = config_of(task, root, "pretrain", "seen", *overrides)
    path = config.actor.path
    data = PretrainService.open_part(
        config, "train", RowReader(dims_of(path), load_tokenizer(path))
    )
    size, steps = config.train_dataset.batch_size, config.total_train_steps
    return [[row.ids.tolist() for row in data.batch(step, size)] for step in range(steps)]


def run_noting_rows(command, task, root, trial, overrides):
    """As `run_here`, with the rows that every rank trained; they must be the same. Each rank takes
    itself for a machine of its own."""
    seen, plain, hostname = [], Engine.accumulate, socket.gethostname
    socket.gethostname = lambda: f"host-{dist.get_rank()}"

    def accumulate(engine, rows, loss, *, last=True):
        seen.append([row.ids.tolist() for row in rows])
        return plain(engine, rows, loss, last=last)

    Engine.accumulate = accumulate
    try:
        summary = run_here(command, task, root, trial, overrides)
    finally:
        Engine.accumulate, socket.gethostname = plain, hostname
    first, *others = gather_values(seen)
    assert all(other == first for other in others)
    return summary and {**summary, "seen": first}


def run_corrupted(command, task, root, trial, overrides):
    """As `run_here`; after step 2 one bit of a norm is another on rank 1."""
    plain = Engine.end_step

    def end_step(engine):
        result = plain(engine)
        if dist.get_rank() == 1 and engine.num_steps == 2:
            weight = local(next(t for n, t in engine.masters.items() if n.endswith("norm.weight")))
            weight.detach().view(torch.int32).flatten()[0] ^= 1
        return result

    Engine.end_step = end_step
    try:
        return run_here(command, task, root, trial, overrides)
    finally:
        Engine.end_step = plain


def run_poisoned(command, task, root, trial, overrides):
    """As `run_here`; after step 3 rank 1 holds a weight with which its gradients are not finite.
    What every rank has: which steps moved its weights, and whether it went back."""
    end_step, gradients, moved = Engine.end_step, HeldModel.gradients, []
    value = 2.0**-20

    def first(held):
        return local(next(iter(held.parameters.values()))).detach().view(-1)

    def end(engine):
        before = first(engine.held).clone()
        result = end_step(engine)
        moved.append(not torch.equal(before, first(engine.held)))
        if dist.get_rank() == 1 and engine.num_steps == 3:
            first(engine.held)[0] = value
        return result

    def spoiled(held):
        found = gradients(held)
        if first(held)[0] == value:
            next(iter(found.values())).fill_(float("nan"))
        return found

    Engine.end_step, HeldModel.gradients = end, spoiled
    try:
        summary = run_here(command, task, root, trial, overrides)
    finally:
        Engine.end_step, HeldModel.gradients = end_step, gradients
    everyone = gather_values(moved)
    return summary and {**summary, "moved": everyone}


# What calls promise, with a service on every rank.


class Noting:
    """Notes the calls that were made of it."""

    mild = frozenset({"refuse"})

    def __init__(self):
        self.rank = Rank(dist.get_rank(), dist.get_world_size())
        self.seen = []

    def note(self, **values):
        self.seen.append(values)
        return [self.rank.rank, len(self.seen)]

    def everyone(self):
        """What all ranks noted."""
        return gather_values(self.seen)

    def refuse(self):
        self.seen.append("refused")
        raise RunError(f"refused by rank {self.rank.rank}")

    def nap(self):
        if self.rank.rank > 0:
            time.sleep(8)

    def close(self, *, is_failed):
        self.seen.append("closed")


def called(case):
    """Makes calls on all ranks from rank 0; the others serve."""
    service = Noting()
    if service.rank.rank > 0:
        return serve(service)
    with RankCalls(service) as calls:
        found = CASES[case](calls)
    assert service.seen[-1] == "closed"
    return found


def same_order(calls):
    """Calls of two threads come to all ranks in one order, with their values."""
    threads = [
        threading.Thread(target=lambda n=n: [calls.call_all("note", by=n, at=i) for i in range(20)])
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = calls.call_all("everyone")
    return first == second, len(first), calls.call_all("note", text="ä", none=None, x=0.1)


def ask_one(calls):
    """A question is rank 0's alone."""
    calls.query("note", a=1)
    return calls.call_all("everyone")


def refused(calls):
    """A mild failure is reported, and the next call is made; another one is the end."""
    try:
        calls.call_all("refuse")
    except RunError as error:
        said = str(error)
    return said, calls.call_all("everyone"), calls.is_broken


def hang(calls):
    """A rank that takes no more calls: rank 0 does not wait for ever."""
    calls.call_all("nap")
    try:
        calls.call_all("note")
    except RuntimeError as error:
        return "imed out" in str(error), calls.is_broken
    return "it waited"


def hang_soon():
    """`hang`, with a limit of seconds."""
    limit, runtime_calls.ANSWER = runtime_calls.ANSWER, timedelta(seconds=3)
    try:
        return called("hang")
    except RunError as error:  # the other rank, awake again
        return str(error)
    finally:
        runtime_calls.ANSWER = limit


CASES = {f.__name__: f for f in (same_order, ask_one, refused, hang)}


# Ranks that fail.


def bad_build(*args, harm, **kwargs):
    rank, failure = harm
    engine = build_engine(*args, **kwargs)
    end_step = engine.end_step

    def end():
        if engine.num_steps == 1 and dist.get_rank() == rank:
            raise {"give_up": RunError("out of memory in backward"), "stumble": KeyError("x")}[
                failure
            ]
        return end_step()

    engine.end_step = end
    return engine


class Harmed:
    """The service of a run, with an engine that fails on one rank."""

    def __init__(self, config, rank, device):
        harm, what = config.experiment_name.split("-")
        learners.build_engine = partial(bad_build, harm=(int(harm), what))
        super().__init__(config, rank, device)


class HarmedSft(Harmed, SftService):
    pass


class HarmedTrain(Harmed, LearnerService):
    pass


def run_harmed(command, rank, failure, task, root):
    """Starts a run of which one rank fails."""
    layout = "archon:d2" if command == "sft" else "embedded:d1|archon:d2"
    config, notes = config_of(
        task,
        root,
        command,
        "run",
        *(f"experiment_name={rank}-{failure}", f"allocation_mode={layout}", "recover.retries=0"),
    )
    check, _ = RUNS[command]
    harmed = {"sft": HarmedSft, "train": HarmedTrain}[command]
    return run_over_ranks(check, harmed, config, notes, False, "cpu")
