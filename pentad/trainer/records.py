"""Makes the record of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from pentad.checkpoint.tiers import Tiers
from pentad.core.dims import ModelDims
from pentad.core.layout import Layout
from pentad.core.types import Group, LayerBalance, StepResult, Work
from pentad.data.ledger import PromptFunnel
from pentad.engine.flops import Throughput, measure_throughput
from pentad.rewards.scorer import FAILED
from pentad.rl.metrics import staleness_histogram
from pentad.sync.publisher import PublishTimes
from pentad.telemetry.record import (
    Collective,
    Funnel,
    Infra,
    Kernel,
    MemoryUse,
    Oversampled,
    PhaseTimer,
    Preference,
    Rl,
    StepRecord,
)
from pentad.trainer.pumps.state import DataProgress
from pentad.trainer.rank.update import BatchFacts
from pentad.trainer.saving.recovery import RecoverHandler
from pentad.trainer.saving.saver import Saver

log = logging.getLogger(__name__)

STEPS_BELOW_TARGET = 10


@dataclass(slots=True)
class TrainedBatch:
    """A finished step, for its record."""

    batch: int
    """Number of the step, from 0."""
    facts: BatchFacts
    timer: PhaseTimer
    groups: list[Group] = field(default_factory=list)
    """Empty for examples."""
    funnel: PromptFunnel | None = None
    """The funnel at the end of the batch; by now the next batch may have changed it."""
    progress: DataProgress | None = None
    """Progress of the data at the end of the batch; it belongs to the weights after the batch."""
    oversampled: Oversampled | None = None
    is_off_policy: bool = False
    """Whether staleness is undefined: the groups are from another run, or nothing is trained."""
    num_samples: int | None = None
    """Number of samples, if rows are parts of samples."""
    rows_digest: str | None = None
    preference: Mapping[str, float | None] | None = None
    """Fields of `telemetry.record.Preference`."""

    @property
    def steps(self) -> list[StepResult]:
        """Optimizer steps of all roles."""
        return [*self.facts.steps, *self.facts.critic_steps]


@dataclass(eq=False)
class StepRecorder:
    """Makes the records of steps; has the constants of a run: model, layout, peak of a device."""

    dims: ModelDims
    _: KW_ONLY
    layout: Layout
    peak_tflops: float | None
    steps_per_epoch: int
    mfu_target: float | None = None
    steps_below_target: int = 0
    num_nodes: int = 1
    """Number of machines of the learner's ranks."""
    num_skipped: int = 0
    rolled_back_to: int | None = None
    """The step to which the run was rolled back, for the next record."""

    def state(self) -> dict[str, Any]:
        return {"steps_below_target": self.steps_below_target, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps_below_target = int(state["steps_below_target"])
        self.num_skipped = int(state.get("num_skipped", 0))

    def record(
        self,
        trained: TrainedBatch,
        memory: MemoryUse,
        saver: Saver | None,
        recover: RecoverHandler,
        published: PublishTimes | None = None,
    ) -> StepRecord:
        """`saver`: the actor's, if the run saves it."""
        step, timer = trained.batch + 1, trained.timer
        steps, lengths = trained.facts.steps, trained.facts.lengths
        more: dict[str, Any] = {"rows_digest": trained.rows_digest}
        if trained.preference is not None:
            more["preference"] = Preference(**trained.preference)
        if trained.groups:
            with timer.phase("record"):
                more = {"rl": rl_of(trained), "num_groups": len(trained.groups)}
        if trained.funnel is not None:
            more["funnel"] = Funnel(**asdict(trained.funnel))
        more["oversampled"] = trained.oversampled
        phases = timer.phases_ms()
        wall_ms = sum(phases.values())
        left_out = [length for one in steps for length in one.left_out]
        speed = self._speed(lengths, left_out, phases.get("train", 0.0) / 1e3)
        self._watch_target(speed.mfu_causal if speed else None)
        is_skipped = any(one.skipped for one in steps)
        self.num_skipped += is_skipped
        rolled_back_to, self.rolled_back_to = self.rolled_back_to, None
        return StepRecord(
            step=step,
            version=step,
            epoch=(step - 1) // self.steps_per_epoch,
            time_s=time.time(),
            loss=loss_of(steps),
            grad_norm=grad_norm_of(steps),
            lr=steps[-1].lr,
            update_skipped=is_skipped,
            num_skipped=self.num_skipped,
            rolled_back_to=rolled_back_to,
            num_samples=len(lengths) if trained.num_samples is None else trained.num_samples,
            num_tokens=sum(lengths),
            num_tokens_shared=sum(left_out) or None,
            num_microbatches=sum(one.num_microbatches for one in steps),
            tokens_per_sec=sum(lengths) / wall_ms * 1e3 if wall_ms else None,
            wall_clock_ms=wall_ms,
            phases=phases,
            mfu=speed.mfu_causal if speed else None,
            mfu_full_attention=speed.mfu_full if speed else None,
            peak_tflops=self.peak_tflops,
            kernel=_kernel(add_balance(steps), add_work(steps)),
            collective=_collective(add_work(steps), [one.num_pairs for one in steps]),
            infra=Infra(
                active_nodes=self.num_nodes,
                straggler=recover.learner.straggler,
                ep_world_size=self.layout.ep,
                last_recover_step=_counted(recover.last_saved),
                recover_stall_ms=recover.stall_ms,
                recover_commit_ms=recover.commit_ms,
                num_failed_recovers=recover.num_failed if recover.is_on else None,
                **_saves(saver),
                **_uploads(recover.tiers),
                **_publish_times(published),
            ),
            memory=memory,
            **more,
        )

    def _speed(
        self, lengths: Sequence[int], left_out: Sequence[int], train_s: float
    ) -> Throughput | None:
        """Returns throughput; MFU covers the training phase only, without generation."""
        if self.peak_tflops is None or not train_s:
            return None
        return measure_throughput(
            self.dims,
            lengths,
            train_s,
            peak_tflops=self.peak_tflops,
            num_devices=self.layout.world,
            left_out=left_out,
        )

    def _watch_target(self, mfu: float | None) -> None:
        """Warns once if MFU has been below its target for a while."""
        if self.mfu_target is None or mfu is None:
            return
        self.steps_below_target = self.steps_below_target + 1 if mfu < self.mfu_target else 0
        if self.steps_below_target == STEPS_BELOW_TARGET:
            log.warning(
                "mfu %.3f has been below telemetry.mfu_target = %g for %d steps",
                mfu,
                self.mfu_target,
                STEPS_BELOW_TARGET,
            )


def rl_of(trained: TrainedBatch) -> Rl:
    facts, groups = trained.facts, trained.groups
    critic = facts.critic_steps
    trainer, sampler = facts.adapter_effect or (None, None)
    return Rl(
        **facts.metrics,
        reward_parts=mean_parts(groups),
        environments=by_environment(groups),
        prompt_length_mean=sum(len(g.prompt.ids) for g in groups) / len(groups),
        staleness=(None if trained.is_off_policy else staleness_histogram(groups, trained.batch)),
        rerouted_share=facts.rerouted_share,
        adapter_effect=trainer,
        adapter_effect_sampler=sampler,
        critic_loss=loss_of(critic) if critic else None,
        critic_grad_norm=grad_norm_of(critic) if critic else None,
    )


def _counted(step: int | None) -> int | None:
    """Converts a step counted from 0 to one counted from 1, as in records; None stays None."""
    return None if step is None or step < 0 else step + 1


def _uploads(tiers: Tiers) -> dict[str, Any]:
    """Fields of `Infra` about uploads; empty without a store."""
    if tiers.remote is None:
        return {}
    status = tiers.status()
    return {
        "last_uploaded_step": _counted(status.last_step),
        "waiting_upload_step": _counted(status.waiting_step),
        "num_failed_uploads": status.num_failures,
        "uploaded_gb": status.num_bytes / 1e9,
    }


def _saves(saver: Saver | None) -> dict[str, Any]:
    """Fields of `Infra` about exports."""
    if saver is None:
        return {}
    return {
        "async_ckpt_commit_ms": saver.commit_ms if saver.is_async else None,
        "last_saved_step": _counted(saver.last_saved),
        "num_failed_saves": saver.num_failed,
    }


def _publish_times(times: PublishTimes | None) -> dict[str, Any]:
    """Fields of `Infra` about the publish; empty before the first one."""
    if times is None:
        return {}
    found = asdict(times)
    megabytes = found.pop("num_bytes") / 1e6
    return {f"publish_{name}_ms": 1e3 * seconds for name, seconds in found.items()} | {
        "publish_mb": megabytes
    }


def loss_of(steps: Sequence[StepResult]) -> float:
    """Returns the mean loss over the optimizer steps of a batch."""
    return sum(one.loss for one in steps) / len(steps)


def grad_norm_of(steps: Sequence[StepResult]) -> float:
    return max(one.grad_norm for one in steps)


def add_balance(steps: Sequence[StepResult]) -> list[LayerBalance]:
    """Sums the balance over a batch's optimizer steps, each of which trained part of its tokens."""
    return [
        LayerBalance(parts[0].layer, tuple(map(sum, zip(*(p.loads for p in parts), strict=True))))
        for parts in zip(*(one.balance for one in steps), strict=True)
    ]


def add_work(steps: Sequence[StepResult]) -> dict[str, Work]:
    """Sums the work over the optimizer steps of a batch."""
    total: dict[str, Work] = {}
    for name, work in [pair for one in steps for pair in one.work.items()]:
        known = total.setdefault(name, Work())
        known.seconds += work.seconds
        known.num_bytes += work.num_bytes
        known.num_calls += work.num_calls
        known.num_items += work.num_items
        known.block_bytes = work.block_bytes
    return total


def _collective(work: Mapping[str, Work], pairs: Sequence[int | None]) -> Collective | None:
    """Returns figures of expert parallelism's all-to-all; None without it."""
    if "dispatch" not in work:
        return None
    dispatch, combine = work["dispatch"], work["combine"]
    return Collective(
        all_to_all_dispatch_ms=1e3 * dispatch.seconds,
        all_to_all_combine_ms=1e3 * combine.seconds,
        dispatch_bytes=dispatch.num_bytes,
        combine_bytes=combine.num_bytes,
        pairs_computed=sum(number or 0 for number in pairs),
        dispatch_bw_gbps=_gbps(dispatch),
        combine_bw_gbps=_gbps(combine),
    )


def _gbps(work: Work) -> float | None:
    return work.num_bytes / work.seconds / 1e9 if work.seconds else None


BALANCE_FIGURES = ("mean", "std", "min", "max", "num_idle")


def _kernel(layers: Sequence[LayerBalance], work: Mapping[str, Work]) -> Kernel | None:
    """Returns figures of the router and the load of experts; None for a model without experts."""
    if not layers:
        return None
    route = work.get("route")
    balance = {
        str(one.layer): {name: getattr(one, name) for name in BALANCE_FIGURES} for one in layers
    }
    return Kernel(
        sram_bytes_per_block=None if route is None else route.block_bytes,
        achieved_bw_gbps=None if route is None else _gbps(route),
        used_triton=None if route is None else route.block_bytes is not None,
        tokens_per_expert_mean=sum(one.mean for one in layers) / len(layers),
        tokens_per_expert_std=sum(one.std for one in layers) / len(layers),
        balance=balance,
    )


def by_environment(groups: Sequence[Group]) -> dict[str, dict[str, float]] | None:
    """Returns figures of each environment's groups; None if a run has one environment."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.prompt.environment, []).append(group)
    found.pop("", None)
    return {name: _means(own) for name, own in sorted(found.items())} or None


def _means(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = {"reward_mean": sum(rewards) / len(rewards)} if rewards else {}
    return {
        "num_groups": len(groups),
        "num_samples": len(samples),
        **mean,
        "length_mean": sum(sample.num_sampled for sample in samples) / len(samples),
    }


def mean_parts(groups: Sequence[Group]) -> dict[str, float] | None:
    """Returns the mean of each reward part over the samples that have it; of failures, over all."""
    values: dict[str, list[float]] = {}
    num_samples = sum(len(group.samples) for group in groups)
    for group in groups:
        for sample in group.samples:
            for name, value in sample.reward_parts.items():
                values.setdefault(name, []).append(value)
    num = {name: num_samples if name.startswith(FAILED) else len(values[name]) for name in values}
    return {name: sum(found) / num[name] for name, found in sorted(values.items())} or None
