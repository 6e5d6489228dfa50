"""Two further chat APIs: OpenAI's Responses and Anthropic's Messages.

Each translates a request to one for chat completions, which is read, checked and run like any
other, and translates the answer or its chunks back. Only labels of a request are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pentad.core.errors import Problem
from pentad.serve.wire import ApiError, listed, shown

Event = dict[str, Any]
"""An event of a stream; its `type` is also its name."""


class ChatDialect(Protocol):
    """Translates one request and its answer; chunks of a streamed answer are passed in order."""

    def chat(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the request for chat completions. Raises ApiError."""
        ...

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Translates the answer of chat completions."""
        ...

    def events(self, chunk: Mapping[str, Any]) -> Iterator[Event]: ...

    def closing(self) -> Iterator[Event]:
        """Yields the events after the last chunk."""
        ...


def refuse(name: str, value: object, rule: str) -> ApiError:
    problem = Problem(f"{name} = {shown(value)}", rule, "leave it out")
    return ApiError(problem, param=name.partition("[")[0], code="unsupported_parameter")


def translated(
    raw: Mapping[str, Any],
    names: Mapping[str, str],
    off: Mapping[str, tuple[Any, ...]],
    labels: tuple[str, ...],
    own: tuple[str, ...],
) -> dict[str, Any]:
    """Translates fields that chat completions have under the same or another name. `off`:
    unsupported fields -> values without effect. `own`: fields that the dialect reads itself."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None or name in labels or name in own or value in off.get(name, ()):
            continue
        if name in off:
            raise refuse(name, value, "is not built")
        if name not in names:
            raise refuse(name, value, "there is no such field")
        found[names[name]] = value
    if found.get("stream"):
        found["stream_options"] = {"include_usage": True}
    return found


def text_of(content: object, kinds: tuple[str, ...], where: str) -> str:
    """Returns the text of content: a text, or a list of text parts."""
    if isinstance(content, str):
        return content
    parts = listed(content)
    if not isinstance(content, list) or not all(
        isinstance(p, dict) and p.get("type") in kinds and isinstance(p.get("text"), str)
        for p in parts
    ):
        raise refuse(where, content, f"is neither text nor a list of {' or '.join(kinds)}")
    return "".join(part["text"] for part in parts)


