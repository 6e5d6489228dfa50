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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from pentad.config.resolve import PATHS
from pentad.core.errors import UserError
from pentad.serve.wire import is_local, name_of
from pentad.telemetry.record import finite
from pentad.view.compare import differing_keys, first_parting
from pentad.view.export import export_page
from pentad.view.fields import field_meanings
from pentad.view.lines import newest_mtime
from pentad.view.run import BUDGET_S, RunView, find_runs, is_recipe
from pentad.view.samples import SampleFilter

log = logging.getLogger(__name__)

MAX_POINTS = 4000
MAX_LISTED = 200
MAX_TIMELINE_BYTES = 2 << 20
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

PlanOf = Callable[[Path, Sequence[str]], dict[str, Any]]
"""A recipe and its overrides -> what `pentad plan --json` prints of it."""


class RunPages:
    """The runs at some places, and the endpoints that show them."""

    def __init__(
        self, places: list[Path], plan_of: PlanOf | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.places = places
        self.plan_of = plan_of
        self.overrides = overrides
        """Of the recipes among the places."""
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
        others = [place for place in self.places if is_recipe(place) or not place.exists()]
        for folder in [*found, *others]:
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
            "/api/timeline": self.timeline,
            "/api/samples": self.samples,
            "/api/group": self.group,
            "/api/plan": lambda request: self.plan_for(self._run(request)),
            "/api/fields": lambda request: field_meanings(),
        }
        routes = [Route(path, _json(answer)) for path, answer in answers.items()]
        routes += [Route("/export.csv", _json(self.csv)), Route("/export.html", _json(self.html))]
        routes += [Route("/" if n == "index.html" else f"/{n}", _static(n)) for n in STATIC]
        return Starlette(routes=routes)

    def _run(self, request: Request) -> RunView:
        self.look()
        id = request.query_params.get("run", "")
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
            has_plan = run.state() == "recipe" or bool(run.config)
            return run.summary() | {"has_plan": self.plan_of is not None and has_plan}

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

    def timeline(self, request: Request) -> Any:
        """Lines of timeline.jsonl with spans in a time."""
        run, given = self._run(request), request.query_params
        begin, end = (_number(given, name, float) or 0.0 for name in ("from", "to"))
        with run.lock:
            run.timeline.look()
            if not run.timeline.size:
                return []
            found = run.timeline.between("from_s", begin, end, MAX_TIMELINE_BYTES)
        return [line for line in found if isinstance(line.get("spans"), list)]

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
            found["environments"] = [name for name in run.samples.environments if name]
            return found | {"step": wanted.step, "progress": run.samples.file.share}

    def group(self, request: Request) -> Any:
        run, given = self._run(request), request.query_params
        step, gid = _number(given, "step", int), _number(given, "gid", int)
        if step is None or gid is None:
            raise UserError("/api/group: needs step and gid.")
        with run.lock:
            run.samples.advance(BUDGET_S)
            return run.groups.group(step, gid, run.samples.group(step, gid))

    def plan_for(self, run: RunView) -> dict[str, Any]:
        """Made once for a config."""
        is_bare = run.state() == "recipe"
        recipe = run.folder if is_bare else run.folder / "config.yaml"
        if self.plan_of is None or not (is_bare or run.config):
            raise UserError(f"{run.folder}: its manifest has no config to plan.")
        key = f"{recipe} {newest_mtime(recipe)}"
        if key not in self._plans:
            given = self.overrides if is_bare else paths_from(run.home, run.config)
            self._plans[key] = self.plan_of(recipe, given)
        return self._plans[key]

    def csv(self, request: Request) -> Response:
        run = self._run(request)
        with run.lock:
            run.advance(60.0)
        return StreamingResponse(_csv_lines(run), media_type="text/csv", headers=_saved(run, "csv"))

    def html(self, request: Request) -> Response:
        run = self._run(request)
        page = export_page(run, self.plan_for if self.plan_of else None)
        headers = _saved(run, "html")
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _saved(run: RunView, suffix: str) -> dict[str, str]:
    name = f"{run.id.replace('~', '-')}.{suffix}"
    return {"content-disposition": f'attachment; filename="{name}"'}


def paths_from(home: Path, config: Mapping[str, Any]) -> list[str]:
    """Overrides that find files of a run that was started in another folder than this program."""
    found = []
    for key in PATHS:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, str) and not Path(value).exists() and (home / value).exists():
            found.append(f"{key}={home / value}")
    return found


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
            if isinstance(body, Response):
                return body
        except UserError as error:
            body, status = {"error": str(error)}, 404
        except OSError as error:
            body, status = {"error": f"{error.filename}: cannot be read ({error.strerror})."}, 503
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            log.exception("%s", request.url)
            what = "a record has another form than this version reads"
            body, status = {"error": f"{request.url.path}: {what} ({error!r})."}, 500
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
