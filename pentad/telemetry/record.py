"""The record of a step: every field of steps.jsonl with its meaning and unit.

The classes below are the schema, from which docs/telemetry.md is generated. A field that does not
apply or was not measured is null. Non-finite numbers cannot be written as JSON: they are null, and
`nonfinite` has their names and values.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pentad.telemetry.timeline import timeline

SCHEMA = 1


def about(meaning: str, unit: str = "", *, varies: bool = False) -> Any:
    """Declares a field of the schema; default null."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "varies": varies})


def measured(meaning: str, unit: str = "") -> Any:
    """Declares a field that measures the machine, so that it differs between equal runs."""
    return about(meaning, unit, varies=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The mixture-of-experts router, in the training passes of rank 0; null for dense models, and
    for those of the `fsdp` backend, whose routers are transformers' own."""

    sram_bytes_per_block: int | None = about(
        "shared memory one block of the Triton kernel uses; null where torch routes", "bytes"
    )
    achieved_bw_gbps: float | None = measured(
        "logits read and choices written, divided by the router's time", "GB/s"
    )
    tokens_per_expert_mean: float | None = about(
        "mean tokens routed to an expert in the step, in all its updates, on all ranks", "tokens"
    )
    tokens_per_expert_std: float | None = about(
        "standard deviation over the experts of a layer, mean over layers", "tokens"
    )
    balance: dict[str, dict[str, float]] | None = about(
        "by layer: mean, std, min and max over its experts, and how many were idle", "tokens"
    )
    used_triton: bool | None = about("whether the Triton kernel ran, not its torch reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Expert parallelism's exchange of tokens, in the forward passes of training of rank 0, summed
    over layers and microbatches; passes computed again count again. Null without it."""

    all_to_all_dispatch_ms: float | None = measured(
        "time of sending (token, expert) pairs to the experts' ranks, from when this rank is "
        "ready to the arrival of the last; a shared expert may be computed meanwhile",
        "ms",
    )
    all_to_all_combine_ms: float | None = measured(
        "time of returning the results of the experts", "ms"
    )
    dispatch_bytes: int | None = about("pairs sent to other ranks, with their weights", "bytes")
    combine_bytes: int | None = about("results sent to other ranks", "bytes")
    pairs_computed: int | None = about(
        "pairs of a token and an expert that arrived at their expert and were computed, on all "
        "ranks and in all layers; recomputed passes count again",
        "pairs",
    )
    dispatch_bw_gbps: float | None = measured("dispatch_bytes over its time", "GB/s")
    combine_bw_gbps: float | None = measured("combine_bytes over its time", "GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of rank 0 of the learner."""

    peak_allocated_gb: float | None = measured(
        "most device memory in use in the step; null on a CPU", "GB"
    )
    reserved_gb: float | None = measured("device memory the allocator holds; null on a CPU", "GB")
    leak_delta_gb: float | None = measured(
        "growth of the device memory in use since the previous step (on a CPU, of host_rss_gb); "
        "null for the first step of a start",
        "GB",
    )
    host_rss_gb: float | None = measured("resident host memory", "GB")
    turns_gb: dict[str, float] | None = measured(
        "if trainer and sampler take turns on a GPU: its memory in use by all processes, as "
        "before_sleep, asleep (the trainer starts), before_wake, awake (the sampler starts)",
        "GB",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Infra:
    async_ckpt_commit_ms: float | None = measured(
        "time the last export took from the copy of the weights to the whole folder, beside "
        "training; null before the first, and with saver.mode: sync",
        "ms",
    )
    last_saved_step: int | None = measured(
        "the last step whose export is known to be complete on disk; null before the first",
        "steps",
    )
    num_failed_saves: int | None = measured(
        "attempts to export that failed since the last good one", "attempts"
    )
    last_recover_step: int | None = measured(
        "the last step whose recovery checkpoint is known to be committed", "steps"
    )
    recover_stall_ms: float | None = measured(
        "time that training waited for the last recovery checkpoint", "ms"
    )
    recover_commit_ms: float | None = measured(
        "time from the start of that checkpoint to its commit", "ms"
    )
    num_failed_recovers: int | None = measured(
        "recovery checkpoints that failed since the last good one", "attempts"
    )
    last_uploaded_step: int | None = measured(
        "the last step whose recovery checkpoint is known to be complete in the store; this and "
        "the next three are null without checkpoint.remote_uri",
        "steps",
    )
    waiting_upload_step: int | None = measured(
        "the newest committed checkpoint that the store lacks; null: it has all", "steps"
    )
    num_failed_uploads: int | None = measured(
        "uploads that failed after all retries, in this start of the run", "attempts"
    )
    uploaded_gb: float | None = measured(
        "data that the store has acknowledged, in this start of the run", "GB"
    )
    publish_gather_ms: float | None = measured(
        "time of the learner in the last confirmed publish, until its weights may change again; "
        "this and the next four are null before the first publish",
        "ms",
    )
    publish_transfer_ms: float | None = measured(
        "time from then until the slowest sampler had received the weights", "ms"
    )
    publish_pause_ms: float | None = measured(
        "time for which the slowest sampler was paused; 0 if it was paused or asleep before",
        "ms",
    )
    publish_install_ms: float | None = measured(
        "time from the arrival of the weights to the receipt, including the pause", "ms"
    )
    publish_mb: float | None = measured(
        "amount written or sent to one sampler: less than the weights if only changes are sent, 0 "
        "if the sampler shares the learner's tensors",
        "MB",
    )
    active_nodes: int | None = measured(
        "machines that the learner's ranks are on, by host name", "nodes"
    )
    straggler: int | None = measured(
        "rank that computed 1.5 times as long as the others' median in the last three calls of a "
        "kind; null: none, or one process"
    )
    ettr: float | None = measured(
        "effective training time ratio: time in steps that moved the weights and were neither done "
        "again nor rolled back, over the time since the run was first started, breaks between "
        "starts included",
        "share",
    )
    ep_world_size: int | None = about("ranks that share the experts", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rl:
    """Reinforcement learning; null for sft and pretraining. Ratios compare trainer and sampler."""

    reward_mean: float | None = about("mean reward of the trained samples")
    reward_std: float | None = about("standard deviation over samples")
    reward_min: float | None = about("lowest reward of a sample")
    reward_max: float | None = about("highest reward of a sample")
    reward_greedy: float | None = about(
        "mean reward of the greedy answers, which are the baseline of remax and not trained"
    )
    reward_parts: dict[str, float] | None = about("mean of each named part of the reward")
    environments: dict[str, dict[str, float]] | None = about(
        "by name: num_groups, num_samples, reward_mean and length_mean of the groups trained; null "
        "where the run has one environment"
    )
    groups_without_variance: float | None = about("groups whose rewards are all equal", "share")
    advantage_mean: float | None = about("mean advantage of trained tokens")
    advantage_std: float | None = about("standard deviation over tokens")
    length_mean: float | None = about("mean sampled tokens of a sample", "tokens")
    length_min: float | None = about("fewest sampled tokens of a sample", "tokens")
    length_max: float | None = about("most sampled tokens of a sample", "tokens")
    prompt_length_mean: float | None = about("mean tokens of a prompt", "tokens")
    truncated_share: float | None = about("samples that ended at the length limit", "share")
    kl_ref: float | None = about("divergence from the reference policy, k3", "nats/token")
    kl_sampler: float | None = about("divergence of the trainer from the sampler, k3", "nats/token")
    entropy: float | None = about("mean entropy of the policy at trained tokens", "nats/token")
    clip_fraction: float | None = about("tokens whose gradient was clipped", "share")
    ratio_mean: float | None = about("importance ratio of a token, mean")
    ratio_p95: float | None = about("importance ratio, 95th percentile")
    ratio_max: float | None = about("importance ratio, largest")
    outside_clip_share: float | None = about("tokens with a ratio outside the clip band", "share")
    effective_sample_size: float | None = about(
        "effective sample size of the importance ratios, over the trained tokens", "share"
    )
    corrected_share: float | None = about("tokens the off-policy correction changed", "share")
    rejected_share: float | None = about("tokens that algorithm.rejection left out", "share")
    correction_weight_mean: float | None = about("mean weight of the off-policy correction")
    prox_logp_error: float | None = about(
        "algorithm.prox_logp_method = metrics: mean |interpolated - recomputed| log-prob of the "
        "old policy",
        "nats",
    )
    logprob_diff_mean: float | None = about("mean |trainer - sampler| log-prob of a token", "nats")
    logprob_diff_p95: float | None = about("95th percentile of that difference", "nats")
    logprob_diff_p99: float | None = about("99th percentile of that difference", "nats")
    logprob_diff_max: float | None = about("largest such difference", "nats")
    rerouted_share: float | None = about(
        "routes of the sampler that the trainer would have chosen differently, over tokens and "
        "layers of some samples of the step; null unless routes are replayed",
        "share",
    )
    adapter_effect: float | None = about(
        "mean distance of the trainer's log-probs from those of the frozen weights, over sampled "
        "tokens of some samples of the step; null unless an adapter is trained",
        "nats",
    )
    adapter_effect_sampler: float | None = about(
        "the same of the log-probs that the sampler reported; if near 0 and "
        "adapter_effect is larger, the sampler samples without the adapter",
        "nats",
    )
    staleness: dict[str, int] | None = about(
        "histogram: versions between sampling and training -> sampled tokens", "tokens"
    )
    critic_loss: float | None = about("value loss; null without a critic")
    critic_grad_norm: float | None = about("norm of the critic's gradient before clipping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Preference training (`pentad dpo`, `pentad reward-model`); null elsewhere. A reward is the
    reward model's, or beta times how far the policy's log-prob of an answer is above the
    reference's."""

    chosen_reward: float | None = about("mean reward of preferred answers", "nats")
    rejected_reward: float | None = about("mean reward of the others", "nats")
    margin: float | None = about("mean difference of the two, over pairs", "nats")
    accuracy: float | None = about("pairs whose preferred answer has the higher reward", "share")
    divergence: float | None = about(
        "kto: the estimated divergence from the reference that rewards are compared with", "nats"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """Where all prompts drawn so far went: drawn = trained + dropped by reason + in flight."""

    drawn: int | None = about("prompts drawn from the stream", "groups")
    trained: int | None = about("groups trained", "groups")
    dropped: dict[str, int] | None = about("groups dropped, by reason", "groups")
    in_flight: int | None = about("groups planned, running, ready or leased", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversampled:
    """Groups of a step that started more than it trains (`rollout.oversample`); null elsewhere. How
    old carried tokens are when they are trained is in `rl.staleness`."""

    started: int | None = about("groups started, carried ones included", "groups")
    complete: int | None = about(
        "groups that were complete when the step had enough; those beyond a batch are trained in "
        "the next step",
        "groups",
    )
    carried: int | None = about("groups aborted, which continue in the next step", "groups")
    tokens_carried: int | None = about("tokens that these have already", "tokens")
    max_carries: int | None = about("maximum number of times one of these was aborted", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    step: int = about("optimizer steps done, this one included: the first record has 1", "steps")
    generation: int = measured("number of earlier starts of the run")
    superseded: bool = measured("true once a resumed run has repeated the step")
    epoch: int | None = about("epoch of the data, from 0")
    version: int | None = about("version of the weights after the step")
    time_s: float | None = measured("when the record was written, Unix time", "s")
    loss: float | None = about("mean of the loss as the optimizer saw it")
    grad_norm: float | None = about("norm of the gradient before clipping")
    lr: float | None = about("learning rate of the step")
    update_skipped: bool | None = about(
        "true if loss or gradient was not finite, or there was nothing to train: no weight changed"
    )
    num_skipped: int | None = about("skipped steps of the run so far", "steps")
    rolled_back_to: int | None = about(
        "the step whose weights and optimizer state were restored after this one "
        "(guards.max_rollbacks); null without a rollback",
        "steps",
    )
    num_groups: int | None = about("prompts trained in the step", "groups")
    num_samples: int | None = about(
        "sequences trained; in pretraining sequences of `max_length` tokens, whatever the number "
        "of documents in them",
        "sequences",
    )
    rows_digest: str | None = about(
        "digest of the token ids of the step's rows, in order: steps with equal digests trained "
        "the same samples; null in reinforcement learning, where samples.jsonl names groups"
    )
    num_tokens: int | None = about("tokens of the rows, prompts included", "tokens")
    num_tokens_shared: int | None = about(
        "tokens among these that rows of a group share and that were computed only once "
        "(actor.enable_tree_training); mfu does not count them. Null if there are none",
        "tokens",
    )
    num_microbatches: int | None = about("forward and backward passes", "passes")
    tokens_per_sec: float | None = measured("num_tokens over the wall clock", "tokens/s")
    wall_clock_ms: float | None = measured("duration of the step, since the previous record", "ms")
    phases: dict[str, float] | None = measured(
        "duration of each phase; they exclude each other and sum to wall_clock_ms", "ms"
    )
    gates: dict[str, float] | None = measured(
        "time for which each closed gate blocked new prompts since the previous record; "
        "timeline.jsonl has the spans. Null if none did, and without rollouts",
        "ms",
    )
    mfu: float | None = measured(
        "share of the devices' peak reached by the training phase: 6 x active parameters x tokens, "
        "and attention counted as causal; recomputation is not counted. Null on a CPU, for a GPU "
        "whose peak is not known (telemetry.hardware_peak_tflops gives one) and for a model whose "
        "config does not tell its size",
        "share",
    )
    mfu_full_attention: float | None = measured(
        "the same with attention counted as full, as some papers do", "share"
    )
    peak_tflops: float | None = about("peak of one device that mfu refers to", "TFLOP/s")
    kernel: Kernel | None = about("")
    collective: Collective | None = about("")
    memory: MemoryUse | None = about("")
    infra: Infra | None = about("")
    rl: Rl | None = about("")
    preference: Preference | None = about("")
    funnel: Funnel | None = about("")
    oversampled: Oversampled | None = about("")
    evals: list[dict[str, Any]] | None = about(
        "evaluations finished since the previous record, each as its line in evals.jsonl"
    )

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values: all fields, without NaN or infinity."""
        record = {"schema": SCHEMA, **dataclasses.asdict(self)}
        record |= {"generation": self.generation or 0, "superseded": bool(self.superseded)}
        for block in BLOCKS:
            names = (entry.name for entry in dataclasses.fields(BLOCKS[block]))
            record[block] = record[block] or dict.fromkeys(names)
        return plain_json(record)


BLOCKS: dict[str, type] = {
    "kernel": Kernel,
    "collective": Collective,
    "memory": MemoryUse,
    "infra": Infra,
    "rl": Rl,
    "preference": Preference,
    "funnel": Funnel,
    "oversampled": Oversampled,
}


def plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces non-finite numbers by null and lists them in `nonfinite`."""
    nonfinite: dict[str, str] = {}
    return {**finite(dict(value), "", nonfinite), "nonfinite": nonfinite or None}


NO_CURVES = ("schema", "step", "generation", "superseded")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by path, such as `rl/reward_mean`, for curves."""
    found = {}
    for path, value in _leaves(record, ""):
        if isinstance(value, bool | int | float) and path not in NO_CURVES:
            found[path] = float(value)
    return found


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without fields that differ between equal runs: timings and memory."""
    kept = {name: value for name, value in record.items() if name not in _varying(StepRecord)}
    for block, cls in BLOCKS.items():
        if isinstance(kept.get(block), dict):
            kept[block] = {k: v for k, v in kept[block].items() if k not in _varying(cls)}
    if kept.get("evals"):
        kept["evals"] = [{k: v for k, v in e.items() if k != "seconds"} for e in kept["evals"]]
    return kept


def _varying(cls: type) -> set[str]:
    return {entry.name for entry in dataclasses.fields(cls) if entry.metadata["varies"]}


def finite(value: Any, path: str = "", nonfinite: dict[str, str] | None = None) -> Any:
    """Replaces non-finite numbers by None, and adds path and value of each to `nonfinite`."""
    if isinstance(value, numbers.Real) and not isinstance(value, int):
        # Includes numpy scalars, which json cannot write.
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        if nonfinite is not None:
            nonfinite[path] = str(value)
        return None
    if isinstance(value, dict):
        return {
            k: finite(v, f"{path}.{k}" if path else str(k), nonfinite) for k, v in value.items()
        }
    if isinstance(value, list):
        return [finite(v, f"{path}.{i}", nonfinite) for i, v in enumerate(value)]
    return value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


OTHER = "other"


class PhaseTimer:
    """Measures the phases of a step. A nested phase pauses the outer one; time outside all phases
    is `other`, so that the sum is always the total time.

    For a single thread: phases that overlap (two tasks of an event loop) need separate timers.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        after: PhaseTimer | None = None,
    ) -> None:
        """`after`: the timer of the previous step; this one starts where that one was last read, so
        that no time is in neither."""
        self.clock: Callable[[], float] = clock if after is None else after.clock
        self.start: float = self.clock() if after is None else after._mark
        self._mark: float = self.start
        self._open: list[str] = []
        self._totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._book()
        self._open.append(name)
        depth = len(self._open)
        try:
            with timeline.span("learner", name):
                yield
        finally:
            self._book()
            assert len(self._open) == depth, f"phase {name} ended while {self._open[-1]} was open"
            self._open.pop()

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase so far, in order of first appearance, `other` last."""
        self._book()
        other = self._totals.get(OTHER, 0.0)
        named = {name: 1e3 * t for name, t in self._totals.items() if name != OTHER}
        return {**named, OTHER: 1e3 * other}

    def _book(self) -> None:
        """Adds the time since the last mark to the innermost open phase."""
        now = self.clock()
        name = self._open[-1] if self._open else OTHER
        self._totals[name] = self._totals.get(name, 0.0) + now - self._mark
        self._mark = now
