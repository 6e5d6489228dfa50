"""Any OpenAI-compatible server that takes and gives token ids, for evaluation: vLLM, pentad serve.

Its weights are what they are: nothing can be installed, and every token is of version 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.roles import Installed
from pentad.core.types import Generation, SamplingParams
from pentad.samplers.answers import finish_of
from pentad.samplers.server_sampler import Call, ServerSampler
from pentad.samplers.wire import Wire

PATH = "/v1/completions"


class CompletionsLogprobs(BaseModel):
    token_logprobs: list[float]


class CompletionsChoice(BaseModel):
    finish_reason: str | None = None
    token_ids: list[NonNegativeInt]
    logprobs: CompletionsLogprobs


class CompletionsAnswer(BaseModel):
    choices: list[CompletionsChoice]


class Model(BaseModel):
    id: str
    max_model_len: int | None = None


class Models(BaseModel):
    data: list[Model]


class Completions:
    """The dialect of `/v1/completions` with `return_token_ids`."""

    capabilities = frozenset({"stop_strings", "seeds"})
    loses_requests_asleep = False
    tells_versions = True

    def __init__(self, wire: Wire, model: str) -> None:
        self.wire = wire
        self.where = wire.where
        self.model = model

    def check(self, params: SamplingParams) -> None:
        """Evaluation trains nothing: whatever log-probs are meant will do."""

    async def generate(self, call: Call) -> Generation:
        body = {
            "model": self.model,
            "prompt": call.prompt_ids,
            "return_token_ids": True,
            "logprobs": 0,
            **sampling_params(call),
        }
        answer = await self.wire.post(PATH, body, timeout_s=None)
        choices = self.wire.read(PATH, CompletionsAnswer, answer).choices
        if len(choices) != 1:
            raise InfraFailure(f"{self.where}: {len(choices)} choices came where 1 was asked for")
        choice = choices[0]
        if call.on_piece is not None:
            call.on_piece(choice.token_ids, choice.logprobs.token_logprobs)
        return Generation(
            choice.token_ids,
            choice.logprobs.token_logprobs,
            [0] * len(choice.token_ids),
            finish_of(self.where, choice.finish_reason),
        )

    async def abort(self, call_ids: Sequence[str]) -> bool:
        """Closing the connection, which follows, is the only way there is."""
        return False

    async def cut(self, call_ids: Sequence[str]) -> None:
        raise self._cannot("take new weights")

    async def pause(self) -> None:
        raise self._cannot("be paused")

    async def resume(self) -> None:
        raise self._cannot("be paused")

    async def load(self, version: int, weights: Sequence[tuple[str, Tensor]]) -> Installed:
        raise self._cannot("take weights")

    async def sleep(self) -> None:
        raise self._cannot("sleep")

    async def wake(self, memories: Sequence[str]) -> None:
        raise self._cannot("sleep")

    async def health(self) -> None:
        await self.wire.get("/v1/models")

    async def version_label(self) -> str:
        return "0"

    async def close(self) -> None:
        await self.wire.close()

    def _cannot(self, what: str) -> RunError:
        return RunError(f"{self.where}: an OpenAI-compatible server cannot {what}")


def sampling_params(call: Call) -> dict[str, Any]:
    params = call.params
    return {
        "max_tokens": call.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": call.seed,
        "stop": params.stop_strings,
        "stop_token_ids": params.stop_ids,
        "ignore_eos": True,
    }


async def attach(address: str, dims: ModelDims) -> ServerSampler:
    """`address` with or without its closing /v1; the first model there is taken."""
    where = f"rollout.server.addresses = {address}"
    wire = Wire(address.rstrip("/").removesuffix("/v1"), "the server")
    try:
        models = wire.read("/v1/models", Models, await wire.get("/v1/models")).data
        if not models:
            raise UserError(Problem(where, "serves no model"))
    except InfraFailure as failure:
        await wire.close()
        raise UserError(Problem(where, f"is no OpenAI-compatible server ({failure})")) from failure
    except BaseException:
        await wire.close()
        raise
    room = min(models[0].max_model_len or dims.max_position, dims.max_position)
    return ServerSampler(Completions(wire, models[0].id), dims, max_context=room, version=0)
