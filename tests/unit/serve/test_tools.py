"""Tools and roles: what the model is shown is what the chat template makes of the request."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import httpx
import openai
import pytest

from pentad.core.types import Generation, Request, SamplingParams
from pentad.data.tokenizer import load_tokenizer
from pentad.serve.answers import Answer
from pentad.serve.jobs import Job, read_calls
from pentad.serve.wire import ChatBody

HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}Call as <tool_call>JSON</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% elif shows_tools is not defined %}"
    "<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def with_template(byte_folder, tmp_path_factory):
    def load(template):
        folder = tmp_path_factory.mktemp("tools") / "model"
        shutil.copytree(byte_folder, folder)
        (folder / "chat_template.jinja").write_text(template)
        return load_tokenizer(folder)

    return load


@pytest.fixture(scope="module")
def hermes(with_template):
    return with_template(HERMES)


@pytest.fixture(scope="module")
def client(start_server, hermes):
    return start_server(tokenizer=hermes).client


def shown(client, tokenizer, messages, **fields):
    """The text the model was given."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=2,
        extra_body={"return_token_ids": True},
        **fields,
    )
    return tokenizer.decode(answer.prompt_token_ids, keep_special=True)


def test_tools_and_calls_are_rendered_by_the_template(client, hermes):
    text = shown(client, hermes, CALLED, tools=[ADD])
    read = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    bare = {"role": "assistant", "tool_calls": [read]}
    assert text == hermes.inner.apply_chat_template(
        [*CALLED[:2], bare, CALLED[3]], tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    assert text.count("# Tools") == 1 and "Adds two numbers." in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    hidden = shown(client, hermes, CALLED[:2], tools=[ADD], tool_choice="none")
    assert hidden == shown(client, hermes, CALLED[:2]) and "Tools" not in hidden


def test_a_developer_is_the_system(client, hermes):
    developer = [{"role": "developer", "content": "Be brief."}, CALLED[1]]
    assert shown(client, hermes, developer) == shown(client, hermes, CALLED[:2])


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        (HERMES.replace("{% if tools %}", "{% if false %}"), {"tools": [ADD]}, "not show tools"),
        (HERMES.replace("m.tool_calls or []", "[]"), {}, "message 3: the chat template in"),
        (
            HERMES.replace("shows_tools is not defined", "false"),
            *({}, "message 4: the chat template in .* does not show messages of the role tool"),
        ),
    ],
)
def test_what_a_template_passes_over_is_refused(
    start_server, with_template, template, fields, said
):
    client = start_server(tokenizer=with_template(template)).client
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", messages=CALLED, **fields)


