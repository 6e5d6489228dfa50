"""The server of the page: static files, and the records of runs as JSON. Read-only.

Texts of a run are sent as JSON and inserted as text. The content security policy of the page allows
scripts of this server only, so that a script in a sample is not run.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import hmac
import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from http.cookies import SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pentad.config.resolve import PATHS
from pentad.core.errors import UserError
from pentad.serve.wire import is_local, name_of
from pentad.telemetry.record import BLOCKS, StepRecord, finite
from pentad.view.lines import newest_mtime, number, parse, part
from pentad.view.run import BUDGET_S, RunView, find_runs, is_recipe
from pentad.view.samples import SampleFilter

log = logging.getLogger(__name__)

MAX_POINTS = 4000
MAX_LISTED = 200
MAX_TIMELINE_BYTES = 2 << 20
LOOK_S = 3.0
"""Interval in seconds between searches for new runs."""
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

T = TypeVar("T")
PlanOf = Callable[[Path, Sequence[str]], dict[str, Any]]
"""(recipe, overrides) -> output of `pentad plan --json`."""


class RunPages:
    """The runs below some paths, and the endpoints for them."""

    def __init__(
        self, places: list[Path], plan_of: PlanOf | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.places = places
        self.plan_of = plan_of
        self.overrides = overrides
        """Overrides for the recipes among the paths."""
        self.runs: dict[str, RunView] = {}
        self._looked_at = float("-inf")
        self._plans: dict[str, dict[str, Any]] = {}

    def look(self) -> None:
        """Adds new runs at the paths. A run is named by the end of its path, as long as needed to
        be unique."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        known = {run.folder for run in self.runs.values()}
        others = [place for place in self.places if is_recipe(place) or not place.exists()]
        for folder in [*find_runs(self.places), *others]:
            if folder not in known:
                names = ("/".join(folder.parts[-n:]) for n in range(2, len(folder.parts) + 1))
                runs = (RunView(folder, name) for name in names)
                run = next((run for run in runs if run.id not in self.runs), None)
                if run is not None:
                    self.runs[run.id] = run

    def app(self) -> Starlette:
        of_run: dict[str, Callable[[RunView, Query], Any]] = {
            **{"/api/run": self.run, "/api/series": series, "/api/step": step},
            **{"/api/timeline": timeline, "/api/samples": samples, "/api/group": group},
            **{"/export.csv": csv_file, "/export.html": self.html},
        }
        routes = [Route(path, _answered(self._of_run(answer))) for path, answer in of_run.items()]
        others: dict[str, Callable[[Request], Any]] = {
            **{"/api/runs": self.list_runs, "/api/compare": self.compare, "/api/plan": self.plan},
            "/api/fields": lambda request: field_meanings(),
        }
        routes += [Route(path, _answered(answer)) for path, answer in others.items()]
        routes += [Route("/" if n == "index.html" else f"/{n}", _static(n)) for n in STATIC]
        return Starlette(routes=routes)

    def _of_run(self, answer: Callable[[RunView, Query], Any]) -> Callable[[Request], Any]:
        """Makes an endpoint that calls `answer` for the requested run, with the run locked."""

        def of_request(request: Request) -> Any:
            run = self._run(request.query_params.get("run", ""))
            with run.lock:
                return answer(run, Query(request.query_params))

        return of_request

    def _run(self, id: str) -> RunView:
        self.look()
        if id not in self.runs:
            raise UserError(f"run = {id}: no run of this name is open here.")
        return self.runs[id]

    def list_runs(self, request: Request) -> Any:
        self.look()
        briefs = [run.brief() for run in self.runs.values()]
        briefs.sort(key=lambda brief: (brief["state"] != "running", -brief["time"]))
        return {"runs": briefs}

    def compare(self, request: Request) -> Any:
        runs = [self._run(id) for id in request.query_params.getlist("run")]
        for run in runs:
            with run.lock:
                run.advance()
        partings = [first_parting(runs[0], other) for other in runs[1:]]
        return {"keys": differing_keys([run.config for run in runs]), "partings": partings}

    def run(self, run: RunView, given: Query) -> Any:
        """The summary of a run; empty if the client already has it."""
        run.advance()
        if given.get("sign") == run.sign():
            return {}
        return run.summary() | {"has_plan": self.has_plan(run)}

    def has_plan(self, run: RunView) -> bool:
        """Whether the run has a plan page; runs on examples, without samplers, have none."""
        last = run.steps.last
        samples = last is None or part(last, "funnel", "drawn") is not None
        has_config = (run.folder / "config.yaml").is_file()
        return self.plan_of is not None and (run.state() == "recipe" or (has_config and samples))

    def plan(self, request: Request) -> Any:
        return self.plan_for(self._run(request.query_params.get("run", "")))

    def plan_for(self, run: RunView) -> dict[str, Any]:
        """The plan of a run, computed once per config."""
        is_bare = run.state() == "recipe"
        recipe = run.folder if is_bare else run.folder / "config.yaml"
        if self.plan_of is None or not self.has_plan(run):
            raise UserError(
                f"{run.folder}: there is no plan for it: it has no config.yaml, or it trains on "
                "examples, and only runs with a sampler have one."
            )
        key = f"{recipe} {newest_mtime(recipe)}"
        if key not in self._plans:
            given = self.overrides if is_bare else paths_from(run.home, run.config)
            self._plans[key] = self.plan_of(recipe, given)
        return self._plans[key]

    def html(self, run: RunView, given: Query) -> Response:
        page = export_page(run, self.plan_for if self.has_plan(run) else None)
        return _file(run, "html", iter([page]))


