"""What the server refuses, and that nobody's request outlives them."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from typer.testing import CliRunner

from pentad.cli import serve as serve_command
from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.models import families
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.serve.server import bind

LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(server, path, body):
    return httpx.post(server.url + path, json=body, timeout=240)


def completion(**fields):
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 4} | fields


def chat(**fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields


def parts(*found):
    return [{"role": "user", "content": list(found)}]


def called(**call):
    """A conversation in which the assistant called a tool."""
    calls = [{"type": "function", "id": "c1", "function": call}]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


def said(role):
    return [{"role": role, "content": "Hi"}, {"role": "user", "content": "Hi"}]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BAD = [
    (chat(messages=called(name="f", arguments="{}")), 400, "messages", "does not show tool_calls"),
    (chat(messages=called(name="f", arguments="{")), 400, "messages", "are not JSON"),
    (chat(messages=called(arguments="{}")), 400, "messages", "give type, id and function"),
    (completion(model="other"), 404, "model", "model = other: this server has only tiny"),
    (completion(model="\ud800"), 404, "model", "model = \\ud800: this server has only tiny"),
    (completion(**{"\ud800": 1}), 400, "\\ud800", "\\ud800 = 1: there is no such field"),
    ({"prompt": "x"}, 400, "model", "model: is missing"),
    ({"model": "tiny"}, 400, "prompt", "prompt: is missing"),
    (completion(prompt=""), 400, "prompt", "prompt: is empty"),
    (completion(prompt=[]), 400, "prompt", "prompt: is empty"),
    (completion(prompt=[[1], []]), 400, "prompt", "prompt: is empty"),
    (completion(prompt={"a": 1}), 400, "prompt", "must be a text, a list of texts"),
    (completion(prompt=[1, "a"]), 400, "prompt", "must be a text, a list of texts"),
    (completion(prompt=[1, True]), 400, "prompt", "must be a text, a list of texts"),
    (completion(prompt=[1, 259]), 400, None, "prompt id 259: is outside the vocabulary of 259"),
    (completion(prompt=[-1]), 400, None, "prompt id -1: is outside the vocabulary"),
    (completion(prompt="a\ud800"), 400, "prompt", "half of a surrogate pair at character 1"),
    (completion(prompt=[1] * 4096), 400, "prompt", "do not fit the context of 4096 tokens; sho"),
    (completion(max_tokens=4095), 400, "prompt", "request at most 4094 new ones"),
    (completion(max_tokens=0), 400, "max_tokens", "max_tokens = 0"),
    (completion(max_tokens="4"), 400, "max_tokens", 'max_tokens = "4": input should be a valid'),
    (completion(n=0), 400, "n", "n = 0: input should be greater than or equal to 1"),
    (completion(n=10**9), 400, "n", "n = 1000000000: input should be less than or equal to 128"),
    (completion(n=True), 400, "n", "n = true"),
    (completion(n=128, prompt=["a"] * 9), 400, "n", "9 prompts would get more than 1024 answers"),
    (completion(temperature=-1), 400, None, "temperature = -1.0: must be 0 (greedy) or at least"),
    (completion(temperature=1e-38), 400, None, "must be 0 (greedy) or at least 0.001"),
    (completion(temperature=float("nan")), 400, None, "NaN is no number of JSON"),
    (completion(temperature=float("inf")), 400, None, "Infinity is no number of JSON"),
    (completion(top_p=1e-300), 400, None, "top_p = 1e-300: must be at least 1e-06"),
    (completion(temperature="hot"), 400, "temperature", 'temperature = "hot"'),
    (completion(top_p=0), 400, None, "top_p = 0.0"),
    (completion(top_p=1.5), 400, None, "top_p = 1.5"),
    (completion(stop=""), 400, None, "stop_strings: '': every text contains it"),
    (completion(stop=["a"] * 33), 400, "stop", "or a list of at most 32"),
    (completion(stop=[1]), 400, "stop", "must be a text of at most 1024 characters"),
    (completion(stop_token_ids=[259]), 400, None, "stop_ids: 259: is outside the vocabulary"),
    (completion(stop_token_ids=["a"]), 400, "stop_token_ids", 'stop_token_ids[0] = "a"'),
    (completion(seed=1.5), 400, "seed", "seed = 1.5"),
    (completion(logprobs=-1), 400, "logprobs", "logprobs = -1"),
    (completion(logprobs=21), 400, "logprobs", "should be less than or equal to 20"),
    (completion(echo=True), 400, "echo", "echo = true: prompts are not sent back"),
    (completion(best_of=3), 400, "best_of", "answers are not ranked; use n"),
    (completion(presence_penalty=0.5), 400, "presence_penalty", "penalties are not built"),
    (completion(logit_bias={"5": 1}), 400, "logit_bias", "logits are not changed"),
    (completion(frobnicate=1), 400, "frobnicate", "frobnicate = 1: there is no such field"),
    (completion(stream="yes"), 400, "stream", 'stream = "yes"'),
    (completion(stream_options={"x": 1}), 400, "stream_options", "stream_options"),
    (chat(messages=[]), 400, "messages", "messages = []"),
    (chat(messages="hi"), 400, "messages", 'messages = "hi"'),
    (chat(messages=[{"content": "x"}]), 400, "messages", 'is not an object with "role"'),
    (chat(messages=[{"role": "user"}]), 400, "messages", 'has no "content"'),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages", "content = 5 is neither"),
    (chat(messages=parts({"type": "image_url"})), 400, "messages", "there is only text"),
    (chat(messages=parts("a")), 400, "messages", "there is only text"),
    (
        chat(messages=[{"role": "assistant", "content": "x"}]),
        *(400, "messages", "the last one is the assistant's"),
    ),
    (chat(tools=[{"type": "function"}]), 400, "tools", 'tools[0] = {"type": "function"}: is not'),
    (chat(tools=[TOOL]), 400, "tools", "does not show tools; put them in a message"),
    (chat(tools=[TOOL], tool_choice="required"), 400, "tool_choice", "should be 'none' or 'auto'"),
    (chat(parallel_tool_calls=False), 400, "parallel_tool_calls", "are not limited"),
    (completion(tools=[TOOL]), 400, "tools", "there is no such field"),
    (chat(messages=said("wizard")), 400, "messages", 'message 1: role = "wizard" is none of sys'),
    (chat(messages=said("function")), 400, "messages", "is none of system, developer, user, ass"),
    (chat(response_format={"type": "json_object"}), 400, "response_format", "not constrained"),
    (chat(max_tokens=3, max_completion_tokens=4), 400, "max_tokens", "is different"),
    (chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs = true"),
    (chat(top_logprobs=21, logprobs=True), 400, "top_logprobs", "less than or equal to 20"),
]


@pytest.mark.parametrize(("body", "status", "param", "said"), BAD)
def test_bad_requests_get_a_sentence_in_openais_shape(server, body, status, param, said):
    path = CHAT if "messages" in body else COMPLETIONS
    # Not through httpx's own JSON: half a surrogate pair cannot be encoded there.
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert server.endpoints.num_open == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": 0.001},
        {"temperature": 1e30},
        {"top_p": 1e-6},
        {"top_k": 10**30},
        {"top_k": 1, "top_p": 1e-6, "temperature": 0.001},
        {"seed": -(10**30)},
        {"stop": "x" * 1024, "stop_token_ids": list(range(1, 259))},
        {"n": 128},
    ],
)
def test_odd_requests_are_answered_and_harm_nobody(server, odd):
    assert post(server, COMPLETIONS, completion(**odd)).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_fields_that_ask_for_nothing_are_accepted(server):
    off = {"echo": False, "best_of": 1, "presence_penalty": 0, "logit_bias": None, "user": "me"}
    off |= {"suffix": None, "stop": None, "seed": None, "logprobs": None, "top_k": -1}
    assert post(server, COMPLETIONS, completion(**off)).status_code == 200
    off = {
        "tools": [TOOL],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
    }
    off |= {"max_completion_tokens": 3, "max_tokens": 3}
    assert post(server, CHAT, chat(**off)).status_code == 200


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "body: is not JSON"),
        (b"\xff\xfe", "body: is not JSON"),
        (b"", "body: is not JSON"),
        (b"[1]", "body: is a list, not a JSON object"),
        (b"[" * 200_000, "body: is not JSON"),
    ],
)
def test_bodies_that_are_no_object(server, content, said):
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_bodies_of_another_type_and_unknown_paths_are_refused(server):
    answer = httpx.post(server.url + COMPLETIONS, content=json.dumps(completion()))
    assert (answer.status_code, "content-type" in answer.text) == (415, True)
    answer = httpx.get(f"{server.url}/v1/embeddings")
    assert (answer.status_code, "is not served here" in answer.json()["error"]["message"]) == (
        *(404, True),
    )
    answer = httpx.get(server.url + COMPLETIONS)
    assert (answer.status_code, "method not allowed" in answer.text) == (405, True)


def test_large_bodies_are_refused_declared_or_not(start_server):
    server = start_server(max_body_bytes=1000, body_timeout_s=3.0)
    answer = post(server, COMPLETIONS, completion(prompt="x" * 1000))
    assert (answer.status_code, "larger than 1000 bytes" in answer.text) == (413, True)

    def endless():
        for _ in range(100):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + COMPLETIONS, content=endless(), headers=headers)
    assert answer.status_code == 413

    connection = connect(server)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "500")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    assert server.endpoints.num_open == 0


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=240)


def wait_until(condition, timeout_s=240.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def stats(server):
    async def ask():
        return server.endpoints.service.sampler.stats()

    return server.call(ask)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, stream):
    before = stats(server)["tokens_drawn"]
    connection = connect(server)
    body = json.dumps(completion(stream=stream, n=2, **LONG))
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
    if stream:
        assert connection.getresponse().readline().startswith(b"data: ")
    wait_until(lambda: stats(server)["tokens_drawn"] > before)
    assert stats(server)["running"] == 2
    connection.close()
    wait_until(lambda: stats(server)["running"] == 0 and server.endpoints.num_open == 0)
    assert stats(server)["tokens_drawn"] - before < 2 * 4000
    assert not server.endpoints.service.sampler.open


def test_more_requests_than_allowed_are_told_to_come_again(start_server):
    server = start_server(max_requests=1)
    open_one = server.client.completions.create(
        model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(open_one))
    with pytest.raises(
        openai.RateLimitError, match="1 requests are in progress, which is the maximum"
    ):
        server.client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "requests": 1}
    open_one.close()
    wait_until(lambda: server.endpoints.num_open == 0)
    server.client.completions.create(model="tiny", prompt="x", max_tokens=1)


def test_stopping_lets_requests_under_way_end_and_takes_no_new_ones(start_server):
    server = start_server()
    stream = server.client.completions.create(
        model="tiny", prompt="x", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.end()
    wait_until(lambda: refuses(server))
    finished = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finished[-1] == "length"
    server.thread.join(240)
    assert not server.thread.is_alive()


def test_requests_that_do_not_end_in_time_are_told_so(start_server):
    server = start_server(drain_s=1)
    options = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "n": 32}
    options["extra_body"] = {"ignore_eos": True}
    stream = iter(server.client.completions.create(stream=True, **options))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.client.completions.create, **options)
        wait_until(lambda: server.endpoints.num_open == 2)
        server.end()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            whole.result(60)
    server.thread.join(240)
    assert not server.thread.is_alive()


def refuses(server):
    try:
        httpx.get(f"{server.url}/health")
    except httpx.TransportError:
        return True
    return False


def test_an_engine_that_failed_is_told(start_server):
    server = start_server()
    server.call(server.endpoints.service.sampler.close)
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        503,
        "the sampler is closed",
    )
    with pytest.raises(openai.InternalServerError, match="the sampler is closed"):
        server.client.completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.APIError, match="the sampler is closed"):
        list(server.client.completions.create(model="tiny", prompt="x", stream=True))


def test_an_address_in_use_is_a_sentence():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot listen: Address already in"):
            bind("127.0.0.1", port)
    with pytest.raises(UserError, match="is no address"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize("is_heard", [True, False])
def test_the_command_serves_at_loopback_and_ends_on_sigterm(
    byte_model, byte_folder, tmp_path, is_heard
):
    folder = tmp_path / "named"
    save_model(byte_model, folder, source_folder=byte_folder, tokenizer_folder=byte_folder)
    command = [sys.executable, "-m", "pentad.cli.main", "serve", str(folder), "--port", "0"]
    command += ["--device", "cpu", "--max-running", "8", "--drain-s", "5"]
    env = os.environ | {"PENTAD_API_KEY": "secret"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving named at http://127.0.0.1:")
        url = line.split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="is not the api_key of this server"):
            client.models.list()
        client = client.with_options(api_key="secret")
        answer = client.completions.create(model="named", prompt="x", max_tokens=3)
        assert answer.usage.completion_tokens <= 3
        if not is_heard:
            process.stdout.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
        if is_heard:
            assert "stopping" in process.stdout.read()
    finally:
        if process.poll() is None:
            process.kill()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), 2)


def test_a_model_file_of_your_own_is_served(byte_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "REGISTERED", {})
    folder = tmp_path / "own"
    shutil.copytree(byte_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from pentad.models.families.qwen3 import SPEC as QWEN3\n"
        "SPEC = replace(QWEN3, family='mine', "
        "read_dims=lambda hf: QWEN3.read_dims({**hf, 'model_type': 'qwen3'}))\n"
    )
    served = []
    monkeypatch.setattr(serve_command.asyncio, "run", lambda work: served.append(work.close()))
    model = create_model(dims_of(byte_folder), seed=1)
    save_model(model, tmp_path / "weights", source_folder=byte_folder)
    shutil.copy(tmp_path / "weights" / "model.safetensors", folder)
    words = ["serve", str(folder), "--port", "0", "--device", "cpu"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "model_type = mine: transformers cannot" in refused.output
    assert "or a model file of your own" in refused.output
    shown = CliRunner().invoke(app, [*words, "--model-files", f"{tmp_path}/mine.py:SPEC"])
    assert shown.exit_code == 0, shown.output
    assert served == [None]
