"""Tasks and episodes of the package verifiers; runs in its environment, without Pentad.

python -P verifiers_worker.py SETTINGS rows      prints the tasks as one JSON list
python -P verifiers_worker.py SETTINGS FD PID    plays episodes that are asked for at that socket

SETTINGS is JSON: `id` and the options that `verifiers_rows.py` parses from the name. The worker is
the other end of a `pentad.runtime.wire.Connection`: it sends the event `ready`, which has an
`error` if loading failed, and serves calls with `task`, `base_url`, `api_key` and `model`, which it
answers with `rewards` or `error`. The harness of verifiers calls the policy at `base_url`, like any
server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

SIZES = struct.Struct("!IIQ")
TABLE = b"[0,[]]"
"""A frame of `pentad.runtime.frames` has three sizes, a table of arrays (here none), and items."""


def load(settings: dict[str, Any]) -> Any:
    """Loads the environment. Without a harness of the taskset, the plain chat loop (`null`) is
    used, and programs run in processes of this machine."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    name = settings["id"]
    own = default_harness_id(name)
    harness = settings.get("harness") or ("null" if own == "bash" else own)
    seats = list(agent_config_fields(env_config_type(name)()))
    if len(seats) != 1:
        text = f"it is played by {len(seats)} agents ({', '.join(seats)}), and a policy is one"
        raise ValueError(text)
    seat = {"harness": {"id": harness}, "runtime": {"type": settings.get("runtime", "subprocess")}}
    taskset = {"id": name, **settings["options"]}
    return load_environment(resolve_env_config({"taskset": taskset, seats[0]: seat}))


def rows_of(environment: Any, size: int | None) -> list[dict[str, Any]]:
    tasks = environment.taskset
    if size is None and not tasks.bounded:
        raise ValueError("it has endless tasks: set their number, as in verifiers:ID?size=1000")
    return [
        {
            "prompt": task.data.prompt_text or task.data.name or f"task {index}",
            "verifiers": json.dumps(task.data.model_dump(mode="json")),
        }
        for index, task in enumerate(itertools.islice(tasks, size))
    ]


async def play(environment: Any, number: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Runs an episode; returns its weighted rewards by name, or the error."""
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate(json.loads(asked["task"]))
    task = kind(data, environment.config.taskset.task)
    variable = f"PENTAD_EPISODE_{number}"
    os.environ[variable] = asked["api_key"]  # clients read their keys only from there
    try:
        client = EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
        context = ModelContext(client=client, model=asked["model"], sampling=SamplingConfig())
        episode = await environment.run_episode(task, context)
    finally:
        del os.environ[variable]
    traces = list(episode.traces)
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors or len(traces) != 1:
        said = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{len(traces)} traces"
        return {"error": said}
    if unscored := [name for name, reward in traces[0].rewards.items() if reward is None]:
        return {"error": f"the reward {unscored[0]} was not computed"}
    return {"rewards": {name: reward.value for name, reward in traces[0].rewards.items()}}


def frame(item: str) -> bytes:
    items = f"[{item}]".encode()
    return SIZES.pack(len(TABLE), len(items), 0) + TABLE + items


class EpisodeServer:
    def __init__(self, environment: Any, writer: asyncio.StreamWriter) -> None:
        self.environment = environment
        self.writer = writer
        self.episodes: dict[int, asyncio.Task[None]] = {}

    async def _episode(self, number: int, asked: dict[str, Any]) -> None:
        try:
            said = json.dumps(await play(self.environment, number, asked))
        except (Exception, asyncio.CancelledError) as error:  # code of an episode may cancel itself
            said = json.dumps({"error": f"{type(error).__name__}: {error}"})
        finally:
            del self.episodes[number]
        self.writer.write(frame(f'{{"answer": {number}, "value": {said}}}'))

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serves calls until the other end closes the connection."""
        async with self.environment.serving():
            self.writer.write(frame('{"event": "ready", "value": {}}'))
            with suppress(EOFError):
                while True:
                    sizes = SIZES.unpack(await reader.readexactly(SIZES.size))
                    _, items, _ = [await reader.readexactly(size) for size in sizes]
                    for item in json.loads(items):
                        self._take(item)
            under_way = list(self.episodes.values())
            for episode in under_way:
                episode.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _take(self, item: dict[str, Any]) -> None:
        if "call" in item:
            number = item["call"]
            playing = self._episode(number, item["arguments"])
            self.episodes[number] = asyncio.create_task(playing)
        elif episode := self.episodes.get(item["cancel"]):
            episode.cancel()


async def serve(settings: dict[str, Any], connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        environment = load(settings)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
        writer.write(frame(json.dumps({"event": "ready", "value": said})))
        await writer.drain()
        return
    await EpisodeServer(environment, writer).serve(reader)


def main() -> None:
    settings, where = json.loads(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (an environment in a user's file)
    if where != "rows":
        asyncio.run(serve(settings, socket.socket(fileno=int(where))))
        return
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        said: Any = {"rows": rows_of(load(settings), settings.get("size"))}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    json.dump(said, out)


if __name__ == "__main__":
    main()
