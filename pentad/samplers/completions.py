"""Client for OpenAI-compatible servers that take and return token ids (vLLM, pentad serve), for
evaluation.

The server's weights are fixed: nothing can be installed, and every token has version 0.
"""

from __future__ import annotations

import os

from pydantic import BaseModel, NonNegativeInt

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.types import Generation
from pentad.samplers import server_key
from pentad.samplers.dialect import Call, Dialect, finish_of, sampling_params
from pentad.samplers.http import Wire
from pentad.samplers.server_sampler import ServerSampler
from pentad.samplers.started_server import closed_on_failure

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


class Completions(Dialect):
    """The dialect of `/v1/completions` with `return_token_ids`. Evaluation does not train, so any
    log-probs are accepted. Requests are aborted by closing the connection."""

    capabilities = frozenset({"stop_strings", "seeds"})

    def __init__(self, wire: Wire, model: str) -> None:
        super().__init__(wire)
        self.model = model

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
            raise InfraFailure(f"{self.where}: {len(choices)} choices came where 1 was requested")
        choice = choices[0]
        return Generation(
            choice.token_ids,
            choice.logprobs.token_logprobs,
            [0] * len(choice.token_ids),
            finish_of(self.where, choice.finish_reason),
        )

    async def health(self) -> None:
        await self.wire.get("/v1/models")


async def attach(address: str, dims: ModelDims) -> ServerSampler:
    """Connects to `address` (with or without the final /v1) and uses its first model."""
    where = f"rollout.server.addresses = {address}"
    key = os.environ.get(server_key.VARIABLE)
    wire = Wire(address.rstrip("/").removesuffix("/v1"), "the server", key)
    async with closed_on_failure(wire):
        try:
            models = wire.read("/v1/models", Models, await wire.get("/v1/models")).data
        except InfraFailure as failure:
            rule = f"is no OpenAI-compatible server ({failure})"
            raise UserError(Problem(where, rule)) from failure
        if not models:
            raise UserError(Problem(where, "serves no model"))
    room = min(models[0].max_model_len or dims.max_position, dims.max_position)
    return ServerSampler(Completions(wire, models[0].id), dims, max_context=room, version=0)
