"""CUDA graphs of training passes: forward, loss and backward of a microbatch are captured once per
bucket (`engine.buckets`), and replayed for later microbatches of the same sizes.

A replay takes a millisecond of the host instead of about four for each layer. It reads its inputs,
weights and gradients at the addresses of the capture: inputs are copied into buffers, the cast
weights keep their memory, gradients are added to buffers. The first microbatch of a bucket runs
uncaptured, which compiles its kernels; the second is captured. Results are bitwise equal to those
of an uncaptured pass over the same padded microbatch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pentad.core.types import Loss
from pentad.engine.batch import PackedRows, PackedSegments
from pentad.engine.predictor import Predicted
from pentad.ops.capture import capturing
from pentad.parallel.storage import GradientBuffers, cast_weights
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)

MAX_GRAPHS = 16
"""Captured passes that are kept; the least recently used one is dropped for another."""
MAX_SEEN = 256
"""Sizes that are remembered until they occur again."""

Trained = tuple[Tensor, dict[str, Tensor], Predicted]
"""Results of a pass with its backward: loss, statistics, and predictions per token."""


class Recording(Protocol):
    """A captured computation."""

    outputs: Trained
    """Tensors that each replay overwrites."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Captures computations on a device."""

    def running(self) -> AbstractContextManager[None]:
        """Active around all training passes, captured or not."""
        ...

    def record(self, compute: Callable[[], Trained]) -> Recording:
        """Captures a computation, which has no effect until the first replay."""
        ...

    def reserved_bytes(self) -> int:
        """Device memory of this process."""
        ...


class CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Trained) -> None:
        self.graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool: replays never overlap.

    All passes run on one stream. Autograd adds a gradient on the stream on which a parameter was
    first used, and the default stream cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.recordings: WeakSet[CudaRecording] = WeakSet()

    @contextmanager
    def running(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def record(self, compute: Callable[[], Trained]) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        if not self.recordings:  # torch rejects a pool whose graphs have all been freed
            self.pool = torch.cuda.graph_pool_handle()
        with capturing(graph, self.pool, self.stream):
            outputs = compute()
        recording = CudaRecording(graph, outputs)
        self.recordings.add(recording)
        return recording

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)


@dataclass(slots=True)
class CapturedPass:
    inputs: PackedRows
    """Buffers that a replay reads."""
    recording: Recording

    def load(self, packed: PackedRows) -> None:
        for buffer, tensor in zip(_tensors(self.inputs), _tensors(packed), strict=True):
            buffer.copy_(tensor)


