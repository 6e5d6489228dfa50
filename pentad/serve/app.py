"""The HTTP interface: routes, limits, errors in OpenAI's format, answers complete or as events."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pentad.core.errors import Problem, RunError, UserError
from pentad.infer.requests import RequestLimits
from pentad.serve.dialects import ChatDialect, MessagesDialect, ResponsesDialect, as_event
from pentad.serve.jobs import Job, chat_job, completion_job
from pentad.serve.service import (
    ClientGone,
    EmitEvent,
    Service,
    as_json,
    while_connected,
)
from pentad.serve.wire import (
    ApiError,
    ChatBody,
    ServeLimits,
    as_api_error,
    check_body,
    check_sizes,
    is_local,
    name_of,
    parse_json,
    read_chat,
    read_completion,
)

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
Answering = Callable[[Request, bool, ChatDialect | None], Awaitable[Response]]
"""Answers a request for chat (else for a completion), which a dialect translates."""
# Re-exported for modules with further endpoints.
HttpRequest = Request
HttpResponse = Response
App = Starlette


class Endpoints:
    """The endpoints of one service."""

    def __init__(self, service: Service, limits: ServeLimits) -> None:
        self.service = service
        self.limits = limits
        self.open: Counter[str] = Counter()
        """Address of a client -> number of its requests in progress."""

    @property
    def num_open(self) -> int:
        return self.open.total()

    def app(self) -> Starlette:
        return app_of(
            {
                "GET /health": self.health,
                "GET /v1/models": self.models,
                "GET /v1/models/{name:path}": self.model,
                **answering("/v1", self._answer),
            }
        )

    async def health(self, request: Request) -> Response:
        try:
            await self.service.sampler.health()
        except RunError as error:
            raise ApiError(str(error), status=503, kind="server_error") from error
        return JSONResponse({"status": "ok", "requests": self.num_open})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    @property
    def _engine_limits(self) -> RequestLimits:
        return self.service.sampler.engine.limits

    async def _answer(
        self, request: Request, is_chat: bool, dialect: ChatDialect | None
    ) -> Response:
        def job_of(sent: bytes) -> Job:
            given = read_object(sent, self.limits, dialect)
            body = read_chat(given) if is_chat else read_completion(given)
            self._check_model(body.model)
            tokenizer, limits = self.service.tokenizer, self._engine_limits
            if isinstance(body, ChatBody):
                return chat_job(body, tokenizer, limits)
            return completion_job(body, tokenizer, limits)

        client = request.client.host if request.client else ""
        self._check_room(client)
        body = await read_body(request, self.limits)
        self._check_room(client)
        self.open[client] += 1  # from here on: a slow upload does not count
        is_passed_on = False
        try:
            job = await self.service.text_work.run(len(body), lambda: job_of(body))
            if job.body.stream:
                is_passed_on = True
                return EventStream(self, job, client, dialect)
            work = self.service.answer(job)
            answer = await while_connected(disconnected(request.receive), work)
            return json_answer(dialect.whole(parse_json(answer)) if dialect else answer)
        finally:
            if not is_passed_on:
                self.ended(client)

    def ended(self, client: str) -> None:
        self.open[client] -= 1
        if not self.open[client]:
            del self.open[client]

    def _check_room(self, client: str) -> None:
        own, most = self.open[client], self.limits.max_client_requests
        is_full = self.num_open >= self.limits.max_requests
        if is_full or own >= most:
            rule = f"{self.num_open} requests are in progress, which is the maximum"
            if not is_full:
                rule = f"{own} requests of {client} are in progress, the maximum for a client"
            problem = Problem("server", rule, "try again later")
            raise ApiError(problem, status=429, kind="rate_limit_error", code="too_many_requests")

    def _check_model(self, name: str) -> None:
        if name != self.service.name:
            problem = Problem(f"model = {name}", f"this server has only {self.service.name}")
            raise ApiError(problem, status=404, param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.service.name,
            "object": "model",
            "created": 0,
            "owned_by": "pentad",
            "max_model_len": self._engine_limits.max_context,
        }


class EventStream(Response):
    """A streamed answer. The request counts as in progress until the last event is sent."""

    media_type = "text/event-stream"

    def __init__(
        self, endpoints: Endpoints, job: Job, client: str, dialect: ChatDialect | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.endpoints = endpoints
        self.dialect = dialect
        self.job = job
        self.client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(chunk: dict[str, Any]) -> None:
            await send(
                {
                    "type": "http.response.body",
                    "body": events_of(chunk, self.dialect),
                    "more_body": True,
                }
            )

        try:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            await while_connected(disconnected(receive), self._events(emit))
            await send({"type": "http.response.body", "body": last_events(self.dialect)})
        except ClientGone:
            log.info("%s: the client has disconnected", self.job.id)
        except asyncio.CancelledError:
            await emit(stopping().body())
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.endpoints.ended(self.client)

    async def _events(self, emit: EmitEvent) -> None:
        try:
            await self.endpoints.service.stream(self.job, emit)
        except RunError as error:  # headers are already sent: the failure can only be an event
            await emit(server_failed(error).body())


def events_of(chunk: dict[str, Any], dialect: ChatDialect | None) -> bytes:
    """Returns a chunk of an answer, or an error, as events of a stream."""
    if dialect is None:
        return b"data: " + as_json(chunk) + b"\n\n"
    if "error" in chunk:
        return as_event({"type": "error", **chunk})
    return b"".join(map(as_event, dialect.events(chunk)))


def last_events(dialect: ChatDialect | None) -> bytes:
    return b"".join(map(as_event, dialect.closing())) if dialect else b"data: [DONE]\n\n"


async def disconnected(receive: Receive) -> None:
    """Waits until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limits: ServeLimits) -> bytes:
    """Reads the body; raises ApiError. Bytes beyond the limit are not stored."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # this also blocks web pages of other origins
        problem = Problem(f"content-type = {kind or 'none'}", "must be application/json")
        raise ApiError(problem, status=415)
    limit = limits.max_body_bytes
    too_large = ApiError(
        Problem("body", f"is larger than {limit} bytes, the most this server reads"),
        status=413,
        closes=True,
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        rule = f"did not arrive within {limits.body_timeout_s} s"
        raise ApiError(Problem("body", rule), status=408, closes=True) from error
    return bytes(body)


def read_object(
    body: bytes, limits: ServeLimits, dialect: ChatDialect | None = None
) -> dict[str, Any]:
    """Parses the body as a JSON object within the limits. Raises ApiError."""
    check_body(body, limits)
    try:
        value = parse_json(body)
    except ValueError as error:
        raise ApiError(Problem("body", f"is not JSON: {error}")) from error
    if not isinstance(value, dict):
        raise ApiError(Problem("body", f"is a {type(value).__name__}, not a JSON object"))
    check_sizes(value, limits)
    if dialect is None:
        return value
    translated = dialect.chat(value)
    check_sizes(translated, limits)
    return translated


def answering(root: str, answer: Answering) -> dict[str, Endpoint]:
    """Returns the endpoints below `root` that sample, in all APIs."""

    def endpoint(
        *, is_chat: bool = True, dialect: Callable[[], ChatDialect] | None = None
    ) -> Endpoint:
        return lambda request: answer(request, is_chat, dialect() if dialect else None)

    messages = endpoint(dialect=MessagesDialect)
    return {
        f"POST {root}/completions": endpoint(is_chat=False),
        f"POST {root}/chat/completions": endpoint(),
        f"POST {root}/responses": endpoint(dialect=ResponsesDialect),
        f"POST {root}/messages": messages,
        f"POST {root}/v1/messages": messages,  # Anthropic's client adds /v1
    }


def app_of(endpoints: Mapping[str, Endpoint]) -> Starlette:
    """Maps `METHOD /path` to an endpoint; exceptions are answered in OpenAI's format."""
    routes = []
    for place, endpoint in endpoints.items():
        method, _, path = place.partition(" ")
        routes.append(Route(path, answering_errors(endpoint), methods=[method]))
    return Starlette(routes=routes, exception_handlers={HTTPException: unrouted, Exception: broken})


