"""What episodes cost the process of a run: CPU of many conversations with a tool at once, and of
calls at the address that agents are given, with a sampler that takes no time.

    python benchmarks/episodes.py [--episodes 1000] [--rounds 5] [--agents 64] [--calls 20]

CPU seconds are those of this process, so that another load of the machine counts for little. An
agent's HTTP client runs in it too: its share is measured by calls of the same client to a server
that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from pentad.core.types import Generation, Prompt, Request, SamplingParams
from pentad.data.tokenizer import Tokenizer, load_tokenizer
from pentad.data.toy import write_byte_model
from pentad.rollout.agents import AgentWorkflow
from pentad.rollout.environments import ToolEnvironment
from pentad.rollout.executor import Executor
from pentad.rollout.hosted import EnvironmentWorkflow
from pentad.rollout.replicas import Fleet
from pentad.rollout.section import RolloutConfig
from pentad.rollout.workflows import Context, MultiTurn, Workflow

TOOL_S = 0.05
CALL = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
TURNS = (CALL, CALL, "done")
CLASS = f'''
import time


class Place:
    def reset(self, **row):
        self.reward = 1.0

    def look(self, place: str) -> str:
        """Looks around.

        Args:
            place: Where.
        """
        time.sleep({TOOL_S})
        return "nothing"
'''


class Instant:
    """A sampler that says the turns of an episode, told apart by the length of what was said."""

    def __init__(self, tokenizer: Tokenizer, turns: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        stop = self.tokenizer.eos_id
        self.turns = [[*self.tokenizer.encode(text), stop] for text in turns]
        self.lengths: dict[int, int] = {}

    async def generate(self, request: Request) -> list[Generation]:
        known = self.lengths.setdefault(len(request.prompt_ids), len(self.lengths))
        ids = self.turns[known % len(self.turns)]
        ones = [Generation(list(ids), [-1.0] * len(ids), [0] * len(ids), "stop")]
        return ones * len(request.seeds)

    async def abort(self, request_id: str) -> None:
        pass

    async def health(self) -> None:
        pass


def executor_of(sampler: Instant, workflow: Workflow, num_samples: int) -> Executor:
    tokenizer = sampler.tokenizer
    params = SamplingParams(max_new_tokens=256, stop_ids=(tokenizer.eos_id,))
    context = Context(tokenizer=tokenizer.inner, params=params, num_samples=num_samples, run_seed=1)
    keys = RolloutConfig(deadline_s=3600)
    return Executor(
        Fleet({"one": sampler}), workflow, None, context, keys, vocab_size=10**6, needs_reward=False
    )


def prompt_of(sampler: Instant, gid: int) -> Prompt:
    text = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    return Prompt(gid, tuple(sampler.tokenizer.encode(text)), {}, text)


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure_episodes(
    name: str, sampler: Instant, workflow: Workflow, args: argparse.Namespace
) -> None:
    """Rounds of so many episodes at once, in groups of eight."""
    executor = executor_of(sampler, workflow, 8)
    groups = args.episodes // 8

    async def one_round(number: int) -> None:
        prompts = [prompt_of(sampler, number * groups + i) for i in range(groups)]
        await asyncio.gather(*(executor.rollout(prompt, 0) for prompt in prompts))

    async def rounds() -> None:
        await one_round(0)
        gc.collect()
        before, memory = rss_mb(), []
        for number in range(1, args.rounds + 1):
            cpu, wall = time.process_time(), time.monotonic()
            await one_round(number)
            cpu, wall = time.process_time() - cpu, time.monotonic() - wall
            gc.collect()
            memory.append(rss_mb() - before)
            turns = groups * 8 * len(TURNS)
            figures = f"{1e6 * cpu / turns:7.0f} us CPU a turn, {wall:5.1f} s"
            print(f"{name:>22}: round {number}: {figures}, {memory[-1]:+6.1f} MB since the first")

    asyncio.run(rounds())
    executor.close()


async def look(place: str) -> str:
    await asyncio.sleep(TOOL_S)
    return "nothing"


def measure_agents(sampler: Instant, args: argparse.Namespace) -> None:
    """So many programs at once, each with calls one after the other, and the sampler alone."""
    took: list[float] = []

    async def program(base_url: str, api_key: str, model: str) -> float:
        body = {"model": model, "messages": [{"role": "user", "content": "Where?"}]}
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(timeout=600, headers=headers, verify=False) as client:
            for number in range(args.calls):
                body["messages"][0]["content"] = f"Where, {base_url[-8:]} {number}?"
                begun = time.monotonic()
                (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
                took.append(time.monotonic() - begun)
        return 1.0

    async def direct() -> None:
        request = Request(
            id="",
            prompt_ids=prompt_of(sampler, 0).ids,
            params=SamplingParams(max_new_tokens=8),
            seeds=(1,),
        )
        await asyncio.gather(*(sampler.generate(request) for _ in range(args.agents * args.calls)))

    async def client_alone() -> None:
        """The same requests to a server that answers a fixed text."""
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(args.calls):
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(size)
                writer.write(answer)

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await asyncio.gather(
            *(program(f"http://127.0.0.1:{port}", "key", "m") for _ in range(args.agents))
        )
        server.close()

    executor = executor_of(sampler, AgentWorkflow(program), args.agents)
    num = args.agents * args.calls
    for name, work in (
        ("sampler alone", direct),
        ("client alone", client_alone),
        ("agents at the address", lambda: executor.rollout(prompt_of(sampler, 0), 0)),
    ):
        took.clear()
        cpu = cpu_of(work)
        late = f", {1e3 * statistics.median(took):.1f} ms a call (median)" if took else ""
        print(f"{name:>22}: {1e6 * cpu / num:7.0f} us CPU a call{late}")


def cpu_of(work: Callable[[], Awaitable[object]]) -> float:
    async def main() -> None:
        await work()

    begun = time.process_time()
    asyncio.run(main())
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--processes", type=int, default=0, help="episodes with a class of tools")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        write_byte_model(Path(folder) / "model")
        tokenizer = load_tokenizer(str(Path(folder) / "model"))
        tools = {"look": look}
        workflow = MultiTurn(lambda: ToolEnvironment(tools), tools=tools)
        measure_episodes("tool in the process", Instant(tokenizer, TURNS), workflow, args)
        if args.processes:
            (Path(folder) / "place.py").write_text(CLASS)
            hosted = EnvironmentWorkflow("episodes", f"{folder}/place.py:Place")
            args.episodes = args.processes
            measure_episodes("class in processes", Instant(tokenizer, TURNS), hosted, args)
        measure_agents(Instant(tokenizer, ("nothing",)), args)


if __name__ == "__main__":
    sys.exit(main())
