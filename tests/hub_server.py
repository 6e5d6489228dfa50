"""A server of this machine that speaks the endpoints of the Hugging Face hub which its client uses:
information on a repository, its tree, its files, creation, and commits. Tests go through the real
client."""

import base64
import hashlib
import json
import re
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/(.+))?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    commits: dict = field(default_factory=dict)
    """Commit -> {path: bytes}."""
    refs: dict = field(default_factory=dict)
    is_gated: bool = False


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.seen, self.cut_at = {}, [], None
        self.keys = set()
        """What requests had as Authorization."""
        self.connections = []

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self):
        """Clients keep connections open, and each has a thread that reads from it."""
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, kind, repo, files, *, is_gated=False, ref="main"):
        """A commit with these files, text or bytes; returns its hash."""
        files = {k: v.encode() if isinstance(v, str) else v for k, v in files.items()}
        known = self.repos.setdefault((f"{kind}s", repo), Repo())
        text = f"{len(known.commits)}{sorted((k, blob(v)) for k, v in files.items())}"
        commit = hashlib.sha1(text.encode()).hexdigest()
        known.commits[commit], known.refs[ref], known.is_gated = files, commit, is_gated
        return commit

    def paths(self, method):
        return [path for was, path in self.seen if was == method]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.route("GET")

    def do_HEAD(self):
        self.route("HEAD")

    def do_POST(self):
        self.route("POST")

    def route(self, method):
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.server.seen.append((method, path))
        self.server.keys.add(self.headers.get("Authorization"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            asked = json.loads(body)
            kind, repo = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
            self.server.repos.setdefault((f"{kind}s", repo), Repo())
            self.reply({"url": f"{self.server.address}/{repo}", "name": repo})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif found := API.fullmatch(path):
            self.api(*found.groups(), body)
        elif found := FILE.fullmatch(path):
            self.file(*found.groups())
        else:
            self.fail(404, "RepoNotFound")

    def known(self, kind, repo):
        found = self.server.repos.get((kind, repo))
        if found is None:
            self.fail(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
        elif found.is_gated and not self.headers.get("Authorization"):
            self.fail(401, "GatedRepo")
        else:
            return found
        return None

    def api(self, kind, name, action, rest, body):
        repo = self.known(kind, name)
        if repo is None:
            return
        if action in ("preupload", "commit"):
            self.upload(repo, kind, name, action, body)
            return
        revision = (rest or "main").partition("/")[0]
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self.fail(404, "RevisionNotFound")
            return
        files = repo.commits[commit]
        if action == "tree":
            self.reply(
                [
                    {"type": "file", "path": k, "size": len(v), "oid": blob(v)}
                    for k, v in files.items()
                ]
            )
        else:
            siblings = [{"rfilename": name} for name in files]
            self.reply({"id": name, "sha": commit, "siblings": siblings, "private": False})

    def upload(self, repo, kind, name, action, body):
        if action == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in asked]
            self.reply({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
            return
        lines = [json.loads(line) for line in body.splitlines()]
        new = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        commit = self.server.add(kind.removesuffix("s"), name, new)
        url = f"{self.server.address}/{name}/commit/{commit}"
        self.reply({"commitUrl": url, "commitOid": commit, "success": True})

    def file(self, prefix, name, revision, path):
        repo = self.known("datasets" if prefix else "models", name)
        if repo is None:
            return
        commit = repo.refs.get(revision, revision)
        data = repo.commits.get(commit, {}).get(path)
        if data is None:
            self.fail(404, "EntryNotFound" if commit in repo.commits else "RevisionNotFound")
            return
        etag, start = f'"{blob(data)}"', 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start = int(asked[1])
        rest = data[start : int(asked[2]) + 1 if asked and asked[2] else None]
        self.send_response(206 if asked else 200)
        if asked:
            end = start + len(rest) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", etag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if self.command == "GET":
            cut = self.server.cut_at
            self.wfile.write(rest if cut is None else rest[:cut])
            if cut is not None and cut < len(rest):
                self.close_connection = True

    def fail(self, code, word):
        self.reply({"error": word}, code, {"X-Error-Code": word, "X-Error-Message": word})

    def reply(self, answer, code=200, headers=None):
        data = json.dumps(answer).encode()
        self.send_response(code)
        for key, value in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def blob(data):
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving_hub():
    server = HubServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def client_of(server, cache, monkeypatch):
    """Has the client of this process use the server and a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