def json_answer(body: Mapping[str, Any] | bytes) -> Response:
    if isinstance(body, bytes):
        return Response(body, media_type=JSONResponse.media_type)
    return JSONResponse(body)


def event_answer(events: bytes) -> Response:
    return Response(events, media_type=EventStream.media_type)


def answering_errors(endpoint: Endpoint) -> Endpoint:
    """Converts exceptions of an endpoint to answers."""

    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ValidationError as error:
            return refused(as_api_error(error))
        except ApiError as error:
            return refused(error)
        except UserError as error:
            return refused(ApiError(str(error)))
        except RunError as error:
            return refused(server_failed(error))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # not read: the client has disconnected
        except asyncio.CancelledError:  # the time for draining is over
            return refused(stopping())

    return wrapped


def server_failed(error: RunError) -> ApiError:
    log.error("a request failed: %s", error)
    return ApiError(str(error), status=500, kind="server_error")


def stopping() -> ApiError:
    return ApiError("the server is stopping", status=503, kind="server_error", code="stopping")


def refused(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else {}
    if error.closes:
        headers["connection"] = "close"
    return JSONResponse(error.body(), error.status, headers=headers)


async def broken(request: Request, error: Exception) -> Response:
    """Answers an internal error; the traceback goes to the log."""
    return refused(ApiError(f"the server failed: {error!r}", status=500, kind="server_error"))


async def unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    rule = "is not served here" if error.status_code == 404 else str(error.detail).lower()
    remedy = "there are /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, "
    remedy += "/v1/messages and /health"
    found = ApiError(Problem(where, rule, remedy), status=error.status_code)
    return JSONResponse(found.body(), error.status_code, headers=dict(error.headers or {}))


Application = Callable[..., Awaitable[None]]
"""An ASGI application: scope, receive, send."""
OPEN_PATHS = ("/health",)
"""Paths that need no key: they reveal nothing about requests."""


class Guard:
    """Wraps an application with checks: the key, the host names of a server on loopback, and a
    unique framing of the body.

    A web page can make a browser send requests to loopback under the page's own name (DNS
    rebinding), but only with that name as Host and Origin.
    """

    def __init__(
        self,
        app: Application,
        *,
        api_key: str | None = None,
        is_loopback: bool,
        hosts: Iterable[str] = (),
    ) -> None:
        """`hosts`: further host names for a server on loopback."""
        self.app = app
        self.api_key = api_key
        self.is_loopback = is_loopback
        self.hosts = frozenset(name_of(host) or host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[str, str] = {}
            for name, value in scope["headers"]:  # a header that is given twice has both values
                key, text = name.decode("latin-1"), value.decode("latin-1")
                headers[key] = f"{headers[key]}, {text}" if key in headers else text
            try:
                self.check(scope["path"], headers)
            except ApiError as error:
                await refused(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises ApiError."""
        if "content-length" in headers and "transfer-encoding" in headers:
            rule = "only one of the two is allowed, or two servers may read it differently"
            problem = Problem("content-length and transfer-encoding", rule)
            raise ApiError(problem, closes=True)
        if self.is_loopback:
            self.check_name("host", headers.get("host", ""), name_of(headers.get("host", "")))
            if (origin := headers.get("origin")) is not None:
                self.check_name("origin", origin, name_of(origin.partition("://")[2]))
        if self.api_key is not None and path not in OPEN_PATHS:
            check_key(headers, self.api_key, "this server")

    def check_name(self, header: str, value: str, name: str) -> None:
        if name.lower() in self.hosts or is_local(name):
            return
        rule = "a server on loopback accepts only the name localhost"
        remedy = f"start it with --allow-host {name or 'NAME'}"
        problem = Problem(f"{header} = {value or 'none'}", rule, remedy)
        raise ApiError(problem, status=403, kind="permission_error", code="host_not_allowed")


def check_key(headers: Mapping[str, str], key: str, whose: str) -> None:
    """Raises ApiError unless the request has the key; compares in constant time."""
    given = headers.get("authorization", "") or headers.get("x-api-key", "")
    if given[:7].lower() == "bearer ":
        given = given[7:]
    if not secrets.compare_digest(given.encode(), key.encode()):
        problem = Problem("authorization", f"is not the api_key of {whose}")
        raise ApiError(problem, status=401, kind="authentication_error", code="invalid_api_key")
