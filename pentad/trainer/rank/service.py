"""The service of every rank of a learner: engines by role, their steps, weights, state and exports.

The scheduler calls it through a `LearnerClient`: methods take and return JSON values. Groups are
read from the store; weights and state are passed as files or in the memory of this process.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pentad.checkpoint.exports import AdapterExporter, Exporter
from pentad.checkpoint.folders import (
    Damaged,
    Unreadable,
    info_folder,
    read_checkpoint,
    state_folder,
)
from pentad.checkpoint.restore import restore_learner
from pentad.checkpoint.shards import StateSaver
from pentad.checkpoint.writer import Writer
from pentad.config.rules.algorithm import sample_limit
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.device import freeze_gc, unfreeze_gc
from pentad.core.errors import RunError
from pentad.core.faults import hit
from pentad.core.flat_rows import join_column, lengths_of
from pentad.core.group_values import gather_values
from pentad.core.sizes import RunSize
from pentad.core.types import Prompt, Row
from pentad.data.store import GroupStore, open_store
from pentad.engine.engine import Engine
from pentad.engine.frozen import BASE
from pentad.parallel.gradients import differing_copies
from pentad.rl.bounds import compare
from pentad.rl.metrics import compute_metrics
from pentad.rl.ragged import cut
from pentad.runtime.rank import Rank
from pentad.sync.lent import Loan, lend
from pentad.sync.published import Kind
from pentad.sync.publisher import Snapshot, take_snapshot
from pentad.sync.shards import ShardWriter
from pentad.telemetry.host import rss_gb
from pentad.trainer.rank.learners import build_learner, load_tags, roles_of
from pentad.trainer.rank.update import BatchFacts, BatchResult, BatchUpdate, on_host, places_of
from pentad.trainer.saving.batches import TrainedTokens, read_batch, write_trained

FAILURES: dict[str, type[RunError]] = {
    **dict.fromkeys(("Damaged", "Missing"), Damaged),
    "Unreadable": Unreadable,
}
"""Errors of one rank, by name, that all ranks raise with the same type; others become RunError."""


class EngineService:
    """Common base of the services for rollouts and for examples."""

    mild = frozenset({"save_state", "restore_state", "roll_back", "export"})
    tags: Collection[str] = ()
    """Tags of the frozen weights with which the actor scores rows."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self.engines: dict[str, Engine] = {}
        self.snapshots: dict[int, Snapshot] = {}
        """Weights by version that are not fetched yet."""
        self.shared: dict[int, torch.Tensor] = {}
        """Buffers on the GPU by version that other processes read."""
        self.weights: ShardWriter | None = None
        self.loan: Loan | None = None
        """The frozen weights that samplers in other processes use."""
        self.writer = Writer(config.stall_abort_s)
        self.savers: dict[str, StateSaver] = {}
        self.exporters: dict[str, Exporter | AdapterExporter] = {}
        self.allocated_gb: float | None = None
        self.num_steps = 0
        """Optimizer steps of this process."""

    # Weights

    def forward(self, rows: list[list[int]], tag: str = "actor") -> list[list[float]]:
        """Returns the actor's log-probs (or other per-token predictions) of a few rows of ids;
        loads an offloaded actor."""
        actor = self.engines["actor"]
        is_offloaded = actor.is_offloaded
        found = actor.forward([Row(torch.tensor(ids), {}) for ids in rows], tag)
        if is_offloaded:
            actor.offload()
        said = "logprobs" if "logprobs" in found[0] else "values"
        return [output[said].float().tolist() for output in found]

    def shake_adapter(self, strength: float) -> None:
        self.engines["actor"].shake_adapter(strength)

    def offload(self) -> None:
        """Offloads the state; every method that needs it loads it again."""
        for engine in self.engines.values():
            engine.offload()

    def load_tags(self, has: list[str], step: int, keeps_ref: bool = False) -> None:
        """Loads the frozen weights needed for scoring and not yet loaded, after `step` steps."""
        needed = set(self.tags) - set(has)
        load_tags(self.engines["actor"], self.config, needed, step, keeps_ref=keeps_ref)

    def save_tag(self, tag: str) -> None:
        self.engines["actor"].save_tag(tag)

    def snapshot(
        self,
        version: int,
        copy: bool,
        on_host: bool,
        place: list[str] | None = None,
        deltas: bool = False,
        hashed: bool = True,
    ) -> dict[str, Any]:
        """Keeps the actor's weights as `version` for `fetch`. With a `place` (kind and folder)
        every rank writes its blocks to a folder for other processes."""
        actor = self.engines["actor"]
        if place is None:
            assert self.rank.world == 1, "several ranks publish a folder"
            self.snapshots[version] = take_snapshot(
                version, actor.iter_weights(), copy=copy, on_host=on_host, hashed=hashed
            )
            return {}
        shards = actor.weight_shards()
        if self.weights is None:
            self.weights = ShardWriter(shards, *actor.published(), self._saver("actor").group)
        kind: Kind = {"ipc": "ipc", "file": "file"}.get(place[0], "shm")  # type: ignore[assignment]
        made = self.weights.write(version, shards, kind, Path(place[1]), deltas=deltas)
        if made.kept is not None:
            self.shared[version] = made.kept
        return {"weights": asdict(made.weights), "digest": made.digest.entries}

    def lend_base(self) -> dict[str, Any]:
        """Returns handles of the frozen weights of an adapter for samplers in other processes on
        this device (`sync.lent`). From the first call on the weights stay in place."""
        if self.loan is None:
            actor = self.engines["actor"]
            tensors, base = actor.lend_base(), actor.base
            assert tensors is not None and base is not None, "the topology shares them"
            self.loan = lend(tensors, base.digest)
            if self.config.offload_train:  # before the sampler measures the free memory
                self.offload()
        return asdict(self.loan.weights)

    def release(self, version: int) -> None:
        """Frees the weights of a version that is no longer read."""
        self.shared.pop(version, None)

    def fetch(self, version: int) -> Snapshot:
        """Returns weights to the scheduler in the process of rank 0, and releases them here."""
        return self.snapshots.pop(version)

    def after_step(self, step: int) -> None:
        self.num_steps += 1
        freeze_gc(self.num_steps)
        self.check_replicas(step)

    def check_replicas(self, step: int) -> None:
        """Raises RunError on all ranks if copies of a shard differ, at steps that compare them."""
        every = self.config.guards.replica_check_steps
        if every is None or step % every or self.rank.world == 1:
            return
        group = self._saver("actor").group
        for role, engine in self.engines.items():
            if found := differing_copies(engine.state_tensors(), group):
                name, one, other = found[0]
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                raise RunError(
                    f"step {step}: rank {one} and rank {other} hold different copies of the "
                    f"{role}'s {name}{more}: one of them has a memory or arithmetic error. "
                    "This step is not saved; restart from the last checkpoint, and if it "
                    "happens again, remove the machine of one of the two"
                )

    # State

    def prepare_state(self) -> None:
        """Allocates the memory that asynchronous saves need."""
        for role, engine in self.engines.items():
            self._saver(role).prepare(engine.state_tensors())

    def save_state(
        self, role: str, root: str, folder: str, is_async: bool, generation: int | None = None
    ) -> list[dict[str, Any]]:
        """Stages the state and starts its write. Returns the outcome of each rank, or nothing if it
        is written in the background (see `saved_state`). Fails on all ranks or on none."""
        engine = self.engines[role]
        self._saver(role).save(
            engine.state_tensors(),
            Path(root),
            folder,
            is_async=is_async,
            counters=engine.state_counters(),
            generation=generation,
        )
        return [] if is_async else self._saver(role).outcomes()

    def saved_state(self, roles: list[str]) -> list[dict[str, Any]]:
        """Waits for the writes of `save_state`; returns the outcome of each rank
        (`Pending.outcome`), by role."""
        try:
            return [found for role in roles for found in self._saver(role).outcomes()]
        except RunError as error:
            return [{"files": {}, "error": str(error), "system": None}]

    def restore_state(self, role: str, root: str, step: int) -> dict[str, Any]:
        """Restores the state and returns the counters of the checkpoint. Fails on all ranks or on
        none."""
        hit("load", step=step + 1)
        failure: RunError | None = None
        counters: dict[str, Any] = {}
        try:
            checkpoint = read_checkpoint(Path(root), step)
            if checkpoint is None:
                raise RunError(f"{Path(root) / info_folder(step)}: not seen by every rank")
            counters = restore_learner(self.engines[role], checkpoint, state_folder(role, step))
        except RunError as error:
            failure = error
        group = self._saver(role).group
        if group is not None:
            said = [type(failure).__name__, str(failure)] if failure else None
            found = [one for one in gather_values(said, group) if one is not None]
            if found:
                kind, text = found[0]
                failure = FAILURES.get(kind, RunError)(text)
        if failure is not None:
            raise failure
        return counters

    def roll_back(self, role: str, root: str, step: int) -> None:
        """Restores weights and optimizer state; step count and learning-rate schedule continue."""
        engine = self.engines[role]
        counted = engine.num_steps, engine.num_skipped
        EngineService.restore_state(self, role, root, step)
        engine.num_steps, engine.num_skipped = counted

    def _saver(self, role: str) -> StateSaver:
        if role not in self.savers:
            self.savers[role] = StateSaver(self.writer)
        return self.savers[role]

    # Exports

    def export(self, role: str, folder: str, is_async: bool) -> None:
        """Writes an HF folder, each rank its blocks, or the PEFT folder of an adapter. If
        asynchronous, weights are copied when this returns, and `exported` returns the outcome.
        Fails on all ranks or on none."""
        engine = self.engines[role]
        if role not in self.exporters:
            is_adapter = engine.base is not None
            self.exporters[role] = AdapterExporter() if is_adapter else Exporter(self.writer)
        self.exporters[role].export(engine, folder, is_async=is_async)

    def exported(self, role: str) -> dict[str, Any]:
        """Waits for the last export and returns its outcome (`Pending.outcome`)."""
        return self.exporters[role].outcomes()[0]

    # Figures

    def count_nodes(self) -> int:
        """Returns the number of machines of the ranks."""
        if self.rank.world == 1:
            return 1
        return len(set(gather_values(socket.gethostname(), self._saver("actor").group)))

    def memory(self) -> dict[str, float | None]:
        """Returns the memory use of this process, as the fields of `telemetry.record.MemoryUse`."""
        before, rss = self.allocated_gb, rss_gb()
        if self.device.type != "cuda":
            self.allocated_gb = rss
            grown = None if before is None or rss is None else rss - before
            return {"host_rss_gb": rss, "leak_delta_gb": grown}
        self.allocated_gb = torch.cuda.memory_allocated() / 1e9
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return {
            "peak_allocated_gb": peak / 1e9,
            "reserved_gb": reserved / 1e9,
            "leak_delta_gb": None if before is None else self.allocated_gb - before,
            "host_rss_gb": rss,
        }

    def close(self, *, is_failed: bool) -> None:
        """Closes writers and weights; at once after a failure, else after pending exports."""
        for exporter in self.exporters.values():
            if is_failed:
                exporter.abandon()
            else:
                exporter.finish()
        self.writer.close(0.0 if is_failed else None)
        if self.weights is not None and not is_failed:
            self.weights.close()
        if self.loan is not None:
            self.loan.close()
        for saver in (*self.savers.values(), *self.exporters.values()):
            saver.close(is_failed=is_failed)
        unfreeze_gc()


