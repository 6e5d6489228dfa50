"""One batch's update: scores, advantages, gradient, optimizer step, and its report.

Runs in the learner's process. Groups are added as they arrive. If advantages depend on one group
alone and the batch makes one optimizer step, forward and backward run per chunk. Otherwise only
scoring runs per chunk, and the gradient waits for the whole batch. Both give the gradient of the
whole batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentad.core.flat_rows import select
from pentad.core.seeds import derive_seed
from pentad.core.types import Accumulated, Group, LayerBalance, Loss, Row, Sample, StepResult, Work
from pentad.engine.engine import Engine
from pentad.rl.algorithms import build_policy_loss, build_value_loss, make_rows
from pentad.rl.bounds import Signs
from pentad.rl.metrics import Metrics
from pentad.rl.section import AlgorithmConfig

MAX_REROUTED = 8
"""Number of samples per step with an extra forward pass, which compares their routes with the
learner's and, with an adapter, their log-probs with those of the frozen weights."""


@dataclass(slots=True)
class BatchResult:
    """Data of an update for the step record."""

    rows: Sequence[Row]
    outputs: list[dict[str, Tensor]]
    """Per row: the policy's outputs at the time of its gradient."""
    steps: list[StepResult]
    stats: dict[str, float]
    critic_steps: list[StepResult] = field(default_factory=list)
    rerouted_share: float | None = None
    """If routes were replayed: the share of routes that differ from the learner's choice."""
    scored: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """Samples of the first optimizer step, with the policy's log-probs there."""
    adapter_effect: tuple[float, float] | None = None
    """Mean absolute log-prob difference to the frozen weights, for trainer and sampler."""


