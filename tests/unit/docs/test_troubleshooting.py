"""docs/troubleshooting*.md quote what is really printed: every sentence on it is provoked here."""

import asyncio
import json
import logging
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sections import engine_settings

from pentad.cli.recipe import read_recipe
from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.checkpoint import judge_changes
from pentad.core.errors import DataFailure, RunError, UserError
from pentad.core.roles import Installed
from pentad.core.types import Generation, Row
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.data.toy import write_byte_model, write_model
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig
from pentad.planner.plan import build_plan, choose_device
from pentad.planner.prepare import prepare
from pentad.rewards.functions import check_columns, read_signature
from pentad.rl.health import WINDOW, find_alarms
from pentad.rl.losses import SftLoss
from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.rank import name_rank
from pentad.runtime.report import describe_exit, describe_hang
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.telemetry.runfolder import open_run_folder
from pentad.trainer.preflight import check_train
from pentad.trainer.processes.supervisor import RunJob, Supervisor
from pentad.trainer.pumps.rollout_pump import RolloutPump
from pentad.trainer.pumps.scheduler import Watchdog, held_loop
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.run_folders import describe_progress
from pentad.trainer.sampling.selftest import FLOAT32, Prober
from pentad.trainer.stopping import StopFlag, stop_early

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join(page.read_text() for page in sorted(DOCS.glob("troubleshooting*.md")))
QUOTED = re.findall(r"^- `(.+)`$", PAGE, re.MULTILINE)
"""A bullet of the page that is one code span quotes the program."""
CLUSTER = ["actor.path=Qwen/Qwen3-30B-A3B", "cluster.n_nodes=4", "cluster.n_gpus_per_node=8"]
NOON = "2026-03-01T12:00:00+00:00"
START = "started again, the run resumes after step 3"
EXPORT = "runs/checkpoints/me/exp/trial-0/default/epoch0epochstep2globalstep2"
ZERO_BUBBLE = [
    *CLUSTER,
    "allocation_mode=sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)",
    "actor.archon.pp_schedule=ZBV",
]


def plans():
    """Refusals of `pentad plan`."""
    qwen = "actor.path=Qwen/Qwen3-8B"
    yield from planned(qwen, "gconfig.n_sample=4")
    yield from planned(qwen, "actor.kl_ctl=0.1")
    yield from planned(*CLUSTER, "allocation_mode=sglang:d4+archon:d32")
    yield planned(*CLUSTER, "allocation_mode=sglang:d4+archon:d1p2e2")[0].splitlines()[0]
    for override in (
        "actor.archon.reshard_after_forward_policy=always",
        "actor.archon.enable_compile=true",
        "actor.archon.ac_selective=op",
    ):
        yield from planned(*ZERO_BUBBLE, override)
    recipe = read_recipe(["recipe.yaml"], colocate=True, fully_async=True)
    yield from map(str, recipe.problems)


def starts():
    """Refusals of `pentad train`, in a folder with models and data."""
    yield from trained("actor.path=Qwen/Qwen3-8B")
    yield from trained("actor.init_from_scratch=false")
    yield from trained("train_dataset.prompt_key=prompt")
    yield from trained("train_dataset.max_length=3")
    short = "gconfig.max_new_tokens=16"
    yield from trained("actor.path=plain", "train_dataset.chat_template=true", short)
    yield from trained("gconfig.top_p=0.9")
    yield from trained("gconfig.n_samples=1")
    yield from trained("max_staleness=2")
    yield from trained("reward.fn=gsm")
    devices = [
        "allocation_mode=sglang:d1+archon:d2",
        "cluster.n_gpus_per_node=3",
        "cluster.allow_idle=true",
    ]
    yield from trained(*devices, "cluster.n_nodes=2")
    Path("model/config.json").write_text(json.dumps({"model_type": "gpt2"}))
    yield trained()[0]
    signature = {"required": ["completion", "label"], "optional": [], "takes_any": False}
    takes = read_signature("mine/reward.py:score", signature)
    said = refusal(lambda: check_columns("mine/reward.py:score", takes, ["question", "solution"]))
    yield said[0].partition("; every reward")[0]


