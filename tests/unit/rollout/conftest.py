"""A sampler that plays from a script, and tokenizers whose seams show every mistake."""

import asyncio
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pentad.core.errors import RunError
from pentad.core.types import Generation, Request

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedSampler:
    """Plays `script(request, i)`, the ids of the i-th continuation; the rest follows from them."""

    capabilities = frozenset({"abort"})

    def __init__(self, script: Callable[[Request, int], list[int]], version: int = 3) -> None:
        self.script = script
        self.version = version
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.is_healthy = True
        self.spoil: Callable[[list[Generation]], list[Generation]] = lambda answers: answers
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.num_finished = 0

    async def generate(self, request: Request) -> list[Generation]:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        answers = [self.play(request, i) for i in range(len(request.seeds))]
        self.num_finished += 1
        return self.spoil(answers)

    def play(self, request: Request, i: int) -> Generation:
        ids = self.script(request, i)[: request.params.max_new_tokens]
        stopped = ids[-1] in request.params.stop_ids
        logprobs = [-0.125 * (1 + (token + t) % 7) for t, token in enumerate(ids)]
        return Generation(ids, logprobs, [self.version] * len(ids), "stop" if stopped else "length")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def health(self) -> None:
        if not self.is_healthy:
            raise RunError("the replica is down")


@pytest.fixture(scope="session")
def scripted():
    return ScriptedSampler


def make_tokenizer(chat_template: str | None, merges: list[tuple[str, str]]):
    letters = [*'abcdefghijklmnopqrstuvwxyz0123456789{}<>_/":, \n.+=@', *(a + b for a, b in merges)]
    vocab = {symbol: index for index, symbol in enumerate(letters)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = chat_template
    return made


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Letters, with "ab" and "an" as merged tokens: "a" and "b" sampled apart re-encode as one."""
    return make_tokenizer(CHATML, [("a", "b"), ("a", "n")])


@pytest.fixture(scope="session")
def plain_tokenizer():
    return make_tokenizer(None, [("a", "b")])
