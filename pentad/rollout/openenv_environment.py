"""`openenv:URL`: an environment of an OpenEnv server, whose actions are the policy's answers.

Each episode has a separate WebSocket session with JSON messages: `reset` with the row and `step`
with an action, each answered by an observation. Only the server needs the package openenv-core.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

from pentad.core.folders import parse_json

TIMEOUT_S = 60.0
MAX_BYTES = 16 << 20
FULL, NO_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Error codes of the server: no free session, and an invalid action."""


class ServerError(Exception):
    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(f"{code}: {text}")


class OpenEnvEnvironment:
    def __init__(self, target: str) -> None:
        self._address = target.rstrip("/")
        with urlopen(f"{self._address}/schema", timeout=TIMEOUT_S) as answer:
            action = parse_json(answer.read(MAX_BYTES))["action"]
        self._properties = {**action.get("properties", {})}
        self._properties.pop("metadata", None)
        self._socket: ClientConnection | None = None

    def reset(self, **row: Any) -> str:
        """Resets the session with the row; the server forwards the columns that its environment
        takes. Retries, within the time limit of a call, if the server has no free session."""
        while True:
            try:
                self._socket = connect(
                    f"ws{self._address.removeprefix('http')}/ws", max_size=MAX_BYTES
                )
                return "\n" + self.show(self._ask("reset", row)["observation"])
            except ServerError as error:
                self.close()
                if error.code != FULL:
                    raise
                time.sleep(0.2)

    def step_text(self, text: str) -> tuple[str | None, float, bool]:
        """Steps the environment; an answer without a valid action ends the episode."""
        try:
            said = self._ask("step", self.parse(text))
        except ValueError:
            return None, 0.0, True
        except ServerError as error:
            if error.code != NO_ACTION:
                raise
            return None, 0.0, True
        reward = said.get("reward")
        is_done = bool(said.get("done"))
        return self.show(said["observation"]), 0.0 if reward is None else float(reward), is_done

    def show(self, observation: dict[str, Any]) -> str:
        """Returns the observation as text: its only text field, or its JSON."""
        values = list(observation.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(observation)

    def parse(self, text: str) -> dict[str, Any]:
        """Returns the action: the text if its schema has one text field, else the JSON object in
        the text. ValueError if there is none."""
        if [one.get("type") for one in self._properties.values()] == ["string"]:
            return dict.fromkeys(self._properties, text)
        found = parse_json(text[text.index("{") : text.rindex("}") + 1].encode())
        if not isinstance(found, dict):
            raise ValueError("an action is a JSON object")
        return found

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "reset comes first"
        self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
        answer = json.loads(self._socket.recv(timeout=None))
        found = dict(answer["data"])
        if answer["type"] == "error":
            raise ServerError(str(found.get("code")), str(found.get("message")))
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
