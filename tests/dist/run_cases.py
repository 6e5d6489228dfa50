"""What ranks run in the tests of whole runs: within the pool, and as processes of their own."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from engine_toys import CONFIG, PolicyLoss, make_rows

from pentad.planner.prepare import prepare
from pentad.core.errors import RunError
from pentad.core.layout import Layout
from pentad.engine.engine import build_engine
from pentad.core.settings import EngineSettings, OptimizerSettings
from pentad.runtime import lead as runtime_lead
from pentad.runtime.lead import Lead, follow
from pentad.runtime.rank import Rank
from pentad.trainer import assemble, learners, sft
from pentad.trainer.ranks import run_over_ranks, run_rank

CPU = torch.device("cpu")


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


RUNS = {"sft": sft.lead_sft, "train": assemble.lead_train}


def run_here(command, task, root, trial, overrides):
    """One rank of a run, in a process of the pool."""
    config, notes = config_of(task, root, command, trial, *overrides)
    run = RUNS[command]
    payload = {
        "run": f"{run.__module__}:{run.__qualname__}",
        "config": config.model_dump(mode="json"),
        "notes": notes,
        "fresh": False,
        "device": "cpu",
    }
    return run_rank(Rank(dist.get_rank(), dist.get_world_size()), payload)


# What a lead promises, on real engines.


def led(deed):
    """Does something with a learner over all ranks, on rank 0; the others follow."""
    rank = Rank(dist.get_rank(), dist.get_world_size())
    if rank.rank > 0:
        return follow(rank, CPU)
    with Lead(rank, CPU) as lead:
        return DEEDS[deed](lead)


def make(lead, name="actor", seed=3):
    return lead.build(
        name,
        build_engine,
        CONFIG,
        EngineSettings(optimizer=OptimizerSettings(lr=1e-2)),
        layout=Layout(dp_shard=lead.rank.world),
        init_from_scratch=True,
        seed=seed,
    )


def step(learner):
    learner.begin_step()
    learner.accumulate(make_rows(), PolicyLoss())
    return learner.end_step()


def stop_reading(lead):
    """Readers of weights that leave early, or never begin, do not put ranks out of step."""
    learner = make(lead)
    reader = learner.iter_weights()
    first, _ = next(reader)
    reader.close()
    learner.iter_weights()
    names = [name for name, _ in learner.iter_weights()]
    return first == names[0], len(names), step(learner).grad_norm


def use_tags(lead):
    learner = make(lead)
    rows = make_rows()
    start = learner.forward(rows)
    learner.save_tag("ref")
    step(learner)
    tagged, after = learner.forward(rows, "ref"), learner.forward(rows)
    same = [torch.equal(a["logprobs"], b["logprobs"]) for a, b in zip(start, tagged, strict=True)]
    return all(same), torch.equal(start[0]["logprobs"], after[0]["logprobs"])


def keep_two(lead):
    """Two learners by name: a step of one leaves the other as it was."""
    first, second = make(lead), make(lead, "critic", seed=4)
    before = dict(second.iter_weights())
    step(first)
    after = dict(second.iter_weights())
    return all(torch.equal(before[name], after[name]) for name in before), len(before)


def call_within(lead):
    learner = make(lead)
    reader = learner.iter_weights()
    next(reader)
    try:
        learner.begin_step()
    except RunError as error:
        message = str(error)
    reader.close()
    return message, learner.everywhere(partial(count_steps, more=5))


def hang(lead):
    """A follower that takes no more calls: rank 0 does not wait for ever."""
    learner = make(lead)
    learner.everywhere(fall_asleep)
    try:
        learner.begin_step()
    except RuntimeError as error:
        return "imed out" in str(error), lead.is_torn
    return "it waited"


def fall_asleep(learner):
    if dist.get_rank() > 0:
        time.sleep(3)


def hang_soon():
    """`hang`, with a limit of a second."""
    limit, runtime_lead.ANSWER = runtime_lead.ANSWER, timedelta(seconds=1)
    try:
        return led("hang")
    except RunError as error:  # the follower, awake again
        return str(error)
    finally:
        runtime_lead.ANSWER = limit


def count_steps(learner, more):
    return learner.num_steps + more


DEEDS = {f.__name__: f for f in (stop_reading, use_tags, keep_two, call_within, hang)}


# Ranks that fail.


def bad_build(*args, harm, make, **kwargs):
    rank, deed = harm
    engine = make(*args, **kwargs)
    end_step = engine.end_step

    def end():
        if engine.num_steps == 1 and dist.get_rank() == rank:
            raise {"give_up": RunError("out of memory in backward"), "stumble": KeyError("x")}[deed]
        return end_step()

    engine.end_step = end
    return engine


def harmed(lead, config, notes, fresh, *, command):
    rank, deed = config.experiment_name.split("-")
    harm = (int(rank), deed)
    sft.build_engine = partial(bad_build, harm=harm, make=build_engine)
    assemble.build_learner = partial(bad_build, harm=harm, make=learners.build_learner)
    return RUNS[command](lead, config, notes, fresh)


def harmed_sft(*args):
    return harmed(*args, command="sft")


def harmed_train(*args):
    return harmed(*args, command="train")


def run_harmed(command, rank, deed, task, root):
    """Starts a run of which one rank fails."""
    layout = "archon:d2" if command == "sft" else "embedded:d1|archon:d2"
    config, notes = config_of(
        task,
        root,
        command,
        "run",
        *(f"experiment_name={rank}-{deed}", f"allocation_mode={layout}", "recover.retries=0"),
    )
    run, begin = {
        "sft": (harmed_sft, sft.begin_sft),
        "train": (harmed_train, assemble.begin_train),
    }[command]
    return run_over_ranks(run, begin, config, notes, False, "cpu")