def call_of(name: object, call_id: object, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


class MessagesDialect:
    """Anthropic's `/v1/messages`."""

    NAMES = {
        **{name: name for name in ("model", "max_tokens", "temperature", "top_p", "top_k")},
        **{"stop_sequences": "stop", "stream": "stream"},
    }
    OFF = {"thinking": ({"type": "disabled"},), "mcp_servers": ([],), "container": ()}
    LABELS = ("metadata", "service_tier", "inference_geo", "cache_control")
    REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def __init__(self) -> None:
        self.num_blocks = 0
        self.is_in_text = False
        self.finish: str | None = None
        self.usage: Mapping[str, int] = {}

    def chat(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        own = ("messages", "system", "tools", "tool_choice")
        body = translated(raw, self.NAMES, self.OFF, self.LABELS, own)
        messages = []
        if raw.get("system"):
            system = text_of(raw["system"], ("text",), "system")
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(listed(raw.get("messages"))):
            messages += self._messages(message, f"messages[{number}]")
        tools = [self._tool(tool) for tool in listed(raw.get("tools"))]
        choice = raw.get("tool_choice") or {"type": "auto"}
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in ("auto", "none"):
            raise refuse("tool_choice", choice, "only auto and none are supported")
        return body | {"messages": messages, "tools": tools, "tool_choice": kind}

    def _messages(self, message: object, where: str) -> Iterator[dict[str, Any]]:
        """Yields the messages for chat completions, where tool results are separate messages."""
        if not isinstance(message, dict):
            raise refuse(where, message, "is not an object")
        role, content = message.get("role"), message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts, calls = [], []
        for block in blocks:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                texts.append(text_of([block], ("text",), where))
            elif kind == "tool_use" and role == "assistant":
                calls.append(call_of(block.get("name"), block.get("id"), block.get("input")))
            elif kind == "tool_result" and role == "user":
                said = text_of(block.get("content") or "", ("text",), where)
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
            else:
                raise refuse(where, kind, "only text, tool_use and tool_result are supported")
        if texts or calls or not blocks:
            whole = {"role": role, "content": "".join(texts)}
            yield whole | ({"tool_calls": calls} if calls else {})

    def _tool(self, tool: object) -> dict[str, Any]:
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise refuse("tools", tool, "tools are named functions with an input_schema")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {},
        }
        return {"type": "function", "function": function}

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        [choice] = body["choices"]
        message = choice["message"]
        content = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            given = {"name": function["name"], "input": json.loads(function["arguments"])}
            content.append({"type": "tool_use", "id": call["id"], **given})
        return self._message(body, content, choice["finish_reason"], body["usage"])

    def _message(
        self, head: Mapping[str, Any], content: list[Any], finish: str | None, usage: Any
    ) -> dict[str, Any]:
        return {
            **{"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]},
            **{"content": content, "stop_reason": finish and self.REASONS[finish]},
            **{"stop_sequence": None, "usage": self._usage(usage)},
        }

    def _usage(self, usage: Mapping[str, int]) -> dict[str, int]:
        new, prompt = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
        return {"input_tokens": prompt, "output_tokens": new}

    def events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                message = self._message(chunk, [], None, {})
                yield {"type": "message_start", "message": message}
            if text := delta.get("content"):
                if not self.is_in_text:
                    yield from self._begin({"type": "text", "text": ""})
                    self.is_in_text = True
                yield self._delta({"type": "text_delta", "text": text})
            for call in delta.get("tool_calls", ()):
                yield from self._end()
                name = call["function"]["name"]
                block = {"type": "tool_use", "id": call["id"], "name": name, "input": {}}
                yield from self._begin(block)
                given = call["function"]["arguments"]
                yield self._delta({"type": "input_json_delta", "partial_json": given})
                self.is_in_text = True
            self.finish = choice["finish_reason"] or self.finish

    def _begin(self, block: Event) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": self.num_blocks, "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self.num_blocks, "delta": delta}

    def _end(self) -> Iterator[Event]:
        """Closes the open content block."""
        if self.is_in_text:
            yield {"type": "content_block_stop", "index": self.num_blocks}
            self.num_blocks, self.is_in_text = self.num_blocks + 1, False

    def closing(self) -> Iterator[Event]:
        yield from self._end()
        reason = self.REASONS[self.finish or "stop"]
        delta = {"stop_reason": reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(self.usage)}
        yield {"type": "message_stop"}


class ResponsesDialect:
    """OpenAI's `/v1/responses`, stateless: each request contains its conversation."""

    NAMES = {
        **{name: name for name in ("model", "temperature", "top_p", "stream", "tool_choice")},
        "max_output_tokens": "max_completion_tokens",
    }
    OFF = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "include": ([],),
        "reasoning": ({},),
        "truncation": ("disabled",),
        "text": ({"format": {"type": "text"}}, {}),
        "parallel_tool_calls": (True,),
        "stream_options": ({"include_obfuscation": False},),
    }
    LABELS = ("metadata", "store", "user", "service_tier", "prompt_cache_key", "safety_identifier")
    TEXTS = ("input_text", "output_text", "text")

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.sequence = 0
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.usage: Mapping[str, int] = {}

    def chat(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        body = translated(
            raw, self.NAMES, self.OFF, self.LABELS, ("input", "instructions", "tools")
        )
        messages: list[dict[str, Any]] = []
        if raw.get("instructions"):
            messages.append({"role": "system", "content": raw["instructions"]})
        given = raw.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(given)
        for number, item in enumerate(items):
            self._add(messages, item, f"input[{number}]")
        tools = [self._tool(tool) for tool in listed(raw.get("tools"))]
        return body | {"messages": messages, "tools": tools}

    def _add(self, messages: list[dict[str, Any]], item: object, where: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(item, dict) or kind not in (
            *("message", "function_call", "function_call_output"),
        ):
            rule = "only message, function_call and function_call_output are supported"
            raise refuse(where, kind, rule)
        if kind == "function_call":  # part of the previous answer, which may have no text
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(item.get("name"), item.get("call_id"), item.get("arguments"))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = text_of(item.get("output"), self.TEXTS, where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        else:
            said = text_of(item.get("content"), self.TEXTS, where)
            messages.append({"role": item.get("role"), "content": said})

    def _tool(self, tool: object) -> dict[str, Any]:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise refuse("tools", tool, "only tools of type function are supported")
        kept = {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k)}
        return {"type": "function", "function": kept}

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        [choice] = body["choices"]
        self._take_head(body)
        self.text = choice["message"]["content"] or ""
        self.calls = choice["message"].get("tool_calls", [])
        self.finish, self.usage = choice["finish_reason"], body["usage"]
        return self._response()

    def _take_head(self, body: Mapping[str, Any]) -> None:
        fixed = {"object": "response", "tools": [], "tool_choice": "auto"}
        self.head = {"id": f"resp_{body['id']}", "created_at": body["created"], **fixed}
        self.head |= {"model": body["model"], "parallel_tool_calls": True}

    def _response(self) -> dict[str, Any]:
        is_cut = self.finish == "length"
        status = "in_progress" if self.finish is None else "incomplete" if is_cut else "completed"
        new, prompt = self.usage.get("completion_tokens", 0), self.usage.get("prompt_tokens", 0)
        usage = {
            **{"input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new},
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            **self.head,
            **{"status": status, "output": self._output(), "error": None},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": None if self.finish is None else usage,
        }

    def _output(self) -> list[dict[str, Any]]:
        if self.finish is None:
            return []
        texts = [self._message(self.text)] if self.text or not self.calls else []
        return [*texts, *map(self._call, self.calls)]

    def _message(self, text: str, status: str = "completed") -> dict[str, Any]:
        head = {"id": f"msg_{self.head['id']}", "type": "message", "role": "assistant"}
        content = [self._part(text)] if status == "completed" else []
        return {**head, "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed"}
        return {**head, "call_id": call["id"], **call["function"]}

    def events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                self._take_head(chunk)
                yield self._event("created", response=self._response())
                yield self._event("in_progress", response=self._response())
            if text := delta.get("content"):
                if not self.text:
                    yield from self._begin_text()
                self.text += text
                yield self._text_event("output_text.delta", delta=text, logprobs=[])
            self.calls += delta.get("tool_calls", [])
            self.finish = choice["finish_reason"] or self.finish

    def closing(self) -> Iterator[Event]:
        self.finish = self.finish or "stop"
        if not self.text and not self.calls:
            yield from self._begin_text()
        for index, item in enumerate(self._output()):
            if item["type"] == "message":
                yield self._text_event("output_text.done", text=self.text, logprobs=[])
                yield self._text_event("content_part.done", part=self._part(self.text))
            else:
                place = {"output_index": index, "item_id": item["id"]}
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("output_item.added", output_index=index, item=begun)
                given = item["arguments"]
                yield self._event("function_call_arguments.delta", delta=given, **place)
                yield self._event("function_call_arguments.done", arguments=given, **place)
            yield self._event("output_item.done", output_index=index, item=item)
        name = "incomplete" if self.finish == "length" else "completed"
        yield self._event(name, response=self._response())

    def _begin_text(self) -> Iterator[Event]:
        item = self._message("", "in_progress")
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._text_event("content_part.added", part=self._part(""))

    def _text_event(self, name: str, **more: Any) -> Event:
        place = {"output_index": 0, "content_index": 0, "item_id": f"msg_{self.head['id']}"}
        return self._event(name, **place, **more)

    def _event(self, name: str, **more: Any) -> Event:
        self.sequence += 1
        return {"type": f"response.{name}", "sequence_number": self.sequence - 1, **more}


def as_event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