class TrainGraphs:
    """Runs the training passes of one model, captured if their sizes occur repeatedly."""

    def __init__(
        self,
        root: nn.Module,
        parameters: Iterable[Tensor],
        compute: Callable[[PackedRows, Loss], Trained],
        recorder: GraphRecorder,
        *,
        is_required: bool = False,
    ) -> None:
        """`compute`: a whole pass over a microbatch, without synchronisation. `is_required`: a pass
        that cannot be captured raises its error instead of running uncaptured."""
        self.compute = compute
        self.recorder = recorder
        self.is_required = is_required
        self.is_on = True
        self.cast = cast_weights(root)
        self.trained = list(parameters)
        self.weights = [*self.trained, *root.buffers()]
        self.gradients: GradientBuffers | None = None
        self.passes: OrderedDict[Hashable, CapturedPass | None] = OrderedDict()
        """By sizes and loss, least recently used first; None: seen once, not captured."""
        self.addresses: list[int] = []
        self.num_captured = 0
        self.num_replayed = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Active during the microbatches of a call."""
        with self.recorder.running():
            if self.is_on and self.num_captured:
                if self.cast is not None:
                    self.cast.fill()
                self._check_addresses()
            yield

    def train(self, packed: PackedRows, loss: Loss) -> Trained:
        """Adds the gradient of a microbatch that is padded to a bucket."""
        if not self.is_on:
            return self.compute(packed, loss)
        if self.gradients is None:
            self.gradients = GradientBuffers(self.trained)
        self.gradients.attach()
        key = _key(packed, loss)
        if key is None or key not in self.passes:
            if key is not None:
                self._remember(key, None)
            return self.compute(packed, loss)
        captured = self.passes[key] or self._capture(key, packed, loss)
        if captured is None:
            return self.compute(packed, loss)
        self.passes.move_to_end(key)
        return self._replay(captured, packed)

    def _replay(self, captured: CapturedPass, packed: PackedRows) -> Trained:
        captured.load(packed)
        captured.recording.replay()
        self.num_replayed += 1
        loss_sum, stats, predicted = captured.recording.outputs
        logprobs_T, entropy_T, values_T = (None if x is None else x.clone() for x in predicted)
        copied = {name: x.clone() for name, x in stats.items()}
        return loss_sum.clone(), copied, (logprobs_T, entropy_T, values_T)

    def _capture(self, key: Hashable, packed: PackedRows, loss: Loss) -> CapturedPass | None:
        inputs = _buffers_of(packed)
        if self.cast is not None:
            self.cast.keeps_memory = True
            self.cast.fill()  # not in the capture: once for all microbatches
        before = self.recorder.reserved_bytes()
        try:
            recording = self.recorder.record(lambda: self.compute(inputs, loss))
        except Exception as error:
            # Ending a capture that failed is a further error, in which the first one is found.
            first = error.__context__ or error
            self.release()
            if self.is_required or not isinstance(first, Exception):
                raise first from None
            reason = str(first).strip().partition("\n")[0]
            text = "training passes are not captured as CUDA graphs: %s: %s"
            log.warning(text, type(first).__name__, reason)
            return None
        captured = CapturedPass(inputs, recording)
        self._remember(key, captured)
        self.num_captured += 1
        self._log_capture(packed, before)
        self.addresses = self._addresses()
        return captured

    def _log_capture(self, packed: PackedRows, before: int) -> None:
        assert packed.bucket is not None
        added = max(self.recorder.reserved_bytes() - before, 0) / 2**30
        text = "captured a training pass of %d tokens in %d sequences as a CUDA graph, %.1f GiB"
        log.info(text, packed.bucket.num_tokens, packed.bucket.num_sequences, added, extra=NOTICE)

    def _remember(self, key: Hashable, captured: CapturedPass | None) -> None:
        self.passes[key] = captured
        self.passes.move_to_end(key)
        held = [key for key, one in self.passes.items() if one is not None]
        for old in held[: max(len(held) - MAX_GRAPHS, 0)]:
            del self.passes[old]
        while len(self.passes) > MAX_SEEN:
            self.passes.popitem(last=False)

    def release(self) -> None:
        """Frees all memory; later passes are not captured."""
        self.is_on = False
        self.passes.clear()
        self.gradients = None
        if self.cast is not None:
            self.cast.stop_keeping()
            self.cast.drop_gradients()

    def _check_addresses(self) -> None:
        """Drops captured passes if weights were moved, because they would read freed memory."""
        if self._addresses() != self.addresses:
            log.info("the weights were moved: training passes are captured again")
            self.passes.clear()
            self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        copies = self.cast.copies.values() if self.cast is not None else ()
        return [x.data_ptr() for x in (*self.weights, *copies)]


def _key(packed: PackedRows, loss: Loss) -> Hashable | None:
    """Everything that a captured pass depends on besides the values of tensors; None for a loss
    whose settings cannot be compared."""
    try:
        settings = tuple(sorted(vars(loss).items(), key=lambda item: item[0]))
        key = packed.bucket, tuple(packed.columns), loss, settings
        hash(key)
    except TypeError:
        return None
    return key


def _tensors(packed: PackedRows) -> list[Tensor]:
    inputs = [packed.ids_U, packed.positions_U, packed.labels_U, packed.segments.lengths_S]
    return [*inputs, *packed.columns.values()]


def _buffers_of(packed: PackedRows) -> PackedRows:
    """Copies a microbatch into new memory."""
    segments = packed.segments
    given: dict[str, Any] = {
        name: getattr(packed, name).clone() for name in ("ids_U", "positions_U", "labels_U")
    }
    return replace(
        packed,
        **given,
        columns={name: x_T.clone() for name, x_T in packed.columns.items()},
        segments=PackedSegments(segments.lengths_S.clone(), segments.num_tokens),
    )
