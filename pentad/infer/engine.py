"""The inference engine: runs requests in steps until sequences are finished. Synchronous; one
thread at a time.

One step: plan, run, record, and release finished sequences.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.faults import hit
from pentad.core.roles import Installed, NativeWeights
from pentad.core.sizes import (
    EMBEDDED_CPU_BYTES,
    PASS_TOKENS,
    SamplerPass,
    kv_token_bytes,
)
from pentad.core.types import FinishReason, Request, TopTokens
from pentad.infer.blocks import BlockPool
from pentad.infer.requests import RequestLimits
from pentad.infer.runner import Runner
from pentad.infer.scheduler import Plan, RequestScheduler
from pentad.infer.section import SamplerSettings
from pentad.infer.sequence import Sequence, Table
from pentad.models.hf_weights import install_hf, iter_hf, native_tensors
from pentad.models.language_model import LanguageModel
from pentad.ops.digest import are_same, are_same_cast, digest_of

if TYPE_CHECKING:
    from pentad.infer.graphs import Launched

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class Progress:
    """A sampled token of a request with a listener."""

    request_id: str
    index: int
    id: int
    logprob: float
    top: TopTokens


@dataclass(frozen=True, slots=True)
class Made:
    """The tokens of a step, or of K decode steps that were launched together."""

    rows: np.ndarray
    counts: np.ndarray
    """Number of tokens of each row; tokens after them are ignored."""
    ids_KN: np.ndarray
    logprobs_KN: np.ndarray

    @property
    def is_taken(self) -> np.ndarray:
        is_taken: np.ndarray = np.arange(len(self.ids_KN))[:, None] < self.counts
        return is_taken


@dataclass(slots=True)
class Report:
    """The results of one or more steps."""

    finished: list[Sequence] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Underway:
    """Decode steps that were launched and are not recorded yet."""

    launched: Launched
    version: int
    """Version of the weights that sample their tokens."""
    plan: Plan | None = None
    """That of the first of them, if the scheduler planned it."""


class InferenceEngine:
    """The embedded engine without its asynchronous interface."""

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplerSettings,
        *,
        decode: Decode | None = None,
        version: int = -1,
    ) -> None:
        self.model = model
        self.settings = settings
        self.decode = decode
        self.version = version
        self.is_asleep = False
        self.num_arrived = 0
        self.num_drawn = 0
        self.num_steps = 0
        self.num_installs = 0
        self.listened: set[str] = set()
        self.ahead: Underway | None = None
        """Steps launched before the previous ones were recorded."""
        dims = model.dims
        if settings.rollout.replay_routes and not any(map(dims.is_moe, range(dims.num_layers))):
            rule = "the model has no mixture of experts, so there are no routes"
            raise UserError(Problem("rollout.replay_routes = true", rule, "leave it out"))
        self.max_context = min(settings.max_context or dims.max_position, dims.max_position)
        head, keys = model.head_weight, settings.rollout
        states = sum(kind.num_bytes for kind in model.state_kinds)
        given = keys.max_sequences, keys.max_batch_tokens, states
        largest = SamplerPass(dims, head.dtype.itemsize, *given)
        num_blocks = count_blocks(model, settings, self.max_context, largest)
        # States exist only at the ends of sequences, so prefixes cannot be reused.
        finds = not (dims.linear_layers or model.state_kinds)
        self.pool = BlockPool(num_blocks, settings.block_size, finds_prefixes=finds)
        self.table = Table(settings.rollout.max_sequences, settings.block_size)
        self.runner = Runner(model, self.table, num_blocks, self.max_context, settings)
        has_room = head.is_cuda and self.runner.has_kernels
        free = torch.cuda.mem_get_info(head.device)[0] if has_room else None
        admit_batch = settings.rollout.max_sequences // 16 if self.runner.captures_graphs else 1
        self.scheduler = RequestScheduler(
            self.table,
            self.pool,
            largest.tokens(free),
            settings.admit_batch or admit_batch,
            self.keep_routes if settings.rollout.replay_routes else lambda sequence: None,
            settings.rollout.max_batch_tokens or PASS_TOKENS["cpu"],
        )
        self.limits = RequestLimits(
            vocab_size=dims.vocab_size,
            max_context=self.max_context,
            max_cached=(num_blocks - 1) * settings.block_size,
            can_decode=decode is not None,
        )

    # Work.

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, *, listened: bool = False) -> None:
        """Queues a checked request."""
        if listened:
            self.listened.add(request.id)
        for index in range(len(request.seeds)):
            self.num_arrived += 1
            sequence = Sequence(
                request=request,
                index=index,
                arrival=self.num_arrived,
                limit=self.limits.total(request),
                ids=list(request.prompt_ids),
            )
            if request.drawn:
                sequence.continue_from(request.drawn[index])
            self.scheduler.add(sequence)

    def run(self, interrupt: threading.Event) -> Report:
        """Runs steps until there is something to report, no work, or an interrupt."""
        report = Report()
        while self.has_work and not (report.finished or report.progress):
            self.step(report)
            if interrupt.is_set():
                break
        return report

    def step(self, report: Report) -> None:
        """Runs and records one step, or decode steps that were launched together. Meanwhile
        launches the next ones if possible; tokens of rows that turn out to have ended are ignored
        when results arrive."""
        hit("generate", step=self.version)
        current, self.ahead = self.ahead, None
        if current is None:
            plan = self.scheduler.plan()
            assert plan is not None, "there is work, but no step can be planned"
            launched = self.begin(plan)
            if launched is None:
                self.record_plan(plan, *self.runner.run(plan), self.version, report)
                return
            current = Underway(launched, self.version, plan)
        launched = current.launched
        rows = self.scheduler.rows_ahead(launched.rows, launched.seats, launched.num_steps)
        following = self.launch(rows, launched)
        self.ahead = None if following is None else Underway(following, self.version)
        self.record_steps(current, report)

    def begin(self, plan: Plan) -> Launched | None:
        """Launches a planned step without waiting, and further ones if all rows decode; None if the
        step needs the host, or leaves prefills that the next step continues."""
        if plan.is_decode:
            return self.launch(plan.rows)
        is_whole = len(plan.drawn_rows) == len(self.scheduler.rows)
        return self.runner.begin(plan) if is_whole and self.runner.can_launch(plan.rows) else None

    def launch(self, rows: np.ndarray, after: Launched | None = None) -> Launched | None:
        """Launches decode steps of these rows, several if no row needs the host in between; None if
        there is no room, or the host is needed for the first."""
        if not len(rows) or not self.runner.can_launch(rows):
            return None
        is_watched = self.listened or self.scheduler.waiting
        wanted = self.settings.steps_together
        if is_watched or self.table.has_stop_strings[rows].any():
            wanted = 1
        num_made = 0 if after is None else after.num_steps
        num_steps = self.scheduler.reserve(rows, num_made, wanted)
        return self.runner.launch(rows, num_steps, after) if num_steps else None

    def record_steps(self, underway: Underway, report: Report) -> None:
        launched, version, plan = underway.launched, underway.version, underway.plan
        ids_KN, logprobs_KN = launched.read()
        if plan is not None and not plan.is_decode:
            self.record_plan(plan, ids_KN[0], logprobs_KN[0], version, report)
            return
        is_kept = self.table.num_seated[launched.rows] == launched.seats
        rows = launched.rows[is_kept]
        columns = ids_KN[:, is_kept], logprobs_KN[:, is_kept]
        counts, ended = self.scheduler.record_steps(
            rows, *columns, version, is_planned=plan is not None
        )
        self.record(Made(rows, counts, *columns), dict(ended), version, report)

    def record_plan(
        self, plan: Plan, ids: np.ndarray, logprobs: np.ndarray, version: int, report: Report
    ) -> None:
        ended = self.scheduler.record(plan, ids, logprobs, version)
        made = Made(plan.drawn_rows, np.ones(len(ids), np.int64), ids[None], logprobs[None])
        self.record(made, dict(ended), version, report)

    def record(
        self, made: Made, ended: dict[Sequence, FinishReason], version: int, report: Report
    ) -> None:
        """Ends sequences and reports tokens, after the scheduler recorded these tokens."""
        if not np.isfinite(made.logprobs_KN[made.is_taken]).all():
            raise RunError(
                f"the model gave logits that are not finite with weights of version "
                f"{version}; these weights cannot be sampled from"
            )
        ended |= self.stopped_by_text(made.rows, ended)
        for row, top in self.runner.tops.items():
            sequence = self.table.sequences[row]
            assert sequence is not None
            sequence.tops.append(top)
        self.num_steps += len(made.ids_KN)
        self.num_drawn += int(made.counts.sum())
        if self.listened:
            report.progress += self.progress_of(made)
        if ended:
            self.end(ended, report)
        if not self.has_work:
            self.ahead = None

    def end(self, done: dict[Sequence, FinishReason], report: Report) -> None:
        self.scheduler.finish(done)
        report.finished += done
        if not self.has_work and not self.settings.keep_prefixes:
            self.pool.forget_prefixes()

    def keep_routes(self, sequence: Sequence) -> None:
        """Keeps a sequence's routes before its blocks are freed. Recomputed tokens keep their first
        experts, with which the following tokens were sampled."""
        num_computed = int(self.table.num_computed[sequence.row])
        known = sequence.routes
        if known is None or num_computed > len(known):
            routes = self.runner.routes_of(sequence.blocks, num_computed)
            if known is not None:
                routes[: len(known)] = known
            sequence.routes = routes

    def stopped_by_text(
        self, rows: np.ndarray, ended: dict[Sequence, FinishReason]
    ) -> dict[Sequence, FinishReason]:
        """Returns sequences whose text now contains one of their stop strings."""
        found: dict[Sequence, FinishReason] = {}
        for row in rows[self.table.has_stop_strings[rows]]:
            sequence = self.table.sequences[row]
            assert sequence is not None
            if ended.get(sequence) != "stop" and self.holds_stop_string(sequence):
                found[sequence] = "stop"
        return found

    def holds_stop_string(self, sequence: Sequence) -> bool:
        """Checks first the last tokens that could spell the longest stop string, then the whole
        text."""
        assert self.decode is not None
        strings = sequence.request.params.stop_strings
        size = int(self.table.num_tokens[sequence.row])
        # A character has at most four byte tokens; some margin for tokens without text.
        window = 4 * max(map(len, strings)) + 16
        for start in (max(sequence.num_prompt, size - window), sequence.num_prompt):
            text = self.decode(self.table.tokens[sequence.row, start:size].tolist())
            if not any(string in text for string in strings):
                return False
        return True

    def progress_of(self, made: Made) -> list[Progress]:
        progress = []
        for i, row in enumerate(made.rows.tolist()):
            sequence = self.table.sequences[row]
            assert sequence is not None
            if sequence.request.id in self.listened:
                index, top = sequence.index, self.runner.tops.get(row, [])
                for step in range(made.counts[i]):
                    drawn = int(made.ids_KN[step, i]), float(made.logprobs_KN[step, i])
                    progress.append(Progress(sequence.request.id, index, *drawn, top))
        return progress

    def abort(self, request_id: str) -> Report:
        """Ends all continuations of a request; unknown ids have ended already."""
        report = Report()
        found = self.scheduler.find(lambda sequence: sequence.request.id == request_id)
        if found:
            self.end(dict.fromkeys(found, "abort"), report)
        if not self.has_work:
            self.ahead = None
        return report

    # Weights and memory.

    def install(
        self, version: int, weights: Seq[tuple[str, Tensor]], *, compares: bool = False
    ) -> Installed:
        """Overwrites the weights. The receipt has the digest of the model's weights after the
        install, unless these are compared directly with the sender's, by native name."""
        if version < self.version:
            raise UserError(
                Problem(f"install of version {version}", f"version {self.version} is already here")
            )
        started = time.perf_counter()
        own = self._place_native(weights) if compares else None  # None: by the names on disk
        num_tensors = self.place(weights) if own is None else len(weights)
        hit("install", step=version)
        self.version = version
        self.num_installs += 1
        if self.settings.rollout.on_update == "reprefill":
            self.scheduler.preempt_all()
        self.pool.forget_prefixes()
        held = partial(iter_hf, self.model, weight_map=self.model.trained_map)
        if own is not None and isinstance(weights, NativeWeights):
            joins = self.model.head_weight.is_cuda
            is_same = are_same_cast(own, weights.native, joins=joins)
        else:
            is_same = compares and are_same(held(), weights)
        digest = "" if is_same else digest_of(held()).hex()
        pause_s = time.perf_counter() - started
        return Installed(version, num_tensors, digest, is_same=is_same, pause_s=pause_s)

    def place(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Writes the weights; returns the number of tensors."""
        num_tensors = install_hf(self.model, weights)
        self.runner.refresh()
        return num_tensors

    @torch.no_grad()
    def _place_native(self, weights: Seq[tuple[str, Tensor]]) -> dict[str, Tensor] | None:
        """Writes weights that the sender provides by native name; returns their memory. None, with
        nothing written, if they do not match one by one, or if their values by name on disk would
        be rounded in another way."""
        if not isinstance(weights, NativeWeights):
            return None
        own = self.factors or native_tensors(self.model, self.model.trained_map)
        native = weights.native
        if _kinds(own) != _kinds(native):
            return None
        if any(weights.dtypes[name] not in (own[name].dtype, native[name].dtype) for name in own):
            return None
        torch._foreach_copy_(list(own.values()), [native[name] for name in own])
        self.runner.refresh()
        return own

    @cached_property
    def factors(self) -> dict[str, Tensor]:
        """The factors of an adapter by native name, which stay in place; empty without one."""
        factors = self.model.adapter_map
        return {} if factors is None else native_tensors(self.model, factors)

    def rewind(self) -> None:
        self.version = -1

    def sleep(self) -> None:
        """Frees device memory; sequences in progress are recomputed after `wake`."""
        if not self.is_asleep:
            self.scheduler.preempt_all()
            self.pool.forget_prefixes()
            self.ahead = None  # it refers to memory of captured graphs, and its rows are gone
            self.runner.sleep()
            self.is_asleep = True

    def wake(self) -> None:
        if self.is_asleep:
            self.runner.wake()
            self.is_asleep = False

    def stats(self) -> dict[str, float]:
        scheduler, grouping = self.scheduler, self.runner.grouping
        num_following = sum(len(leader.followers) for leader in scheduler.running)
        return {
            "tokens_drawn": self.num_drawn,
            "prefill_tokens_computed": scheduler.num_prefilled,
            "prefill_tokens_reused": scheduler.num_reused,
            "steps": self.num_steps,
            "preemptions": scheduler.num_preemptions,
            "installs": self.num_installs,
            "running": len(scheduler.running) + num_following,
            "waiting": len(scheduler.waiting),
            "kv_reads_saved": 0.0 if grouping is None else grouping.saved_share,
            "kv_usage": self.pool.num_held / (self.pool.num_blocks - 1),
        }


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (x.shape, x.device) for name, x in tensors.items()}


def count_blocks(
    model: LanguageModel, settings: SamplerSettings, max_context: int, largest: SamplerPass
) -> int:
    """Returns the number of blocks in the pool, including the scratch block."""
    weight, size, keys = model.head_weight, settings.block_size, settings.rollout
    if weight.is_cuda:
        raise_problems(largest.state_problems(torch.cuda.mem_get_info(weight.device)[0]))
    bytes_each = size * kv_token_bytes(
        model.cache_dims, weight.dtype.itemsize, keys.kv_cache_dtype, expanded=settings.strict
    )
    if settings.kv_cache_tokens is not None:
        usable = settings.kv_cache_tokens // size
    elif keys.kv_cache_bytes is not None:
        usable = keys.kv_cache_bytes // bytes_each - 1
    else:
        memory = EMBEDDED_CPU_BYTES
        if weight.device.type == "cuda":
            memory = largest.cache_bytes(torch.cuda.mem_get_info(weight.device)[0])
        wanted = keys.max_sequences * -(-max_context // size)
        usable = min(wanted, memory // bytes_each - 1)
    if usable < 1:
        raise UserError(
            Problem(
                "the sampler's key-value cache",
                f"has no room for a block of {size} tokens, each takes {bytes_each} bytes",
                f"give at least {2 * bytes_each / 2**30:.2g} GiB (rollout.kv_cache_gb of a run, "
                "--kv-cache-gb of serve)",
            )
        )
    return usable + 1