class Query(dict[str, str]):
    """The parameters of a request; empty values count as missing."""

    def of(self, name: str, kind: Callable[[str], T]) -> T | None:
        if not self.get(name):
            return None
        try:
            return kind(self[name])
        except ValueError as error:
            raise UserError(f"{name} = {self[name]}: must be a number.") from error


def series(run: RunView, given: Query) -> Any:
    keys = [key for key in given.get("keys", "").split(",") if key]
    points = min(MAX_POINTS, max(2, given.of("points", int) or 1000))
    if run.steps.last is None:  # otherwise already read by the summary request
        run.advance()
    return run.steps.series(keys, given.of("from", float), given.of("to", float), points)


def step(run: RunView, given: Query) -> Any:
    run.advance()
    record = run.steps.record(given.of("step", int) or -1)
    if record is None:
        raise UserError(f"step = {given.get('step')}: steps.jsonl of this run has no such step.")
    return record


def timeline(run: RunView, given: Query) -> Any:
    """Lines of timeline.jsonl with spans in a time range."""
    run.timeline.look()
    begin, end = (given.of(name, float) or 0.0 for name in ("from", "to"))
    found = run.timeline.between("from_s", begin, end, MAX_TIMELINE_BYTES)
    lines = [line for _, text in found if (line := parse(text)) and number(line.get("from_s"))]
    return [line | {"spans": list(filter(is_span, line.get("spans") or ()))} for line in lines]


def is_span(value: Any) -> bool:
    match value:
        case [str(), str(), begin, length]:
            return None not in (number(begin), number(length))
    return False


def samples(run: RunView, given: Query) -> Any:
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    named = {entry.name: kinds[str(entry.type).partition(" ")[0]] for entry in fields(SampleFilter)}
    asked: dict[str, Any] = {n: given.of(n, kind) for n, kind in named.items() if given.get(n)}
    wanted = SampleFilter(**asked)
    index = run.samples
    index.advance(2 * BUDGET_S if index.position else 0.0)  # before the index is continued
    last_step = index.last_step()
    if given.get("last"):
        wanted = replace(wanted, step=last_step)
    skip, most = given.of("skip", int) or 0, min(MAX_LISTED, given.of("most", int) or 50)
    return index.find(wanted, skip, most, 1.0) | {
        **{"last_step": last_step, "step": wanted.step, "progress": index.share},
        "words": {name: list(known) for name, known in index.words.items()},
    }


def group(run: RunView, given: Query) -> Any:
    step, gid = given.of("step", int), given.of("gid", int)
    if step is None or gid is None:
        raise UserError("/api/group: needs step and gid.")
    run.samples.advance(0.0)
    return run.groups.group(step, gid, run.samples.group(step, gid))


def csv_file(run: RunView, given: Query) -> Response:
    run.advance(60.0)
    columns = run.steps.columns
    names = ["step", *sorted(name for name in columns.by_path if name != "step")]
    return _file(run, "csv", _csv_lines(names, [columns.of(name) for name in names]))


def _csv_lines(names: list[str], columns: list[np.ndarray]) -> Iterator[str]:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(names)
    yield line.getvalue()
    for row in zip(*columns, strict=True):
        yield ",".join("" if value != value else f"{value:.15g}" for value in row) + "\n"


def _file(run: RunView, suffix: str, content: Iterator[str]) -> Response:
    name = re.sub(r"[^\w.-]", "-", run.name, flags=re.ASCII)
    headers = {"content-disposition": f'attachment; filename="{name}.{suffix}"'}
    kind = {"csv": "text/csv", "html": "text/html"}[suffix]
    return StreamingResponse(content, media_type=f"{kind}; charset=utf-8", headers=headers)


def paths_from(home: Path, config: dict[str, Any]) -> list[str]:
    """Overrides that make the paths of a run started in another folder absolute."""
    given = {key: part(config, *key.split(".")) for key in PATHS}
    return [
        f"{key}={home / value}"
        for key, value in given.items()
        if isinstance(value, str) and not Path(value).exists() and (home / value).exists()
    ]


