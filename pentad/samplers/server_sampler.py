"""The client of a server: `core.roles.Sampler` over any dialect.

Every answer is checked before it is returned. A request becomes one call for each seed; weights are
replaced while the server is paused; a server with unknown weights is not used until an install
succeeds.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError, is_cancelled
from pentad.core.roles import Installed, NamedTensors, TensorPairs
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Request
from pentad.infer.requests import RequestLimits, check_request
from pentad.models.hf_weights import native_shards
from pentad.models.lora import apply_lora
from pentad.models.registry import build_model
from pentad.samplers.answers import flaw_of
from pentad.samplers.dialect import MEMORIES, Call, Dialect, LoadingDialect, joined
from pentad.weights import transfer

ABORT_PATIENCE_S = 5.0
"""Seconds an aborted call may take to return its tokens; then its connection is closed."""
CUT_PATIENCE_S = 60.0
CUT_INTERVAL_S = 0.2
"""Seconds after which calls that reached the server after an abort of all are ended again."""
CONTEXT_SLACK = 8
"""Servers may end an answer this many tokens before the context is full."""


class ServerSampler:
    """Samples continuations of prompts on a server."""

    def __init__(
        self, dialect: Dialect, dims: ModelDims, *, max_context: int, version: int = -1
    ) -> None:
        """`version`: that of the server's weights; -1 if unknown."""
        self.dialect = dialect
        self.capabilities = dialect.capabilities
        self.dims = dims
        self.limits = RequestLimits(
            vocab_size=dims.vocab_size,
            max_context=max_context,
            max_cached=max_context,
            can_decode="stop_strings" in dialect.capabilities,
        )
        self.name = uuid.uuid4().hex[:8]  # ids must differ from those of another run
        self.open: dict[str, dict[str, asyncio.Task[Generation]]] = {}
        """Calls of each request in progress, by name."""
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.updating = asyncio.Lock()
        self.is_installing = False
        self.asleep: list[str] = []
        """The `MEMORIES` that are freed."""
        self.is_closed = False
        self.unknown_weights_reason: str | None = None
        """Why the server's weights are unknown; None if they are known."""
        self.version = version
        self.in_flight: dict[str, asyncio.Future[None]] = {}
        """Calls in progress on the server, and a future for the end of each."""
        self.interrupted: dict[str, bool] = {}
        """Those that were interrupted, and whether their tokens are kept."""
        self.num_drawn = self.num_installs = 0
        self.expected: tuple[Any, Any] | None = None

    async def generate(self, request: Request) -> list[Generation]:
        self._check_serving()
        check_request(request, self.limits)
        self.dialect.check(request.params)
        if request.id in self.open:
            rule = "a request of this id is in progress"
            raise UserError(Problem(f"request {request.id}", rule, "use another id"))
        names = [f"{self.name}-{request.id}-{index}." for index in range(len(request.seeds))]
        calls = self.open[request.id] = {
            name: asyncio.create_task(self._continue(request, index, name))
            for index, name in enumerate(names)
        }
        try:
            return list(await asyncio.gather(*calls.values()))
        except asyncio.CancelledError:
            if self.is_closed and not is_cancelled():
                raise RunError("the sampler was closed") from None
            raise
        finally:
            del self.open[request.id]
            for task in calls.values():
                task.cancel()  # closing its connection aborts it on the server
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        calls = self.open.get(request_id)
        if calls is None:
            return
        for name in calls:
            self.interrupted.pop(name, None)
        is_answered = await self.dialect.abort(list(calls))
        await asyncio.wait(calls.values(), timeout=ABORT_PATIENCE_S if is_answered else 0.0)
        for task in calls.values():
            task.cancel("aborted")

    async def rewind(self) -> None:
        self._check_open()
        self.version = -1

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Rejects missing, unknown, misshapen or duplicate tensors before anything changes.

        Requests that arrive meanwhile wait, so that they are sent under the new version.
        """
        self._check_open()
        if version < self.version:
            rule = f"version {self.version} is already here"
            raise UserError(Problem(f"install of version {version}", rule))
        pairs = weights if isinstance(weights, list) else list(weights)
        self._check_weights(pairs)
        async with self.updating:
            self.is_installing = True
            self._gate()
            try:
                receipt = await self._replace(version, pairs)
                self.unknown_weights_reason = None
            except InfraFailure as failure:
                reason = f"{failure}; its weights are unknown"
                self.unknown_weights_reason = reason
                raise RunError(reason) from failure
            except BaseException:
                reason = f"{self.dialect.where}: an install of version {version} did not end"
                self.unknown_weights_reason = reason
                raise
            finally:
                self.is_installing = False
                self._gate()
            self.num_installs += 1
        return receipt

    async def _replace(self, version: int, pairs: TensorPairs) -> Installed:
        if "weights" in self.asleep:
            await self.dialect.wake(["weights"])
            self.asleep.remove("weights")
        is_awake, began = not self.asleep, time.monotonic()
        if not self.dialect.tells_versions:
            await self._interrupt(keeps=True)
        if is_awake:
            await self.dialect.pause()
        receipt = await self.dialect.load(version, pairs)
        self.version = version
        if is_awake:
            await self.dialect.resume()
        seconds = time.monotonic() - began
        return replace(receipt, install_s=seconds, pause_s=seconds if is_awake else 0.0)

    async def sleep(self) -> None:
        self._check_open()
        if self.asleep:
            return
        self.asleep = list(MEMORIES)
        self._gate()
        try:
            async with self.updating:
                if self.dialect.loses_requests_asleep:
                    await self._interrupt(keeps=False)
                await self.dialect.sleep()
        except InfraFailure:
            self.asleep = []
            self._gate()
            raise

    async def _interrupt(self, *, keeps: bool) -> None:
        """Interrupts calls in progress. They are sent again later: from the point of interruption,
        or from the start, where the same seed samples the same tokens."""
        deadline = time.monotonic() + CUT_PATIENCE_S
        while self.in_flight:
            if time.monotonic() > deadline:
                num = f"{len(self.in_flight)} calls did not end"
                raise InfraFailure(f"{self.dialect.where}: {num} within {CUT_PATIENCE_S:g} s")
            self.interrupted |= dict.fromkeys(self.in_flight, keeps)
            await self.dialect.end_calls(sorted(self.in_flight))
            if ends := list(self.in_flight.values()):
                await asyncio.wait(ends, timeout=CUT_INTERVAL_S)

    async def wake(self) -> None:
        if not self.asleep:
            return
        async with self.updating:
            await self.dialect.wake(self.asleep)
        self.asleep = []
        self._gate()

    async def health(self) -> None:
        self._check_serving()
        try:
            await self.dialect.health()
            async with self.updating:
                label = await self.dialect.version_label()
        except InfraFailure as failure:
            raise RunError(str(failure)) from failure
        if self.version >= 0 and label != str(self.version):
            raise RunError(
                f"{self.dialect.where}: holds weights {label!r}, not version {self.version}; "
                "another client changed them, or it was restarted"
            )

    def stats(self) -> dict[str, float]:
        running = sum(not t.done() for calls in self.open.values() for t in calls.values())
        return {
            "tokens_drawn": self.num_drawn,
            "installs": self.num_installs,
            "running": running if self.may_send.is_set() else 0,
            "waiting": 0 if self.may_send.is_set() else running,
        }

    async def close(self) -> None:
        """Ends open requests with an error."""
        if self.is_closed:
            return
        self.is_closed = True
        for calls in self.open.values():
            for task in calls.values():
                task.cancel()
        await self.dialect.close()

    # One continuation.

    async def _continue(self, request: Request, index: int, name: str) -> Generation:
        drawn = given = Generation([], [], [], "length")
        if request.drawn and not request.params.stop_strings:
            drawn = given = joined(request.drawn[index])
        try:
            while True:
                await self.may_send.wait()
                self._check_serving()
                sent_at = drawn.versions[0] if drawn.ids else self.version
                call = self._call(request, index, name, drawn.ids)
                answer = await self._send(call)
                if answer.finish != "abort" or name not in self.interrupted:
                    drawn = joined(drawn, answer)
                    break
                is_kept = self.interrupted.pop(name)
                if "routes" in self.capabilities and answer.ids:
                    is_kept = is_kept and answer.routes is not None
                if not is_kept or request.params.stop_strings:
                    drawn = joined(given)  # a stop string may span the interruption
                    continue
                drawn = joined(drawn, answer)
                if len(answer.ids) == call.max_new_tokens:
                    drawn.finish = "length"
                    break
        except asyncio.CancelledError as cancelled:
            if cancelled.args == ("aborted",):
                return replace(drawn, finish="abort")
            raise
        finally:
            self.interrupted.pop(name, None)
        self._check_answer(request, index, drawn, sent_at)
        self.num_drawn += max(0, len(drawn.ids) - len(given.ids))
        return drawn

    async def _send(self, call: Call) -> Generation:
        ended = self.in_flight[call.id] = asyncio.get_running_loop().create_future()
        try:
            return await self.dialect.generate(call)
        finally:
            del self.in_flight[call.id]
            ended.set_result(None)

    def _call(self, request: Request, index: int, name: str, drawn: Sequence[int]) -> Call:
        """Returns the call that continues after the tokens sampled so far."""
        room = self.limits.max_context - len(request.prompt_ids)
        seed = request.seeds[index]
        return Call(
            id=name,
            prompt_ids=(*request.prompt_ids, *drawn),
            params=request.params,
            max_new_tokens=min(request.params.max_new_tokens, room) - len(drawn),
            seed=derive_seed(seed, "after", len(drawn)) if drawn else seed,
            version=self.version,
        )

    def _check_answer(self, request: Request, index: int, answer: Generation, sent_at: int) -> None:
        """Raises InfraFailure if it cannot be an answer to the request."""
        wrong = None
        if answer.finish != "abort":
            wrong = flaw_of(answer, request.params.max_new_tokens, self.limits.vocab_size)
            wrong = wrong or self._wrong_end(request, answer)
        known = range(sent_at, self.version + 1)
        strange = [version for version in answer.versions if version not in known]
        if wrong is None and strange:
            held = f"{sent_at} to {self.version}" if sent_at < self.version else f"{sent_at}"
            wrong = f"weights of version {strange[0]} drew a token, the server was given {held}"
        if wrong is not None:
            raise InfraFailure(f"{self.dialect.where}: continuation {index}: {wrong}")

    def _wrong_end(self, request: Request, answer: Generation) -> str | None:
        """Describes a wrong end of the answer; None if the end is right."""
        params, num = request.params, len(answer.ids)
        passed = next((t for t in range(num - 1) if answer.ids[t] in params.stop_ids), None)
        if passed is not None:
            return f"it continued after token {passed}, id {answer.ids[passed]}, a stop token"
        is_end = bool(params.stop_strings) or answer.ids[-1] in params.stop_ids
        if answer.finish == "stop" and not is_end:
            return f"it stopped at id {answer.ids[-1]}, which ends no answer"
        room = self.limits.max_context - CONTEXT_SLACK - len(request.prompt_ids)
        if answer.finish == "length" and num < min(params.max_new_tokens, room):
            return f"it was cut after {num} of {params.max_new_tokens} tokens"
        return None

    # State.

    def _gate(self) -> None:
        if self.is_installing or self.asleep:
            self.may_send.clear()
        else:
            self.may_send.set()

    def _check_weights(self, pairs: TensorPairs) -> None:
        """Raises UserError unless these are all weights of the model, each once, of its shape."""
        given = transfer.PairsReader(pairs)
        if not self.dims.is_whole:
            return  # no model file: only the trainer's map knows its tensors
        if self.expected is None:  # tensors and map, which take long to make
            skeleton = build_model(self.dims, device="meta", dtype=torch.float32)
            is_loading = isinstance(self.dialect, LoadingDialect)
            if is_loading and (lora := self.dialect.settings.lora) is not None:
                apply_lora(skeleton, lora)
            tensors = native_shards(skeleton, skeleton.adapter_map)
            self.expected = tensors, skeleton.trained_map
        transfer.check(self.expected[0], self.expected[1], given)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RunError("the sampler is closed")

    def _check_serving(self) -> None:
        self._check_open()
        if self.unknown_weights_reason is not None:
            raise RunError(self.unknown_weights_reason)