class BatchUpdate:
    """Turns batches of groups into optimizer steps."""

    def __init__(
        self,
        learner: Engine,
        settings: AlgorithmConfig,
        *,
        critic: Engine | None = None,
        scored_apart: Collection[str] = (),
        max_new_tokens: int,
        num_updates: int = 1,
        compute_advantages: bool = True,
        seed: int = 0,
        base_tag: str | None = None,
    ) -> None:
        """`base_tag`: tag of the frozen weights if an adapter is trained."""
        self.learner = learner
        self.base_tag = base_tag
        self.critic = critic
        self.settings = settings
        self.tags = sorted(settings.needs_tags - set(scored_apart))
        """Tags of frozen weights that the learner scores with; other columns arrive with the
        groups."""
        self.max_new_tokens = max_new_tokens
        self.num_updates = num_updates
        self.compute_advantages = compute_advantages
        self.seed = seed
        self.loss: Loss = build_policy_loss(settings, num_updates=num_updates)
        self.value_loss: Loss | None = build_value_loss(settings) if critic else None
        self.streams = settings.facts.scope == "group" and num_updates == 1
        self.groups: list[Group] = []
        self.rows: list[Sequence[Row]] = []
        """The rows of each call."""
        self.seen: list[Accumulated] = []
        self.rerouted: list[Tensor] = []
        self.scored: list[tuple[Sample, Tensor]] = []
        self.num_done = 0
        """Number of whole batches trained: the version of the weights at the start of a batch."""
        self.num_moved = 0
        """Optimizer steps of the batch in progress."""

    def begin(self) -> None:
        self.groups, self.rows, self.seen, self.rerouted, self.scored = [], [], [], [], []
        if self.streams:
            self.learner.begin_step()
            if self.critic is not None:
                self.critic.begin_step()

    def add(self, groups: Sequence[Group], *, last: bool) -> None:
        """Adds the next groups of the batch; `last`: the batch is complete."""
        self._score(groups)
        self.groups += groups
        if self.streams:
            self._accumulate(self._rows_of(groups), last=last)
            self._note(samples_of(groups))

    def train(self, groups: Sequence[Group], num_chunks: int) -> BatchResult:
        """Trains a whole batch, in the same chunks as if samplers delivered it."""
        self.begin()
        for slots in chunk_slots(len(groups), num_chunks):
            self.add([groups[slot] for slot in slots], last=slots.stop == len(groups))
        return self.finish()

    def finish(self) -> BatchResult:
        """Makes the optimizer steps of the batch, one or several."""
        steps: list[StepResult] = []
        critic_steps: list[StepResult] = []
        if self.streams:
            self._end(steps, critic_steps)
        else:
            rows, samples = self._rows_of(self.groups), samples_of(self.groups)
            for part in self._split(len(rows)):
                self.learner.begin_step()
                if self.critic is not None:
                    self.critic.begin_step()
                self._accumulate(select(rows, part), last=True)
                if not steps:
                    self._note([samples[i] for i in part])
                self._end(steps, critic_steps)
        self.num_done, self.num_moved = self.num_done + 1, 0
        stats: dict[str, float] = {}
        for seen in self.seen:
            for name, value in seen.stats.items():
                stats[name] = stats.get(name, 0.0) + value
        outputs = [output for seen in self.seen for output in seen.outputs]
        share = float(torch.cat(self.rerouted).mean()) if self.rerouted else None
        effect = self._adapter_effect()
        rows = self.rows[0] if len(self.rows) == 1 else list(itertools.chain(*self.rows))
        return BatchResult(rows, outputs, steps, stats, critic_steps, share, self.scored, effect)

    def _adapter_effect(self) -> tuple[float, float] | None:
        if self.base_tag is None or not self.scored:
            return None
        some = self.scored[:MAX_REROUTED]
        rows = [Row(torch.from_numpy(sample.ids), {}) for sample, _ in some]
        found = self.learner.forward(rows, self.base_tag)
        base = np.concatenate(on_host([output["logprobs"] for output in found]))
        mine = np.concatenate(on_host([logprobs for _, logprobs in some]))
        drawn = np.concatenate([sample.rollout_logprobs for sample, _ in some])
        mask = np.concatenate([sample.mask for sample, _ in some])
        trainer, sampler = (float(np.abs(x - base)[mask].mean()) for x in (mine, drawn))
        return trainer, sampler

    def _rows_of(self, groups: Sequence[Group]) -> Sequence[Row]:
        return make_rows(
            groups,
            self.settings,
            max_new_tokens=self.max_new_tokens,
            compute_advantages=self.compute_advantages,
            version=self.num_done,
        )

    def _accumulate(self, rows: Sequence[Row], *, last: bool) -> None:
        self.seen.append(self.learner.accumulate(rows, self.loss, last=last))
        if self.critic is not None and self.value_loss is not None:
            # The routes belong to the policy; a critic has other routers.
            own = [replace(row, routes=None) for row in rows]
            self.critic.accumulate(own, self.value_loss, last=last)
        self.rows.append(rows)

    def _note(self, samples: Sequence[Sample]) -> None:
        """Keeps the policy's outputs for the accumulated samples, before an optimizer step changes
        it."""
        outputs = self.seen[-1].outputs
        pairs = zip(samples, outputs, strict=True)
        self.scored += [(sample, output["logprobs"]) for sample, output in pairs]

    def _end(self, steps: list[StepResult], critic_steps: list[StepResult]) -> None:
        steps.append(self.learner.end_step())
        self.num_moved += 1
        if self.critic is not None:
            critic_steps.append(self.critic.end_step())

    def _split(self, num_rows: int) -> list[list[int]]:
        """Splits a batch into `num_updates` parts of equal size, shuffled by the run's seed and the
        batch's first gid."""
        order = list(range(num_rows))
        if self.num_updates > 1:
            gid = self.groups[0].gid if self.groups else 0
            random.Random(derive_seed(self.seed, "minibatches", gid)).shuffle(order)
        parts = [order[i :: self.num_updates] for i in range(self.num_updates)]
        return [sorted(part) for part in parts if part]

    def _score(self, groups: Sequence[Group]) -> None:
        """Adds missing columns that the algorithm needs."""
        samples = samples_of(groups)
        needs_old = self.settings.needs_old_logprobs(self.num_updates)
        has_routes = any(sample.routes is not None for sample in samples)
        if not (self.tags or needs_old or has_routes or self.critic is not None):
            return
        rows = scored_rows(groups)
        for tag in self.tags:
            _write(samples, column_of(tag), self.learner.forward(rows, tag), "logprobs")
        routed = [
            replace(row, routes=torch.from_numpy(sample.routes).long())
            for row, sample in zip(rows, samples, strict=True)
            if sample.routes is not None
        ]
        if needs_old:
            _write(samples, "actor_logprobs", self.learner.forward(routed or rows), "logprobs")
        if routed and not self.rerouted:
            some = routed[:MAX_REROUTED]
            own = self.learner.routes([replace(row, routes=None) for row in some])
            self.rerouted = [rerouted(row, chosen) for row, chosen in zip(some, own, strict=True)]
        if self.critic is not None:
            _write(samples, "values", self.critic.forward(rows), "values")


