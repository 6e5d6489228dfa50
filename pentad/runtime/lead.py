"""Rank 0 leads, the others follow: whatever it asks of a learner, all ranks do.

The run itself (data, samplers, records, clocks, signals) lives on rank 0 alone. A learner over
several ranks wants the same calls on all of them; there each call is told to the followers and then
made, in one order. A follower knows nothing but its learners: it builds and calls what it is told.
"""

from __future__ import annotations

import io
import operator
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.roles import Learner, StagedFile
from pentad.core.types import Accumulated, Loss, Row, StepResult
from pentad.runtime.rank import Rank
from pentad.runtime.signals import hearing

PATIENCE = timedelta(days=60)
"""How long followers wait for the next call: rank 0 may generate, evaluate or save for hours."""
ANSWER = timedelta(minutes=30)
"""How long rank 0 waits for them to take one: they do what it does, so who takes none hangs."""
BUILD, CALL, ITERATE, REPORT, STOP = range(5)
"""What a follower can be told."""

Message = tuple[Any, ...]
Build = Callable[..., Learner]
"""Makes a learner; takes `device` besides what it is told. Importable, as all that is told."""
ARRAYS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool}
"""The types of tensors that travel as arrays."""


class Channel:
    """Messages from rank 0 to all others, in a group of its own, in which followers wait for
    long."""

    def __init__(self) -> None:
        timeout = ANSWER if dist.get_rank() == 0 else PATIENCE
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def send(self, message: Message) -> None:
        buffer = io.BytesIO()
        Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self.group)
        dist.broadcast(data, src=0, group=self.group)

    def receive(self) -> Message:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.group)
        message: Message = pickle.loads(data.numpy().tobytes())
        return message


class Packer(pickle.Pickler):
    """Tensors as arrays: torch packs each as a file of its own, which is slow for many rows."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.requires_grad or value.dtype not in ARRAYS:
            return NotImplemented
        return torch.from_numpy, (value.cpu().numpy(),)


class Lead:
    """Rank 0's end: builds learners on all ranks, and tells the followers to stop when it closes.

    In a world of one there is nobody to tell, and learners are what was built.
    """

    def __init__(self, rank: Rank, device: torch.device) -> None:
        assert rank.rank == 0, "only rank 0 leads"
        self.rank = rank
        self.device = device
        self.channel = Channel() if rank.world > 1 else None
        self.lock = threading.Lock()
        self.caller: int | None = None
        """The thread whose call is under way."""
        self.is_torn = False
        """Whether a call failed here: nobody knows then where the followers stand."""

    def build(self, name: str, build: Build, *args: Any, **kwargs: Any) -> Learner:
        """`build(*args, device=..., **kwargs)` on every rank, each with its own device."""
        if self.channel is None:
            return build(*args, device=self.device, **kwargs)
        with self.telling(BUILD, name, build, args, kwargs):
            return Led(name, build(*args, device=self.device, **kwargs), self)

    def report(self, step: int) -> None:
        """Says on every rank that work on `step` begins."""
        with self.telling(REPORT, step):
            self.rank.report(step)

    @contextmanager
    def telling(self, *message: Any) -> Iterator[None]:
        """Tells the followers; within, rank 0 does the same. One at a time, from any thread."""
        if self.channel is None:
            yield
            return
        if self.is_torn:
            raise RunError("the ranks do not answer any more: a call failed before")
        if self.caller == threading.get_ident():
            raise RunError("a learner over several ranks was called within another call of it")
        with self.lock:
            self.caller = threading.get_ident()
            try:
                with self.rank.calling():
                    self.channel.send(message)
                    yield
            except BaseException:
                self.is_torn = True
                raise
            finally:
                self.caller = None

    def __enter__(self) -> Lead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.channel is not None and not self.is_torn:
            self.channel.send((STOP, error is None))


class Led:
    """A learner over several ranks, as rank 0 holds it. Implements `core.roles.Learner`."""

    def __init__(self, name: str, own: Learner, lead: Lead) -> None:
        self.name = name
        self.own = own
        self.lead = lead

    def everywhere(self, deed: Callable[[Any], Any]) -> Any:
        """Does something importable with the learner of every rank; what rank 0's gave."""
        with self.lead.telling(CALL, self.name, deed):
            return deed(self.own)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.everywhere(operator.methodcaller(method, *args, **kwargs))

    def forward(self, rows: Sequence[Row], tag: str = "actor") -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = self._call("forward", rows, tag)
        return found

    def routes(self, rows: Sequence[Row], tag: str = "actor") -> list[Tensor]:
        found: list[Tensor] = self._call("routes", rows, tag)
        return found

    def begin_step(self) -> None:
        self._call("begin_step")

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, last: bool = True) -> Accumulated:
        found: Accumulated = self._call("accumulate", rows, loss, last=last)
        return found

    def end_step(self) -> StepResult:
        found: StepResult = self._call("end_step")
        return found

    def save_tag(self, tag: str) -> None:
        self._call("save_tag", tag)

    def load_tag(self, tag: str, weights: str | Path) -> None:
        self._call("load_tag", tag, weights)

    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Runs to the end even if its reader does not: the followers do."""
        with self.lead.telling(ITERATE, self.name):
            weights = self.own.iter_weights()
            try:
                while (item := next(weights, None)) is not None:
                    yield item
            except GeneratorExit:
                drain(weights)

    def save_hf(self, folder: str) -> None:
        error: Exception | None = self.everywhere(partial(attempt_save, folder=folder))
        if error is not None:
            raise error

    def plan_hf(self) -> list[StagedFile]:
        return self.own.plan_hf()

    def stage_hf(self, into: Tensor | None) -> None:
        with self.lead.telling(CALL, self.name, operator.methodcaller("stage_hf", None)):
            self.own.stage_hf(into)


def on_all_ranks(learner: Any, deed: Callable[[Any], Any]) -> Any:
    """Does something importable with a learner, on every rank of it; what rank 0's gave."""
    return learner.everywhere(deed) if isinstance(learner, Led) else deed(learner)


def attempt_save(learner: Learner, folder: str) -> Exception | None:
    """Why it failed, which it does on all ranks or on none: they are together afterwards."""
    try:
        learner.save_hf(folder)
    except (OSError, RunError) as error:
        return error
    return None


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def follow(rank: Rank, device: torch.device) -> None:
    """Does what rank 0 tells, until it says stop.

    Signals that stop a run are rank 0's: one that reached all ranks would end some in mid call.
    """
    with hearing(signal.SIG_IGN):
        _follow(Channel(), rank, device)


def _follow(channel: Channel, rank: Rank, device: torch.device) -> None:
    learners: dict[str, Learner] = {}
    while True:
        try:
            kind, *what = channel.receive()
        except RuntimeError as error:
            raise RunError(f"connection closed: rank 0 is gone ({error})") from error
        if kind == STOP:
            (is_whole,) = what
            if not is_whole:  # rank 0 says why, and does not come to the end where ranks meet
                raise SystemExit(0)
            return
        with rank.calling():
            _answer(kind, what, learners, rank, device)


def _answer(
    kind: int, what: list[Any], learners: dict[str, Learner], rank: Rank, device: torch.device
) -> None:
    """Does one thing that rank 0 does too."""
    if kind == BUILD:
        name, build, args, kwargs = what
        learners[name] = build(*args, device=device, **kwargs)
    elif kind == CALL:
        name, deed = what
        deed(learners[name])
    elif kind == ITERATE:
        (name,) = what
        drain(learners[name].iter_weights())
    else:
        rank.report(*what)
