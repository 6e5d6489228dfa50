"""The embedded sampler: a `core.roles.Sampler` whose engine runs in one worker thread.

Only the worker uses the engine, between two awaits of `_drive`, which runs only while there is
work. Requests that arrive before the next step join it in order; weights, aborts, sleep and wake
take effect between two steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from pentad.core.device import freeze_gc, unfreeze_gc
from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.roles import Installed, NamedTensors, SentWeights
from pentad.core.types import Generation, Request, TopTokens
from pentad.engine.section import LoraConfig
from pentad.infer.engine import Decode, InferenceEngine, Report
from pentad.infer.requests import check_request
from pentad.infer.section import SamplerSettings
from pentad.infer.sequence import Sequence
from pentad.models.language_model import LanguageModel
from pentad.models.registry import load_to_sample
from pentad.models.towers import by_adapter_names
from pentad.weights.hf import HfFolder
from pentad.weights.peft import Adapter, fit_problems

OnToken = Callable[[int, int, float], None]
OnTop = Callable[[int, TopTokens], None]
T = TypeVar("T")


@dataclass(slots=True)
class OpenRequest:
    """A request in progress."""

    request: Request
    on_token: OnToken | None
    on_top: OnTop | None
    future: asyncio.Future[list[Generation]]
    ended: dict[int, Sequence] = field(default_factory=dict)


@dataclass(slots=True)
class EngineCommand:
    """A command to run between two steps."""

    action: Callable[[], object]
    future: asyncio.Future[object]


class EmbeddedSampler:
    """Continues prompts in this process, with its own instance of the model.

    Stop strings are searched in the text of all new tokens. Their tokens, or a stop id, stay in
    `ids`: training uses exactly the sampled tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplerSettings | None = None,
        *,
        decode: Decode | None = None,
        version: int = -1,
    ) -> None:
        """The sampler takes ownership of `model`. `version`: that of its weights."""
        self.engine = InferenceEngine(
            model, settings or SamplerSettings(), decode=decode, version=version
        )
        can = {"pause", "sleep", "abort", "seeds"}
        if decode is not None:
            can.add("stop_strings")
        if self.engine.settings.rollout.replay_routes:
            can.add("routes")
        if self.engine.settings.strict:
            can.add("strict")
        self.capabilities = frozenset(can)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self.interrupt = threading.Event()
        self.open: dict[str, OpenRequest] = {}
        self.inbox: list[OpenRequest] = []
        self.commands: list[EngineCommand] = []
        self.driver: asyncio.Task[None] | None = None
        self.is_paused = False
        self.num_wanted: int | None = None
        """Number of requests that may still end before it pauses."""
        self.num_installs = 0
        self.is_closed = False
        self.failure: RunError | None = None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        settings: SamplerSettings | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        decode: Decode | None = None,
        adapter: Adapter | None = None,
        dequantize: bool = False,
    ) -> EmbeddedSampler:
        """Serves the weights of the folder as version 0. `adapter`: applied to them, unmerged."""
        if adapter is not None:
            infos = by_adapter_names(folder, HfFolder(folder).infos)
            raise_problems(fit_problems(adapter, infos, "adapter", str(folder)))
        lora = None if adapter is None else LoraConfig(**asdict(adapter.spec))
        settings = (settings or SamplerSettings()).model_copy(update={"lora": lora})
        model = load_to_sample(folder, device=device, dtype=dtype, dequantize=dequantize)
        sampler = cls(model, settings, decode=decode, version=0)
        if adapter is not None:
            sampler.engine.place(adapter.factors.items())
        return sampler

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self, request: Request, on_token: OnToken | None = None, on_top: OnTop | None = None
    ) -> list[Generation]:
        """Calls `on_token(i, id, logprob)` for each token of the i-th generation when it is
        sampled; before it, if requested, `on_top(i, top)` with the most likely tokens."""
        self._check_serving()
        check_request(request, self.engine.limits)
        if request.id in self.open:
            raise UserError(
                Problem(
                    f"request {request.id}", "a request of this id is in progress", "use another id"
                )
            )
        future: asyncio.Future[list[Generation]] = asyncio.get_running_loop().create_future()
        entry = self.open[request.id] = OpenRequest(request, on_token, on_top, future)
        self.inbox.append(entry)
        self._kick()
        try:
            return await future
        except asyncio.CancelledError:  # the caller no longer waits for the tokens
            if self.failure is None and not self.is_closed:
                self._send(partial(self.engine.abort, request.id))
            raise

    async def abort(self, request_id: str) -> None:
        await self._do(partial(self.engine.abort, request_id))

    def hold_after(self, num_requests: int | None) -> None:
        """Samples until `num_requests` more requests have ended, then pauses until the next call;
        None: no limit. The other requests' tokens at that point depend only on the requests, not on
        the timing of callers."""
        self.num_wanted = num_requests
        if self.open:
            self._kick()

    async def pause(self) -> None:
        self.is_paused = True
        await self._do(lambda: None)  # waits for a step in progress

    async def resume(self) -> None:
        self.is_paused = False
        self._kick()

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Installs weights. Reads the iterator in the caller's thread, keeps all tensors until the
        install is over, and checks them before writing the first."""
        started = time.perf_counter()
        pairs = weights.weights if isinstance(weights, SentWeights) else list(weights)
        self.num_installs += 1
        freeze_gc(self.num_installs)
        compares = isinstance(weights, SentWeights)
        receipt = await self._do(partial(self.engine.install, version, pairs, compares=compares))
        return replace(receipt, install_s=time.perf_counter() - started)

    async def rewind(self) -> None:
        await self._do(self.engine.rewind)

    async def sleep(self) -> None:
        await self._do(self.engine.sleep)

    async def wake(self) -> None:
        await self._do(self.engine.wake)
        self._kick()

    async def health(self) -> None:
        self._check_serving()

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    async def close(self) -> None:
        """Ends open requests with an error; further ones are rejected."""
        if self.is_closed:
            return
        self.is_closed = True
        self.interrupt.set()
        if self.driver is not None and not self.driver.done():
            await asyncio.wait([self.driver])
        self._fail_open(RunError("the sampler was closed"))
        self.worker.shutdown()
        unfreeze_gc()

    # The driver.

    def _check_serving(self) -> None:
        if self.failure is not None:
            raise RunError(f"the sampler has failed: {self.failure}") from self.failure
        if self.is_closed:
            raise RunError("the sampler is closed")

    def _kick(self) -> None:
        self.interrupt.set()
        if self.driver is None or self.driver.done():
            self.driver = asyncio.get_running_loop().create_task(self._drive())

    def _send(self, action: Callable[[], object]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        # The abort of an abandoned request is not awaited, so its failure is not reported.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.commands.append(EngineCommand(action, future))
        self._kick()
        return future

    async def _do(self, action: Callable[[], T]) -> T:
        self._check_serving()
        results: list[T] = []

        def keep() -> T:
            results.append(action())
            return results[0]

        await self._send(keep)
        return results[0]

    async def _drive(self) -> None:
        """Runs commands and steps until no work is left, or the sampler is paused or asleep."""
        try:
            await asyncio.sleep(0)  # callers that are ready submit before the first step
            while not self.is_closed and (self.inbox or self.commands or self._can_step):
                self.interrupt.clear()
                await self._run_commands()
                self._take_inbox()
                if self._can_step:
                    report = await self._in_worker(partial(self.engine.run, self.interrupt))
                    self._deliver(report)
                    await asyncio.sleep(0)  # callers that got their tokens may send more requests
        except Exception as error:
            self._fail(error)
        except asyncio.CancelledError as error:  # tokens of the step in progress are lost
            if self.open or self.commands:
                self._fail(RunError("its event loop ended during a step"))
            raise error

    @property
    def _can_step(self) -> bool:
        is_held = self.is_paused or self.num_wanted == 0
        return self.engine.has_work and not is_held and not self.engine.is_asleep

    async def _in_worker(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.worker, action)

    def _take_inbox(self) -> None:
        for entry in self.inbox:
            self.engine.submit(entry.request, listened=entry.on_token is not None)
        self.inbox.clear()

    async def _run_commands(self) -> None:
        while self.commands:
            self._take_inbox()  # an abort finds a request that arrived before it
            command = self.commands.pop(0)
            try:
                result = await self._in_worker(command.action)
            except UserError as error:  # rejected before anything changed
                if not command.future.done():
                    command.future.set_exception(error)
                continue
            except BaseException as error:
                if not command.future.done():
                    command.future.set_exception(RunError(f"the sampler has failed: {error!r}"))
                raise
            if isinstance(result, Report):
                self._deliver(result)
            if not command.future.done():
                command.future.set_result(result)

    def _deliver(self, report: Report) -> None:
        for made in report.progress:
            entry = self.open.get(made.request_id)
            if entry is None or entry.on_token is None or entry.future.done():
                continue
            try:
                if entry.on_top is not None and made.top:
                    entry.on_top(made.index, made.top)
                entry.on_token(made.index, made.id, made.logprob)
            except Exception as error:  # an error of the listener ends only its request
                entry.future.set_exception(error)
                self._send(partial(self.engine.abort, made.request_id))
        for sequence in report.finished:
            entry = self.open[sequence.request.id]
            entry.ended[sequence.index] = sequence
            if len(entry.ended) == len(entry.request.seeds):
                self._close_entry(entry)
                if self.num_wanted and all(s.finish != "abort" for s in entry.ended.values()):
                    self.num_wanted -= 1
                if not entry.future.done():
                    ordered = [entry.ended[i] for i in range(len(entry.ended))]
                    entry.future.set_result([s.generation() for s in ordered])

    def _close_entry(self, entry: OpenRequest) -> None:
        del self.open[entry.request.id]
        self.engine.listened.discard(entry.request.id)

    def _fail(self, error: Exception) -> None:
        """Fails the sampler: all present and later requests get the first cause."""
        self.failure = error if isinstance(error, RunError) else RunError(repr(error))
        if self.failure is not error:
            self.failure.__cause__ = error
        self._fail_open(self.failure)

    def _fail_open(self, error: RunError) -> None:
        for entry in list(self.open.values()):
            self._close_entry(entry)
            if not entry.future.done():
                entry.future.set_exception(RunError(str(error)))
        for command in self.commands:
            if not command.future.done():
                command.future.set_exception(RunError(str(error)))
        self.inbox.clear()
        self.commands.clear()