def chunk_slots(size: int, num_chunks: int) -> list[range]:
    """Splits a batch of `size` groups into the chunks that are trained one after the other."""
    bounds = [chunk * size // num_chunks for chunk in range(num_chunks + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def column_of(tag: str) -> str:
    """Returns the name of the column with log-probs under frozen weights."""
    return f"{tag}_logprobs"


def on_host(columns: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies fp32 columns of many rows to host memory, in one transfer."""
    if not columns:
        return []
    flat = torch.cat(list(columns)).detach().float().cpu().numpy()
    ends = itertools.accumulate(column.numel() for column in columns)
    return [flat[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def scored_rows(groups: Sequence[Group]) -> list[Row]:
    """Returns all samples as rows for scoring only."""
    return [
        Row(torch.from_numpy(sample.ids), {}, group=group.gid)
        for group in groups
        for sample in group.samples
    ]


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def places_of(groups: Sequence[Group]) -> dict[int, tuple[int, int]]:
    """Returns the gid and the index in its group of each sample, by the sample's `id`."""
    return {
        id(sample): (group.gid, index)
        for group in groups
        for index, sample in enumerate(group.samples)
    }


def rerouted(row: Row, own_TLk: Tensor) -> Tensor:
    """Returns, per token and layer, 1 if the learner's router chooses other experts than the
    sampler. Excludes the last token, whose routes are undefined."""
    assert row.routes is not None
    wanted, own = (x[:-1].sort(-1).values for x in (row.routes, own_TLk))
    return (wanted != own).any(-1).float()


def _write(
    samples: Sequence[Sample], column: str, outputs: Sequence[dict[str, Tensor]], key: str
) -> None:
    parts = on_host([output[key] for output in outputs])
    for sample, part in zip(samples, parts, strict=True):
        sample.columns[column] = part


def step_from(value: Mapping[str, Any]) -> StepResult:
    """Converts a dict made by `dataclasses.asdict` back to a StepResult."""
    balance = tuple(LayerBalance(one["layer"], tuple(one["loads"])) for one in value["balance"])
    work = {name: Work(**found) for name, found in value["work"].items()}
    return StepResult(**{**value, "balance": balance, "work": work})


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A learner's report on one trained batch: its optimizer steps, and figures of its tokens. Sent
    as JSON."""

    steps: list[StepResult]
    critic_steps: list[StepResult]
    lengths: list[int]
    """Number of tokens of each row."""
    metrics: Metrics = field(default_factory=dict)
    rerouted_share: float | None = None
    """If routes were replayed: the share of routes that differ from the learner's choice."""
    signs: Signs | None = None
    """None for examples, which are not sampled."""
    adapter_effect: tuple[float, float] | None = None
    """As in `BatchResult`."""

    def as_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        steps = {key: [asdict(step) for step in plain[key]] for key in ("steps", "critic_steps")}
        return plain | steps | {"signs": self.signs and asdict(self.signs)}

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> BatchFacts:
        steps, critic_steps = (
            [step_from(step) for step in value[key]] for key in ("steps", "critic_steps")
        )
        made = {"steps": steps, "critic_steps": critic_steps, "signs": Signs(**value["signs"])}
        return cls(**{**value, **made})
