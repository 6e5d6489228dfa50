"""Servers that a run starts answer nobody without their key, on any path."""

import asyncio
import json
import os
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sglang_stand_in import write_environment
from subjects import policy, server_settings

from pentad.models.hf_weights import iter_hf
from pentad.samplers import sglang

RPC = {"method": "pentad_about", "args": []}
VLLM_PATHS = {
    "GET": ["/health", "/version", "/server_info", "/v1/models", "/metrics", "/openapi.json", "/"],
    "POST": ["/collective_rpc", "/pause", "/resume", "/sleep", "/reset_prefix_cache"],
    "OPTIONS": ["/collective_rpc"],
}
VLLM_PATHS["POST"] += ["/inference/v1/generate", "/v1/completions", "/abort_requests"]
SGLANG_PATHS = {
    "GET": ["/server_info", "/model_info"],
    "POST": ["/generate", "/update_weights_from_tensor", "/update_weights_from_disk"],
}
SGLANG_PATHS["POST"] += ["/pause_generation", "/abort_request", "/weights_checker"]


def status(address, method, path, key=None, body=RPC):
    at = urlsplit(address)
    connection = HTTPConnection(at.hostname, at.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, path, json.dumps(body), headers)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def refused(address, paths, key):
    """Where something else than 401 comes, without a key or with one that is not the server's."""
    asked = [(method, path) for method, found in paths.items() for path in found]
    return [
        (method, path, wrong)
        for method, path in asked
        for wrong in (None, "", "x" * len(key))
        if status(address, method, path, wrong) != 401
    ]


@pytest.mark.optional
@pytest.mark.skipif("PENTAD_TEST_VLLM" not in os.environ, reason="make test-vllm runs it")
def test_a_real_vllm_answers_nobody_without_its_key(vllm_server):
    address, key = vllm_server
    assert not refused(address, VLLM_PATHS, key)
    assert status(address, "GET", "/health", key) == 200
    assert status(address, "POST", "/collective_rpc", key) == 200


def test_an_sglang_of_a_run_answers_nobody_without_its_key(model_folder, tmp_path, monkeypatch):
    """And none of the run's keys is on a command line or in a file that others can read."""
    monkeypatch.setenv("PENTAD_SERVER_KEY", "of another server")
    env = write_environment(tmp_path / "env")
    settings = server_settings(
        model_folder, python=str(env), dtype="float32", transfer_folder=str(tmp_path / "transfer")
    )

    async def scenario():
        sampler = await sglang.start(settings, "sglang-0", tmp_path / "sglang.log")
        try:
            address, key = sampler.dialect.wire.address, sampler.dialect.settings.key
            line = Path(f"/proc/{sampler.process.child.pid}/cmdline").read_bytes()
            found = await asyncio.to_thread(refused, address, SGLANG_PATHS, key)
            await sampler.install(0, list(iter_hf(policy(1))))
            return key, line, found
        finally:
            await sampler.close()

    key, line, found = asyncio.run(scenario())
    assert not found
    assert len(key) >= 32 and key != "of another server" and key.encode() not in line
    readable = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    assert not [path for path in readable if key.encode() in path.read_bytes()]
    assert key in (tmp_path / "sglang.log").read_text()
    assert not list((tmp_path / "transfer").iterdir())
