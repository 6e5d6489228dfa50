"""The subjects of the contract; real vLLM only where PENTAD_TEST_VLLM names its environment, or the
address of one that serves `model_folder`'s model."""

import os

import pytest
from subjects import (
    Subject,
    embedded_subject,
    remote_subject,
    sglang_subject,
    start_vllm,
    vllm_subject,
    write_folder,
)

from pentad.samplers.server_key import VARIABLE

VLLM = os.environ.get("PENTAD_TEST_VLLM")
needs_vllm = pytest.mark.skipif(VLLM is None, reason="make test-vllm runs it")

real = [pytest.mark.optional, needs_vllm]
SUBJECTS = ["embedded", "remote", "sglang-disk", pytest.param("vllm-disk", marks=real)]
TRANSPORTS = [
    "sglang-broadcast",
    "sglang-ipc",
    "sglang0.5.17-ipc",
    pytest.param("vllm-broadcast", marks=real),
]
"""Other ways for weights to come, asked of what is about weights."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def vllm_server(model_folder):
    """The address of a real server, and its key."""
    if VLLM.startswith("http://"):
        yield VLLM, os.environ.get(VARIABLE)
        return
    address, key, stop = start_vllm(model_folder, VLLM)
    yield address, key
    stop()


@pytest.fixture
def make_subject(request: pytest.FixtureRequest, model_folder, tmp_path):
    def make(name: str, on_update: str) -> Subject:
        kind, _, transport = name.partition("-")
        if kind == "embedded":
            return embedded_subject(on_update)
        if kind == "remote":
            return remote_subject(tmp_path, on_update)
        changes = {"weight_transport": transport, "on_update": on_update}
        if kind.startswith("sglang"):
            version = kind.removeprefix("sglang") or "0.5.23"
            return sglang_subject(model_folder, version, **changes)
        address, key = request.getfixturevalue("vllm_server")
        return vllm_subject(model_folder, address, key=key, **changes)

    return make


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, make_subject) -> Subject:
    return make_subject(request.param, "continue")


@pytest.fixture(params=[*SUBJECTS, *TRANSPORTS])
def installing(request: pytest.FixtureRequest, make_subject) -> Subject:
    return make_subject(request.param, "continue")


@pytest.fixture(params=[*SUBJECTS, *TRANSPORTS])
def reprefilling(request: pytest.FixtureRequest, make_subject) -> Subject:
    return make_subject(request.param, "reprefill")