def folders():
    """Refusals because of what is in the run folder."""

    def open_folder():
        path = Path("runs/logs/me/exp/trial-0")
        return open_run_folder(path, config={}, config_yaml="", config_digest="", seed=1)

    first = open_folder()
    (busy,) = refusal(open_folder)
    yield re.sub(r"process \d+ on \S+ since \S+(?=\))", f"process 4711 on host since {NOON}", busy)
    first.file("steps.jsonl").write_text('{"step": 250}\n')
    first.close()
    yield from refusal(open_folder)
    changes = judge_changes({"algorithm": {"name": "grpo"}}, {"algorithm": {"name": "rloo"}})
    yield from map(str, changes.refused)


def alarms():
    """Warnings about how the numbers of a run look."""
    good = {
        "reward_mean": 0.4,
        "reward_std": 0.3,
        "reward_max": 1.0,
        "groups_without_variance": 0.1,
        "entropy": 1.5,
        "ratio_p95": 1.0,
        "effective_sample_size": 1.0,
        "logprob_diff_mean": 0.001,
        "truncated_share": 0.1,
    }
    assert find_alarms([good] * WINDOW, good) == []
    for signs in (
        {"reward_mean": 0.0, "reward_std": 0.0},
        {"groups_without_variance": 0.95},
        {"entropy": 0.05},
        {"ratio_p95": 3.1},
        {"effective_sample_size": 0.2},
        {"logprob_diff_mean": 0.08},
        {"truncated_share": 0.8},
    ):
        (sentence,) = find_alarms([{**good, **signs}] * WINDOW, good)
        yield sentence


def failures(caplog):
    """Warnings and ends of a run under way."""
    yield stall(caplog)
    yield f"group 12 dropped: {DataFailure('reward_timeout', 'longer than 10 s')}"
    yield empty_batch()
    yield empty_batch("no_signal")
    yield f"{name_rank(3, 8, 12)}: {describe_exit(-9)}"
    yield f"{name_rank(1, 2, 3)}: {describe_hang('does not run', 3, 1812.0, is_stopped=True)}"
    yield end(lambda: StopFlag("SIGTERM").check_complete(3, 10, Path(EXPORT), next_start=START))
    yield end(stop_before_steps)
    yield crash_twice(caplog)
    yield hold_the_loop()
    yield end(lambda: asyncio.run(publish_to_a_forgetful_sampler()))
    yield end(lambda: asyncio.run(selftest(shift=-0.25, shift_alone=0.0)))
    yield end(lambda: asyncio.run(selftest(shift=0.0, shift_alone=-0.25)))
    yield end(run_out_of_memory)


def stop_before_steps():
    with stop_early(partial(describe_progress, config_here())):
        signal.raise_signal(signal.SIGTERM)


def config_here():
    return resolve(read_config(None, ["actor.path=model", "fileroot=here"]).config)[0]


def crash_twice(caplog):
    config = config_here()
    config.run_path.mkdir(parents=True)
    error = ZeroDivisionError("division by zero")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentad.trainer.processes.supervisor.newest_step", lambda config: 3)
        one = Supervisor(RunJob(None, None, None, config))
        with one.resources:
            one.note_lost(error)
            with pytest.raises(ZeroDivisionError):
                one.note_lost(error)
    return caplog.messages[-1]


def hold_the_loop():
    code = "\n" * 9 + "class Agent:\n  def run(self):\n    return sys._getframe()"
    names = {"sys": sys}
    exec(compile(code, "mine/agent.py", "exec"), names)
    return held_loop(65.2, names["Agent"]().run())


def stall(caplog):
    now = [0.0]
    ledger = Ledger(2)
    state = RunState(ledger, MemoryStore(), Budget(2, max_staleness=0, num_batches=9))
    for _ in range(2):
        ledger.start(ledger.admit(0))
    state.waiting["train"] = "groups 0 to 1 of batch 0"
    watchdog = Watchdog(state, warn_s=60, abort_s=1800, clock=lambda: now[0])
    watchdog.look()
    now[0] = 60.0
    with caplog.at_level(logging.WARNING):
        watchdog.look()
    return caplog.messages[-1]


