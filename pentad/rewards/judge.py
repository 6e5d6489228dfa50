"""`reward.fn: judge`: a model behind an OpenAI-compatible API gives the reward.

The last number of its answer, divided by `scale`, is the reward. Equal questions are sent once. If
the judge does not answer, or its answer has no number, the question is repeated. If all retries
fail, the sample has no reward and its group is dropped: a failure of the judge is never a score.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, UserError, one_line
from pentad.core.folders import parse_json, what_else
from pentad.core.roles import Scored
from pentad.core.types import Prompt, Sample
from pentad.rewards.sandbox import JobFailed
from pentad.rewards.section import JudgeConfig

PLACE = re.compile(r"\{(\w+)\}")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FIRST_WAIT_S = 1.0
"""Seconds before the first retry of a question; doubled each time."""
MAX_VERDICT = 1 << 16
"""Maximum bytes of a line of the cache, which has a digest and a number."""
MAX_ANSWER_BYTES = 16 << 20
PART_BYTES = 1 << 16

FAILURES = (OSError, HTTPException, ValueError, LookupError, TypeError)
"""Exceptions of a call if the server cannot be reached or its answer is invalid."""

log = logging.getLogger(__name__)


class JudgeFailed(Exception):
    """The judge's answer has no number."""


class Judge:
    """Calls the model; belongs to one event loop."""

    def __init__(self, keys: JudgeConfig) -> None:
        self.keys = keys
        self.names = frozenset(PLACE.findall(keys.template))
        self.known: dict[str, float] = {}
        """Scores by digest of the question, from this run and from `cache`."""
        self.asked: dict[str, asyncio.Task[float]] = {}
        self.threads = ThreadPoolExecutor(keys.max_concurrent, thread_name_prefix="judge")
        self.api_key = os.environ.get(keys.api_key_env, "") if keys.api_key_env else ""
        self.is_told = False
        """Whether a warning about an unwritable cache was logged."""

    def start(self) -> None:
        """Reads the cached answers. Raises UserError."""
        if self.keys.api_key_env and not self.api_key:
            where = f"reward.judge.api_key_env = {self.keys.api_key_env}"
            raise UserError(Problem(where, "this environment variable is not set"))
        cache = self.keys.cache
        if cache is None or not Path(cache).exists():
            return
        where = f"reward.judge.cache = {cache}"
        try:
            if other := what_else(Path(cache)):
                raise UserError(Problem(where, f"{other}, not a file", "name a file"))
            with Path(cache).open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(MAX_VERDICT), b""), 1):
                    self._remember(line, f"line {number}", where)
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            raise UserError(Problem(where, rule, "name a file of yours")) from error

    def _remember(self, line: bytes, place: str, where: str) -> None:
        try:
            one = json.loads(line)
            self.known[one["question"]] = float(one["value"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"{place} is no verdict of a judge ({error})"
            raise UserError(Problem(where, rule, "remove that line")) from error

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], columns: Mapping[str, Any]
    ) -> list[Scored | JobFailed]:
        return await asyncio.gather(*(self._score(prompt, sample, columns) for sample in samples))

    async def _score(
        self, prompt: Prompt, sample: Sample, columns: Mapping[str, Any]
    ) -> Scored | JobFailed:
        values = {**columns, "prompt": prompt.text, "completion": sample.text}
        question = PLACE.sub(lambda found: str(values[found.group(1)]), self.keys.template)
        kind = (self.keys.url, self.keys.model, self.keys.scale, question)
        key = hashlib.sha256(json.dumps(kind).encode()).hexdigest()
        if key not in self.known:
            if key not in self.asked:
                self.asked[key] = asyncio.ensure_future(self._judged(key, question))
                self.asked[key].add_done_callback(lambda _: self.asked.pop(key))
            try:
                await asyncio.shield(self.asked[key])
            except JudgeFailed as failure:
                return JobFailed("judge", str(failure))
        return Scored(self.known[key])

    async def _judged(self, key: str, question: str) -> float:
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self.threads, self._ask_again, question)
        self.known[key] = value
        if self.keys.cache is not None:
            self._append(Path(self.keys.cache), {"question": key, "value": value})
        return value

    def _append(self, cache: Path, verdict: Mapping[str, Any]) -> None:
        """Appends to the cache. If the disk is full, removes an incomplete line and warns once."""
        try:
            with cache.open("ab", buffering=0) as file:
                size, line = file.tell(), json.dumps(verdict).encode() + b"\n"
                if file.write(line) < len(line):
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.is_told:
                rule = f"a verdict was not written ({error.strerror})"
                log.warning("reward.judge.cache = %s: %s; a later run repeats it", cache, rule)
            self.is_told = True

    def _ask_again(self, question: str) -> float:
        """Calls the model, with retries; runs in a thread."""
        for attempt in range(self.keys.max_retries + 1):
            try:
                return self._ask(question)
            except FAILURES as error:
                said = f"{type(error).__name__}: {error}"
                if attempt < self.keys.max_retries:
                    time.sleep(FIRST_WAIT_S * 2**attempt)
        rule = f"{self.keys.model} at {self.keys.url} gave no verdict in {attempt + 1} tries"
        raise JudgeFailed(one_line(f"{rule} ({said})", 500))

    def _ask(self, question: str) -> float:
        body = {
            "model": self.keys.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.keys.max_tokens,
        }
        request = urllib.request.Request(
            f"{self.keys.url.rstrip('/')}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"},
        )
        end = time.monotonic() + self.keys.timeout_s
        with urllib.request.urlopen(request, timeout=self.keys.timeout_s) as answer:
            said = parse_json(self._read(answer, end))["choices"][0]["message"]["content"]
        numbers = NUMBER.findall(said)
        if not numbers:
            raise ValueError(f"its answer was {said[-80:]!r}, which has no number")
        value = float(numbers[-1]) / self.keys.scale
        if not math.isfinite(value):
            raise ValueError("the number in its answer is too large for a reward")
        return value

    def _read(self, answer: HTTPResponse, end: float) -> bytes:
        """Reads the answer with limits of size and time; urllib's `timeout` is per wait only."""
        data = bytearray()
        while part := answer.read1(PART_BYTES):
            data += part
            if len(data) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise TimeoutError(f"its answer took longer than {self.keys.timeout_s:g} s")
        if answer.length:
            raise ConnectionError(f"its answer ended {answer.length} bytes too early")
        return bytes(data)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
