"""A saved folder goes to the hub whole: held against a server that speaks the hub's protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from pentad.core.errors import RunError, UserError
from pentad.weights.hf import SINGLE, plan_folder, push_to_hub, save_folder
from pentad.weights.transfer import TensorInfo


class Hub(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.address}/me/model"}
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            answer = {"files": [{**mode, "shouldIgnore": False} for mode in modes]}
        elif self.path.endswith("/commit/main"):
            url = f"{self.server.address}/me/model/commit/abc"
            answer = {"commitUrl": url, "commitOid": "abc", "success": True}
        else:
            answer = {}
        self.reply(answer)

    def do_GET(self):
        self.reply({"valid": True, "warnings": [], "errors": []})

    def reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def saved(folder):
    tensor = torch.arange(6.0)
    infos = {"a": TensorInfo((6,), torch.float32)}
    save_folder(folder, [("a", tensor)], plan_folder(infos, {"model_type": "toy"}))
    return folder


def test_every_file_arrives_as_it_is(tmp_path, hub):
    folder = saved(tmp_path / "m")
    url = push_to_hub(folder, "me/model", token="secret", endpoint=hub.address)
    assert url.startswith(f"{hub.address}/me/model")
    created = json.loads(next(body for path, _, body in hub.seen if path == "/api/repos/create"))
    assert created["name"] == "model" and created["visibility"] == "private"
    (commit,) = [entry for entry in hub.seen if entry[0].endswith("/commit/main")]
    assert commit[1] == "Bearer secret"
    lines = [json.loads(line) for line in commit[2].splitlines()]
    files = {x["value"]["path"]: x["value"]["content"] for x in lines if x["key"] == "file"}
    assert set(files) == {SINGLE, "config.json"}
    for name, content in files.items():
        assert base64.b64decode(content) == (folder / name).read_bytes()


def test_a_torn_folder_never_leaves_the_machine(tmp_path, hub):
    folder = saved(tmp_path / "m")
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes, but its header says"):
        push_to_hub(folder, "me/model", token="secret", endpoint=hub.address)
    with pytest.raises(UserError, match="a repository is named user/name"):
        push_to_hub(saved(tmp_path / "n"), "model", token="secret", endpoint=hub.address)
    assert hub.seen == []


def test_a_hub_that_is_not_there_is_told_in_a_sentence(tmp_path, hub):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RunError, match="was not uploaded to me/model at http.*; check"):
        push_to_hub(saved(tmp_path / "m"), "me/model", token="secret", endpoint=hub.address)