def empty_batch(rejection=None):
    """A pump whose every group fails in its reward, or is turned down."""

    async def rollout(prompt, attempt, draft):
        if rejection is None:
            place = "(mine/reward.py, line 7)"
            raise DataFailure("reward_error", f"NameError: name 'answr' is not defined {place}")

    async def enter(role):
        await asyncio.sleep(0)

    ledger = Ledger(4)
    pump = RolloutPump(
        RunState(ledger, MemoryStore(), Budget(4, max_staleness=0, num_batches=9)),
        SimpleNamespace(prompt=lambda gid: gid, row_of=lambda gid: f"data/train.jsonl:{gid + 1}"),
        SimpleNamespace(rollout=rollout),
        SimpleNamespace(enter=enter),
        lambda group: rejection,
    )
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(pump.run())
    (cause,) = caught.value.exceptions
    return str(cause)


async def publish_to_a_forgetful_sampler():
    class Forgetful:
        async def install(self, version, weights):
            return Installed(version, len(list(weights)) - 1, "")

    weights = {"a": zeros(2), "b": zeros(2)}
    await Publisher([Forgetful()]).publish(take_snapshot(3, weights.items(), copy=False))


async def selftest(shift, shift_alone):
    """The learner adds these to its log-probs: always, and where a row stands alone."""

    class Fixed:
        async def generate(self, request):
            return [Generation([1], [0.0], [0], "stop") for _ in request.seeds]

    def call(self, method, rows):
        moved = shift + (shift_alone if len(rows) == 1 else 0.0)
        return [[moved] * len(row) for row in rows]

    learner = type("Shifted", (LearnerClient,), {"call_all": call, "query": call, "check": call})()
    given = {"samplers": [Fixed()], "prompts": [(1, 2)], "learner": learner}
    try:
        await Prober(**given, temperature=1.0, seed=1).selftest("", FLOAT32)
    finally:
        learner.close(5.0)


def run_out_of_memory():
    class Greedy(SftLoss):
        def __call__(self, outputs, columns):
            raise torch.OutOfMemoryError("Out of memory. Tried to allocate 2.00 GiB. GPU 0")

    settings = engine_settings(optimizer=OptimizerConfig())
    engine = build_engine("plain", settings, init_from_scratch=True)
    engine.begin_step()
    engine.accumulate([Row(torch.ones(64, dtype=torch.long), {"weights": zeros(64)})], Greedy())


def zeros(size):
    return torch.zeros(size)


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


def planned(*overrides):
    return refusal(lambda: prepare(None, overrides, "plan"))


def trained(*overrides):
    """What a run says before it starts, on a recipe that is right but for the overrides."""
    base = {
        "actor.path": "model",
        "actor.init_from_scratch": "true",
        "train_dataset.path": "data.jsonl",
        "train_dataset.prompt_key": "question",
        "reward.fn": "gsm8k",
    }
    changed = dict(entry.split("=", 1) for entry in overrides)
    given = [f"{key}={value}" for key, value in {**base, **changed}.items()]
    return refusal(lambda: check_train(prepare(None, given, "train")[0], torch.device("cpu")))


def end(call):
    with pytest.raises(RunError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def provoked(tmp_path, monkeypatch, caplog):
    """Every sentence, provoked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/data/hub")
    write_byte_model(Path("model"))
    write_model(Path("plain"))
    Path("data.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    return [*plans(), *starts(), *folders(), *alarms(), *failures(caplog), lack()]


def lack():
    given = ["actor.path=Qwen/Qwen3-8B", "cluster.n_gpus_per_node=1"]
    config, _ = prepare(None, [*given, "train_dataset.max_length=1024"], "plan")
    said = build_plan(config, choose_device(config, 24), None).lacks[0]
    return f"Does not fit: {said}."


def without_figures(sentence):
    """The figures of a plan are estimates that improve; the sentence around them is quoted."""
    is_plan = sentence.startswith("Does not fit")
    return re.sub(r"\d[\d.,]*", "#", sentence) if is_plan else sentence


def test_the_page_quotes_exactly_what_is_printed(provoked):
    page = {without_figures(sentence) for sentence in QUOTED}
    printed = {without_figures(sentence) for sentence in provoked}
    assert sorted(printed - page) == [], "printed, and not on the page"
    assert sorted(page - printed) == [], "on the page, and never printed"
