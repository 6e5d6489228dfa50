"""A model to sample from and to score, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pentad.api.runs import Reward, RowsOrPath, _Given, apart_from_loop
from pentad.core.device import dtype_of, dtype_problems, pick_device
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Request, SamplingParams
from pentad.data.tokenizer import Tokenizer, load_tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import dims_of
from pentad.planner.hub import local_model
from pentad.planner.prepare import prepare
from pentad.trainer.inputs import vocabulary_problems
from pentad.trainer.sampling.evaluate import check_eval, run_eval

T = TypeVar("T")
TextOrChat = str | Sequence[Mapping[str, Any]]
"""Plain text, or chat messages."""


@dataclass(frozen=True, slots=True)
class SampledText:
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """Why it ended: stop, or length if it was truncated."""


def load(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    template_args: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Opens the model of a folder, or of a name on the Hub."""
    folder = local_model(str(path), f"model = {path}")
    tokenizer = load_tokenizer(folder, key="model", template_args=template_args or {})
    problems = vocabulary_problems(folder, dims_of(folder), tokenizer, key="model")
    problems += dtype_problems("dtype", dtype)
    raise_problems(problems)
    return LoadedModel(folder, tokenizer, device, dtype, dict(template_args or {}))


class LoadedModel:
    """A model of a folder; its weights are loaded at the first use."""

    def __init__(
        self, folder: str, tokenizer: Tokenizer, device: str, dtype: str, args: dict[str, Any]
    ) -> None:
        self.folder = Path(folder)
        self.tokenizer = tokenizer
        self.device = device
        self.dtype = dtype
        self.template_args = args

    @cached_property
    def sampler(self) -> EmbeddedSampler:
        place = pick_device(self.device)
        return EmbeddedSampler.from_folder(
            str(self.folder),
            SamplerSettings(keep_prefixes=True),
            device=place,
            dtype=dtype_of(self.dtype, place),
            decode=lambda ids: self.tokenizer.decode(ids, keep_special=True),
        )

    def sample(
        self,
        prompts: str | Sequence[TextOrChat],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int = 256,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> list[list[SampledText]]:
        """Returns n answers to each prompt; a text is a single prompt. The same seed gives the same
        answers, whatever else is sampled."""
        given: Sequence[TextOrChat] = [prompts] if isinstance(prompts, str) else prompts
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=self.tokenizer.stop_ids,
        )
        requests = [
            Request(
                id=f"sample-{number}",
                prompt_ids=tuple(self._ids(prompt)),
                params=params,
                seeds=tuple(derive_seed(seed, "sample", number, i) for i in range(n)),
            )
            for number, prompt in enumerate(given)
        ]
        drawn = _wait(self._generate(requests))
        return [[self._answer(one) for one in generations] for generations in drawn]

    async def _generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        return list(await asyncio.gather(*map(self.sampler.generate, requests)))

    def _ids(self, prompt: TextOrChat) -> list[int]:
        if isinstance(prompt, str):
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]
        if not self.tokenizer.has_chat_template:
            rule = f"the tokenizer in {self.folder} has no chat template for messages"
            raise UserError(Problem("prompts", rule, "give texts"))
        return self.tokenizer.encode(self.tokenizer.render(prompt, for_answer=True))

    def _answer(self, one: Generation) -> SampledText:
        is_end = one.finish == "stop" and one.ids[-1] in self.tokenizer.stop_ids
        text = self.tokenizer.decode(one.ids[:-1] if is_end else one.ids)
        return SampledText(text, tuple(one.ids), tuple(one.logprobs), one.finish)

    def score(
        self, rows: RowsOrPath, reward: Reward, *, overrides: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Samples and scores answers like `pentad eval`: returns accuracy with its interval, mean
        reward and length. `overrides`: values by dotted key, such as evaluator.n_samples."""
        keys = {"actor.path": str(self.folder), "template_args": self.template_args}
        given = _Given({**keys, "actor.dtype": self.dtype}, overrides)
        given.set_rows("valid_dataset", rows)
        given.set_reward(reward, in_process=False)
        with given.file() as path:
            config, _ = prepare(path, given.overrides, "eval")
        with apart_from_loop():
            return run_eval(config, check_eval(config), device=self.device).as_record()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    with apart_from_loop():
        return asyncio.run(work)
