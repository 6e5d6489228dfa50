"""The workflow `agent`: runs a program written for an OpenAI server against the policy, and trains
on its calls.

The program is a function that takes any of PARAMETERS, async or plain (run in a thread). It returns
the reward: a number, a dict of named parts, or None: then `reward.fn` scores the sample. One call
is one episode; a group has one per sample.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from pentad.core.errors import DataFailure, Problem, UserError
from pentad.core.specs import load, why_not_loaded
from pentad.core.tasks import end
from pentad.core.types import Prompt, Sample
from pentad.rollout.proxy import MODEL, Episode, Proxy
from pentad.rollout.workflows import (
    CLOSE_TIMEOUT_S,
    Attempts,
    Context,
    Episodes,
    Generator,
    OwnPrompts,
    contained,
)
from pentad.serve.service import in_thread

log = logging.getLogger(__name__)

PARAMETERS = {
    "prompt": "the question as text, without a chat template",
    "messages": "the conversation so far, without a chat template",
    "fields": "the whole dataset row",
    "base_url": "the address to give to the client",
    "api_key": "the key to give to the client",
    "model": "the name of the model",
}


class AgentWorkflow(Episodes, OwnPrompts):
    """Runs the program once for each sample, each at a separate address."""

    def __init__(self, agent: Callable[..., Any]) -> None:
        self.agent = agent
        self.wanted = wanted_parameters(agent)

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        proxy = Proxy()
        async with proxy.serving():
            attempts = Attempts(prompt, sampler, context, own_prompts=True)
            return await attempts.run(
                lambda index, said: self._episode(prompt, index, proxy, said, context)
            )

    async def _episode(
        self, prompt: Prompt, index: int, proxy: Proxy, sampler: Generator, context: Context
    ) -> list[Sample]:
        episode = Episode(sampler, context, context.seed(prompt.gid, index))
        proxy.episodes[episode.name] = episode
        values = {
            **self._question(prompt),
            "fields": prompt.fields,
            "base_url": proxy.base_url(episode),
            "api_key": episode.key,
            "model": MODEL,
        }
        work = self._call({name: values[name] for name in self.wanted if name in values})
        try:
            await asyncio.wait({work, episode.failure}, return_when=asyncio.FIRST_COMPLETED)
            if episode.failure.done():
                episode.failure.result()
            reward = work.result()
        finally:
            await episode.close()
            if not await end(work, timeout_s=CLOSE_TIMEOUT_S):
                log.warning("prompt %d: the agent does not end; it is abandoned", prompt.gid)
        samples = episode.samples()
        if not samples:
            raise DataFailure("no_turns", f"prompt {prompt.gid}: the agent sent no request")
        for sample in samples:
            give_reward(sample, reward)
        return samples

    def _question(self, prompt: Prompt) -> dict[str, Any]:
        """Returns the prompt as messages, which the proxy renders once, and as text if there is
        only one message."""
        messages = [dict(message) for message in prompt.messages]
        if not messages:
            messages = [{"role": "user", "content": prompt.text}]
        if len(messages) == 1 and messages[0]["role"] == "user":
            return {"messages": messages, "prompt": messages[0]["content"]}
        if "prompt" in inspect.signature(self.agent).parameters:
            roles = ", ".join(str(message["role"]) for message in messages)
            rule = f"takes `prompt`, but a row is a conversation ({roles})"
            remedy = "take `messages`, and send them as they are"
            raise UserError(Problem(f"rollout.agent: {self.agent.__name__}", rule, remedy))
        return {"messages": messages}

    def _call(self, values: dict[str, Any]) -> asyncio.Future[Any]:
        if inspect.iscoroutinefunction(self.agent):
            return asyncio.ensure_future(contained(self.agent(**values)))
        return in_thread(lambda: self.agent(**values))


def give_reward(
    sample: Sample, reward: object, where: str = "rollout.agent", name: str = "agent"
) -> None:
    """Sets reward parts from the program's return value. `name`: the part for a plain number."""
    if reward is None:
        return
    parts: dict[str, float] = {}
    for part, value in (reward if isinstance(reward, Mapping) else {name: reward}).items():
        if not isinstance(value, Real):
            rule = f"returned {reward!r}; {part} = {value!r} is not a number"
            remedy = "return a number, a dict of numbers, or None"
            raise UserError(Problem(where, rule, remedy))
        parts[str(part)] = float(value)
    sample.reward, sample.reward_parts = sum(parts.values()), parts


def wanted_parameters(agent: Callable[..., Any]) -> list[str]:
    """Returns the PARAMETERS that the program takes. UserError if it requires others."""
    parameters = inspect.signature(agent).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(PARAMETERS)
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in PARAMETERS]
    if unknown:
        rule = f"{agent.__name__} requires {', '.join(unknown)}"
        remedy = f"an agent may take {', '.join(PARAMETERS)}"
        raise UserError(Problem("rollout.agent", rule, remedy))
    return [p.name for p in parameters if p.name in PARAMETERS]


def load_agent(spec: str | None) -> AgentWorkflow:
    assert spec is not None, "checked with the config"
    try:
        agent = load(spec)
    except (Exception, SystemExit) as failure:
        rule = f"it cannot be loaded ({why_not_loaded(failure)})"
        raise UserError(Problem(f"rollout.agent = {spec}", rule)) from failure
    return AgentWorkflow(agent)