def _answered(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Makes an endpoint of a function; errors become messages. Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        try:
            body, status = answer(request), 200
            if isinstance(body, Response):
                return body
        except UserError as error:
            body, status = {"error": str(error)}, 404
        except OSError as error:
            body, status = {"error": f"{error.filename}: cannot be read ({error.strerror})."}, 503
        except Exception as error:  # files may have any content: the page shows the error
            log.exception("%s", request.url)
            what = "a record has another form than this version reads"
            body, status = {"error": f"{request.url.path}: {what} ({error!r})."}, 500
        text = json.dumps(finite(body), allow_nan=False)
        return Response(text, status, media_type="application/json")

    return endpoint


def _static(name: str) -> Callable[[Request], Response]:
    body = (files("pentad.view") / "static" / name).read_bytes()
    return lambda request: Response(body, media_type=STATIC[name])


class ViewGuard:
    """Checks requests before the application. At loopback only loopback host names are accepted,
    because a web page can make a browser send requests here under another name (DNS rebinding);
    elsewhere the address contains a token, which the first request turns into a cookie."""

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
            return PlainTextResponse("A page at loopback is available only as localhost.", 403)
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


NAMES = ("experiment_name", "trial_name", "fileroot", "user")
"""Keys that only name a run."""
WATCHED = ("loss", "grad_norm", "lr", "rl/reward_mean", "rl/length_mean")
MISSING = "(no such key)"


# Comparison of runs.


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each config."""
    flat = [dict(_leaves(config, "")) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one if key not in NAMES)
    values = {key: [one.get(key, MISSING) for one in flat] for key in keys}
    return {key: given for key, given in values.items() if any(v != given[0] for v in given)}


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(path, value)]
    parts = [_leaves(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    return [leaf for part in parts for leaf in part]


def first_parting(one: RunView, other: RunView) -> dict[str, Any] | None:
    """The first step at which a number of the training differs; None if there is none so far."""
    steps_one, steps_other = one.steps.columns.of("step"), other.steps.columns.of("step")
    common, rows_one, rows_other = np.intersect1d(steps_one, steps_other, return_indices=True)
    found: list[tuple[float, str, float, float]] = []
    for key in WATCHED:
        left = one.steps.columns.of(key)[rows_one]
        right = other.steps.columns.of(key)[rows_other]
        apart = np.flatnonzero((left != right) & ~(np.isnan(left) & np.isnan(right)))
        if len(apart):
            row = int(apart[0])
            found.append((float(common[row]), key, float(left[row]), float(right[row])))
    if not found:
        return None
    step, key, left_value, right_value = min(found)
    values = [None if v != v else v for v in (left_value, right_value)]
    return {"step": int(step), "key": key, "values": values}


POINTS = 1000
NUM_SAMPLES = 400
"""Number of newest samples in the file; long texts are truncated as in lists."""
NUM_GROUPS = 12
"""Number of groups of the last kept step in the file, with all tokens."""


# Export to one HTML file, which needs no server.


def export_page(run: RunView, plan_of: Callable[[RunView], dict[str, Any]] | None) -> str:
    """The page of a run with its records inside."""
    static = files("pentad.view") / "static"
    script, style = ((static / name).read_text("utf-8") for name in ("app.js", "app.css"))
    # `</script>` in a text would end the element; JSON has another way to write `<`.
    data = json.dumps(finite(exported(run, plan_of))).replace("<", "\\u003c")
    script = script.replace("</script", "<\\/script")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; "
        "img-src data: blob:"
    )
    head, _, _ = (static / "index.html").read_text("utf-8").partition("<link")
    title = run.name.replace("&", "&amp;").replace("<", "&lt;")
    return (
        head.replace("<title>pentad view</title>", f"<title>{title}</title>")
        + f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        + f"<style>{style}</style>\n</head>\n<body>\n"
        + f'<div id="app"></div>\n<script type="application/json" id="data">{data}</script>\n'
        + f"<script>{script}</script>\n</body>\n</html>\n"
    )


def exported(run: RunView, plan_of: Callable[[RunView], dict[str, Any]] | None) -> dict[str, Any]:
    run.advance(60.0)
    run.samples.advance(60.0)
    kept = run.groups.steps()[-1:]
    groups = [(step, gid) for step in kept for gid in run.groups.gids(step)[:NUM_GROUPS]]
    found = {
        "run": run.summary() | {"has_plan": plan_of is not None},
        "series": run.steps.series(list(run.steps.columns.by_path), None, None, POINTS),
        "samples": run.samples.find(SampleFilter(), 0, NUM_SAMPLES, 10.0)["samples"][::-1],
        "groups": [run.groups.group(*one, run.samples.group(*one)) for one in groups],
        "fields": field_meanings(),
    }
    if plan_of is not None:
        try:
            found["plan"] = plan_of(run)
        except UserError as error:
            found["plan"] = {"error": str(error)}
    return found


def field_meanings() -> dict[str, dict[str, str]]:
    """Path of a number of a step, such as `rl/entropy` -> meaning and unit."""
    return {
        f"{block}/{entry.name}".lstrip("/"): {k: entry.metadata[k] for k in ("meaning", "unit")}
        for block, cls in {"": StepRecord, **BLOCKS}.items()
        for entry in dataclasses.fields(cls)
    }