class LearnerService(EngineService):
    """Trains on the groups of a store."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.store: GroupStore | None = None
        self.scored_apart: Collection[str] = scorers(config)
        """Tags of frozen weights on separate scorers; their columns arrive with the groups."""
        self.batch = 0
        self.result: BatchResult | None = None
        """Result of the last batch, until the next begins."""

    def build(self, num_steps: int, max_row_tokens: int) -> None:
        """Builds the models; both numbers follow from the data."""
        self.algorithm = self.config.algorithm
        size = RunSize(num_steps, max_row_tokens)
        for role in roles_of(self.config):
            self.engines[role] = build_learner(self.config, role, size, device=self.device)
        actor, critic = self.engines["actor"], self.engines.get("critic")
        self.update = BatchUpdate(
            actor,
            self.algorithm,
            critic=critic,
            scored_apart=self.scored_apart,
            max_new_tokens=sample_limit(self.config),
            num_updates=self.config.updates_per_batch,
            compute_advantages=self.config.compute_advantages_and_returns,
            seed=self.config.seed,
            base_tag=BASE if self.config.actor.lora is not None else None,
        )
        self.tags = self.update.tags

    def open_store(self, address: dict[str, Any]) -> None:
        """Connects to the store of groups; training does not need their prompts."""
        self.store = open_store(address, lambda gid: Prompt(gid, (), {}))

    def begin(self, batch: int) -> None:
        self.rank.report(batch + 1)
        self.batch, self.result = batch, None
        self.update.begin()

    def add(self, gids: list[int], last: bool) -> None:
        """Adds the next groups of the batch; `last`: the batch is complete."""
        assert self.store is not None, "it is opened before the first batch"
        self.update.add(self.store.get(gids), last=last)

    def finish(self) -> None:
        """Makes the optimizer steps."""
        self.result = self.update.finish()
        self.after_step(self.batch + 1)

    def train_kept(
        self, folder: str, step: int, number: int, digest: str, num_chunks: int | None = None
    ) -> None:
        """Trains a whole step from the kept groups of a run, as step `number` of this one, from
        0. `num_chunks`: the number of chunks in that run; None: as configured."""
        self.rank.report(number + 1)
        groups = read_batch(Path(folder), step, digest).groups
        self.batch = number
        self.result = self.update.train(
            groups, num_chunks or self.config.num_iters_per_train_update
        )
        self.after_step(number + 1)

    def measure(self, metrics: bool = True) -> dict[str, Any]:
        """Returns `BatchFacts` of the last finished batch, on rank 0; `metrics` can also be asked
        for later, by `batch_metrics`."""
        result = self.result
        assert result is not None, "a batch is finished first"
        samples = [sample for sample, _ in result.scored]
        said = on_host([logprobs for _, logprobs in result.scored])
        return BatchFacts(
            result.steps,
            result.critic_steps,
            lengths_of(result.rows),
            self.batch_metrics() if metrics else {},
            result.rerouted_share,
            compare(samples, said, self.batch),
            result.adapter_effect,
        ).as_json()

    def batch_metrics(self) -> dict[str, float | None]:
        """Returns the metrics of the last finished batch, until the next begins."""
        result = self.result
        assert result is not None, "a batch is finished first"
        rows, outputs = result.rows, result.outputs
        groups = self.update.groups
        return compute_metrics(groups, rows, outputs, self.algorithm, stats=result.stats)

    def keep_trained(self, path: str) -> str | None:
        """Writes advantage and log-prob of the tokens of the batch's first optimizer step. Returns
        an error text, or None."""
        result = self.result
        assert result is not None, "a batch is finished first"
        places = places_of(self.update.groups)
        samples = [sample for sample, _ in result.scored]
        rows = result.rows[: len(samples)]
        advantages = on_host(cut(join_column(rows, "advantages"), lengths_of(rows)))
        logprobs = on_host([logprobs for _, logprobs in result.scored])
        found = zip(samples, advantages, logprobs, strict=True)
        try:
            write_trained(
                Path(path), [TrainedTokens(*places[id(one)], a, b) for one, a, b in found]
            )
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return None

    def progress(self) -> dict[str, int]:
        """Returns the number of trained batches, and optimizer steps of the one in progress."""
        return {"num_done": self.update.num_done, "num_moved": self.update.num_moved}

    def restore_state(self, role: str, root: str, step: int) -> dict[str, Any]:
        counters = super().restore_state(role, root, step)
        self.update.num_done = step + 1
        return counters

    def close(self, *, is_failed: bool) -> None:
        super().close(is_failed=is_failed)
        if self.store is not None:
            self.store.close()
