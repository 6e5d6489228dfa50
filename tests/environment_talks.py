"""What an environment says to a few answers, and servers of environments in processes."""

import asyncio
import contextlib
import json
import socket
import time

from pentad.rollout.executor import load_workflow
from pentad.rollout.hosted import HostedEnvironment


def talk(spec, *, fields=None, steps=(), calls=()):
    """What an environment says to a few answers, or calls of its tools, and its facts."""
    workflow = load_workflow(spec)

    async def episode():
        environment = HostedEnvironment(workflow.processes, workflow.facts, 30.0, 1)
        try:
            said = [await environment.reset(fields or {})]
            said += [await environment.step(text) for text in steps]
            for name, arguments in calls:
                call = {"name": name, "arguments": arguments}
                step = await environment.step(f"<tool_call>{json.dumps(call)}</tool_call>")
                said += step.observation
            return said
        finally:
            await environment.close()

    try:
        return workflow.facts, asyncio.run(episode())
    finally:
        workflow.close()


def until_it_listens(port, server, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError("the server does not listen")
