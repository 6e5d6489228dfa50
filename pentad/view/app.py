"""The page's server: its files, and the run's records as JSON. It reads and never writes.

Texts of a run leave as JSON and are put on the page as text. The policy of the page allows scripts
of this server alone, so that a sample that is a script is not run.
"""

from __future__ import annotations

import csv
import hmac
import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from http.cookies import SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pentad.core.errors import UserError
from pentad.serve.wire import is_local, name_of
from pentad.telemetry.record import finite
from pentad.view.compare import differing_keys, first_parting
from pentad.view.export import export_page
from pentad.view.fields import field_meanings
from pentad.view.run import BUDGET_S, RunView, find_runs
from pentad.view.samples import SampleFilter

log = logging.getLogger(__name__)

MAX_POINTS = 4000
MAX_LISTED = 200
LOOK_S = 3.0
"""How often folders are searched for new runs."""
COOKIE = "pentad_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
STATIC = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
}

PlanOf = Callable[[Path, Mapping[str, Any]], dict[str, Any]]
"""The config.yaml of a run and its manifest -> what `pentad plan --json` prints of it."""


class RunPages:
    """The runs at some places, and the endpoints that show them."""

    def __init__(self, places: list[Path], plan_of: PlanOf | None = None) -> None:
        self.places = places
        self.plan_of = plan_of
        self.runs: dict[str, RunView] = {}
        self._looked_at = float("-inf")
        self._plans: dict[str, dict[str, Any]] = {}

    def look(self) -> None:
        """Adds runs that are new at the places."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        known = {run.folder for run in self.runs.values()}
        found = find_runs(self.places)
        missing = [place for place in self.places if not place.exists()]
        for folder in [*found, *missing]:
            if folder not in known:
                name = "~".join(folder.parts[-2:])
                id = name if name not in self.runs else f"{name}~{len(self.runs)}"
                self.runs[id] = RunView(folder, id)

    def app(self) -> Starlette:
        answers: dict[str, Callable[[Request], Any]] = {
            "/api/runs": self.list_runs,
            "/api/run": self.run,
            "/api/series": self.series,
            "/api/compare": self.compare,
            "/api/step": self.step,
            "/api/samples": self.samples,
            "/api/group": self.group,
            "/api/groups": self.groups,
            "/api/config": self.config,
            "/api/plan": self.plan,
            "/api/fields": lambda request: field_meanings(),
        }
        routes = [Route(path, _json(answer)) for path, answer in answers.items()]
        routes += [Route("/export.csv", self.csv), Route("/export.html", self.html)]
        routes += [Route("/" if n == "index.html" else f"/{n}", _static(n)) for n in STATIC]
        return Starlette(routes=routes)

    def _run(self, request: Request, name: str = "run") -> RunView:
        self.look()
        id = request.query_params.get(name, "")
        if id not in self.runs:
            raise UserError(f"run = {id}: no run of this name is open here.")
        return self.runs[id]

    def list_runs(self, request: Request) -> Any:
        self.look()
        briefs = [run.brief() for run in self.runs.values()]
        briefs.sort(key=lambda brief: (brief["state"] != "running", -brief["time"]))
        return {"runs": briefs, "places": [str(place) for place in self.places]}

    def run(self, request: Request) -> Any:
        run = self._run(request)
        with run.lock:
            run.advance()
            return run.summary() | {"has_plan": self.plan_of is not None and bool(run.config)}

    def series(self, request: Request) -> Any:
        run, given = self._run(request), request.query_params
        keys = [key for key in given.get("keys", "").split(",") if key]
        points = min(MAX_POINTS, max(2, _number(given, "points", int) or 1000))
        begin, end = _number(given, "from", float), _number(given, "to", float)
        with run.lock:
            run.advance(0.0 if run.steps.last else BUDGET_S)
            return run.steps.series(keys, begin, end, points)

    def compare(self, request: Request) -> Any:
        runs = [self.runs[id] for id in request.query_params.getlist("run") if id in self.runs]
        for run in runs:
            with run.lock:
                run.advance()
        partings = [first_parting(runs[0], other) for other in runs[1:]]
        return {"keys": differing_keys([run.config for run in runs]), "partings": partings}

    def step(self, request: Request) -> Any:
        run, number = self._run(request), _number(request.query_params, "step", int)
        with run.lock:
            run.advance()
            record = run.steps.record(-1 if number is None else number)
        if record is None:
            raise UserError(f"step = {number}: steps.jsonl of this run has no such step.")
        return record

    def samples(self, request: Request) -> Any:
        run, given = self._run(request), request.query_params
        kinds = {entry.name: str(entry.type) for entry in fields(SampleFilter)}
        wanted = SampleFilter(**{k: _value(given, k, kinds[k]) for k in kinds if given.get(k)})
        skip = _number(given, "skip", int) or 0
        most = min(MAX_LISTED, _number(given, "most", int) or 50)
        with run.lock:
            run.samples.advance(BUDGET_S)
            if given.get("last"):
                wanted = SampleFilter(step=run.samples.last_step(), order=wanted.order)
            found = run.samples.find(wanted, skip, most, 1.0)
            found["last_step"] = run.samples.last_step()
            return found | {"step": wanted.step, "progress": run.samples.file.share}

    def group(self, request: Request) -> Any:
        run, given = self._run(request), request.query_params
        step, gid = _number(given, "step", int), _number(given, "gid", int)
        if step is None or gid is None:
            raise UserError("/api/group: needs step and gid.")
        with run.lock:
            run.samples.advance(BUDGET_S)
            return run.groups.group(step, gid, run.samples.group(step, gid))

    def groups(self, request: Request) -> Any:
        run, step = self._run(request), _number(request.query_params, "step", int)
        with run.lock:
            return {"groups": run.groups.gids(-1 if step is None else step)}

    def config(self, request: Request) -> Any:
        return self._run(request).config

    def plan(self, request: Request) -> Any:
        return self.plan_for(self._run(request))

    def plan_for(self, run: RunView) -> dict[str, Any]:
        """Made once for a config."""
        if self.plan_of is None or not run.config:
            raise UserError(f"{run.folder}: its manifest has no config to plan.")
        key = str(run.manifest.get("config_digest"))
        if key not in self._plans:
            self._plans[key] = self.plan_of(run.folder / "config.yaml", run.manifest)
        return self._plans[key]

    def csv(self, request: Request) -> Response:
        try:
            run = self._run(request)
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        with run.lock:
            run.advance(60.0)
        name = run.id.replace("~", "-")
        headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
        return StreamingResponse(_csv_lines(run), media_type="text/csv", headers=headers)

    def html(self, request: Request) -> Response:
        try:
            run = self._run(request)
            page = export_page(run, self.plan_for if self.plan_of else None)
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        name = run.id.replace("~", "-")
        headers = {"content-disposition": f'attachment; filename="{name}.html"'}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _csv_lines(run: RunView) -> Iterator[str]:
    columns = run.steps.columns
    names = ["step", *sorted(name for name in columns.by_path if name != "step")]
    yield ",".join(names) + "\n"
    for row in range(columns.num_rows):
        line = io.StringIO()
        values = (columns.by_path[name][row].item() for name in names)
        csv.writer(line, lineterminator="\n").writerow(
            "" if v != v else f"{v:.15g}" for v in values
        )
        yield line.getvalue()


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint; a sentence where it has nothing to show. Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        try:
            body, status = answer(request), 200
        except UserError as error:
            body, status = {"error": str(error)}, 404
        except OSError as error:
            body, status = {"error": f"{error.filename}: cannot be read ({error.strerror})."}, 503
        text = json.dumps(finite(body), allow_nan=False)
        return Response(text, status, media_type="application/json")

    return endpoint


def _static(name: str) -> Callable[[Request], Response]:
    body = (files("pentad.view") / "static" / name).read_bytes()
    return lambda request: Response(body, media_type=STATIC[name])


def _number(given: Mapping[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    if not given.get(name):
        return None
    try:
        return kind(given[name])
    except ValueError as error:
        raise UserError(f"{name} = {given[name]}: must be a number.") from error


def _value(given: Mapping[str, str], name: str, kind: str) -> Any:
    if "int" in kind:
        return _number(given, name, int)
    return _number(given, name, float) if "float" in kind else given[name]


class ViewGuard:
    """The application behind its checks. At loopback only names of loopback are answered, since a
    web page can send a browser here under a name of its own; elsewhere the address holds a token,
    which the first request turns into a cookie."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.token = token
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self.check(Request(scope))

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await (refusal or self.app)(scope, receive, with_headers)

    def check(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This page only reads: GET.", 405)
        if self.token is None:
            name = name_of(request.headers.get("host", ""))
            if name in self.hosts or is_local(name):
                return None
            return PlainTextResponse("A page at loopback answers to localhost alone.", 403)
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self.token.encode()):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        held = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
        if held is not None and hmac.compare_digest(held.value.encode(), self.token.encode()):
            return None
        return PlainTextResponse(
            "Open the address with its token, as `pentad view` printed it.", 401
        )
