"""What ranks run in the tests of whole runs."""

import json
import socket
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.core.errors import RunError
from pentad.data.tokenizer import load_tokenizer
from pentad.engine.engine import Engine, build_engine
from pentad.engine.held import HeldModel
from pentad.models.families import dims_of
from pentad.parallel.cuts import local
from pentad.planner.prepare import prepare
from pentad.trainer.inputs import RowReader, open_examples
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.rank import learners
from pentad.trainer.rank.example_service import PretrainService, SftService
from pentad.trainer.rank.preference_service import PreferenceService, RewardModelService
from pentad.trainer.rank.service import LearnerService
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


def run_ranks(command, task, root, trial, overrides, service=None):
    """A run over the ranks of its layout. `service`: that of every rank, if not the usual one."""
    config, notes = config_of(task, root, command, trial, *overrides)
    check, usual = RUNS[command]
    return run_over_ranks(check, service or usual, config, notes, False, "cpu")


def data_seen(task, root, overrides):
    """The ids of the rows of every step, as the config says."""
    config, _ = config_of(task, root, "pretrain", "seen", *overrides)
    path = config.actor.path
    reader = RowReader(dims_of(path), load_tokenizer(path))
    data = open_examples("pretrain", config, "train", reader)
    size, steps = config.train_dataset.batch_size, config.total_train_steps
    return [[row.ids.tolist() for row in data.batch(step, size)] for step in range(steps)]


def noted_by(records, world):
    """What the services of all ranks noted."""
    return [json.loads((records / f"noted-{rank}.json").read_text()) for rank in range(world)]


class NotingService(PretrainService):
    """The service of one rank, in a process of its own; what it notes is written at its end."""

    def __init__(self, config, rank, device):
        super().__init__(config, rank, device)
        self.noted = []

    def close(self, *, is_failed):
        super().close(is_failed=is_failed)
        place = self.config.run_path / f"noted-{self.rank.rank}.json"
        place.write_text(json.dumps(self.noted))


class RowsNoted(NotingService):
    """Notes the rows of every step; its rank takes itself for a machine of its own."""

    def __init__(self, config, rank, device):
        super().__init__(config, rank, device)
        plain = Engine.accumulate

        def accumulate(engine, rows, loss, *, last=True):
            self.noted.append([row.ids.tolist() for row in rows])
            return plain(engine, rows, loss, last=last)

        Engine.accumulate = accumulate
        socket.gethostname = lambda: f"host-{rank.rank}"


class BitFlipped(PretrainService):
    """After step 2 one bit of a norm is another on rank 1."""

    def __init__(self, config, rank, device):
        super().__init__(config, rank, device)
        plain = Engine.end_step

        def end_step(engine):
            result = plain(engine)
            if rank.rank == 1 and engine.num_steps == 2:
                masters = engine.masters.items()
                weight = local(next(t for n, t in masters if n.endswith("norm.weight")))
                weight.detach().view(torch.int32).flatten()[0] ^= 1
            return result

        Engine.end_step = end_step


class Poisoned(NotingService):
    """After step 3 rank 1 holds a weight with which its gradients are not finite. Notes which steps
    moved its weights."""

    def __init__(self, config, rank, device):
        super().__init__(config, rank, device)
        end_step, gradients = Engine.end_step, HeldModel.gradients
        value = 2.0**-20

        def first(held):
            return local(next(iter(held.parameters.values()))).detach().view(-1)

        def end(engine):
            before = first(engine.held).clone()
            result = end_step(engine)
            self.noted.append(not torch.equal(before, first(engine.held)))
            if rank.rank == 1 and engine.num_steps == 3:
                first(engine.held)[0] = value
            return result

        def spoiled(held):
            found = gradients(held)
            if first(held)[0] == value:
                next(iter(found.values())).fill_(float("nan"))
            return found

        Engine.end_step, HeldModel.gradients = end, spoiled


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