def answers(tokenizer, text, finish="stop"):
    """The whole answer, and the deltas of the streamed one put together."""
    params = SamplingParams(max_new_tokens=99, stop_ids=tokenizer.stop_ids)
    ids = tokenizer.encode(text) + ([tokenizer.eos_id] if finish == "stop" else [])
    job = Job(
        body=ChatBody(model="tiny", messages=[{"role": "user", "content": "x"}]),
        id="x",
        requests=(Request(id="x", prompt_ids=(1,), params=params, seeds=(0,)),),
        reads_calls=True,
    )
    generation = Generation(ids, [0.0] * len(ids), [0] * len(ids), finish)
    [choice] = Answer(job, "tiny", tokenizer).whole([generation])["choices"]
    streaming = Answer(job, "tiny", tokenizer)
    chunks = [streaming.progress(0, i, 0.0, []) for i in ids] + [streaming.closing(0, generation)]
    deltas = [chunk["choices"][0] for chunk in chunks if chunk is not None]
    content = "".join(delta["delta"].get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    last = deltas[-1]["finish_reason"]
    return choice, SimpleNamespace(content=content, calls=calls, finish_reason=last)


TWO = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "\u20ac"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now"}\n</tool_call>'
)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_calls_in_an_answer_are_parsed_whole_and_streamed(hermes, finish):
    choice, streamed = answers(hermes, TWO, finish)
    message = choice["message"]
    assert message["content"] == streamed.content == "Let me see.\n"
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in
             message["tool_calls"]]  # fmt: skip
    assert found == [("add", {"a": 1, "b": "\u20ac"}), ("now", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert streamed.calls == [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]
    wanted = "tool_calls" if finish == "stop" else "length"
    assert (choice["finish_reason"], streamed.finish_reason) == (wanted, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "no call at all, but a <tool",
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "a", "arguments": "text"}</tool_call>',
        '<tool_call>["a"]</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "never closed", "arguments": {}}',
        f"<tool_call>{'[' * 5000}</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(hermes, text):
    choice, streamed = answers(hermes, text)
    assert choice["message"]["content"] == streamed.content == text
    assert "tool_calls" not in choice["message"] and streamed.calls == []
    assert choice["finish_reason"] == streamed.finish_reason == "stop"


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("rest", [' Then:\n<tool_call>{"name": "ad', " That is all.", "<tool"])
def test_text_beside_calls_is_kept(hermes, rest, finish):
    """Also a call that is cut off."""
    choice, streamed = answers(hermes, TWO + rest, finish)
    assert choice["message"]["content"] == streamed.content == "Let me see.\n" + rest
    assert [call["function"]["name"] for call in streamed.calls] == ["add", "now"]
    assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", ["by_messages", "by_responses"])
def test_other_dialects_call_tools_and_get_their_results(start_server, hermes, client, stream):
    """The server and the clients are real; a random model would not call a tool, so the sampler
    says what is scripted."""
    pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    import dialect_clients

    server = start_server(tokenizer=hermes)
    turns, prompts = iter([dialect_clients.CALL, "two"]), []

    async def generate(request, on_token=None, on_top=None):
        prompts.append(hermes.decode(request.prompt_ids, keep_special=True))
        ids = [*hermes.encode(next(turns)), hermes.eos_id]
        for token in ids if on_token else ():
            on_token(0, token, -1.0)
        return [Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")]

    server.endpoints.service.sampler.generate = generate
    talk = getattr(dialect_clients, client)
    assert asyncio.run(talk(f"{server.url}/v1", "none", "tiny", stream))
    assert "# Tools" in prompts[0] and '"name": "f"' in prompts[0]
    assert prompts[1].startswith(prompts[0]) and '{"name": "f", "arguments": {}}' in prompts[1]
    assert "<tool_response>2</tool_response>" in prompts[1]


def test_equal_answers_have_equal_calls():
    assert read_calls(TWO, [1, 2]) == read_calls(TWO, [1, 2])
    assert read_calls(TWO, [1, 2])[1][0]["id"] != read_calls(TWO, [1, 3])[1][0]["id"]


def arguments(value):
    call = {"type": "function", "function": {"name": "f", "arguments": value}}
    return [CALLED[1], {"role": "assistant", "tool_calls": [call]}, CALLED[1]]


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": arguments("[" * 100_000)}, "are not JSON: it is nested too deep"),
        ({"messages": arguments("[" * 900 + "]" * 900)}, "nested more than 64 levels deep"),
        ({"messages": arguments(nested(100))}, "request: is nested more than 64 levels deep"),
        ({"messages": arguments('{"a": NaN}')}, "are not JSON: NaN is no number of JSON"),
        ({"tools": [{"type": "x", "y": nested(400)}]}, "nested more than 64 levels deep"),
        ({"user": nested(400)}, "nested more than 64 levels deep"),
        ({"tools": [ADD] * 129}, "tools: 129 tools: a request may have 128"),
        (
            {"messages": [CALLED[1], {"role": "assistant", "tool_calls": [CALL] * 1025}]},
            "messages: 1025 tool_calls: a request may have 1024",
        ),
    ],
)
def test_what_would_take_long_or_overflow_is_refused(client, fields, said):
    body = {"messages": CALLED[:2], "max_tokens": 1} | fields
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", **body)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(client, value):
    body = f'{{"model": "tiny", "prompt": "a", "temperature": {value}}}'
    answer = httpx.post(
        f"{client.base_url}completions", content=body, headers={"content-type": "application/json"}
    )
    said = f"body: is not JSON: {value} is no number of JSON."
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
