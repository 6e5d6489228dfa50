"""Rules on where checkpoints go: the addresses of a store and of its server."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from pentad.config.rules.rule import Rules
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.remote import split_uri

RULES: Rules[[Config]] = Rules()


@RULES.add("checkpoint.remote_uri", commands=("train", "sft", "plan"))
def the_store_has_an_address(config: Config) -> Problem | None:
    uri = config.checkpoint.remote_uri
    if uri is None:
        return None
    try:
        split_uri(uri)
    except ValueError as error:
        return Problem(f"checkpoint.remote_uri = {uri}", str(error), "give s3://BUCKET/PREFIX")
    return None


@RULES.add("checkpoint.endpoint_url", commands=("train", "sft", "plan"))
def the_endpoint_is_a_url(config: Config) -> Iterator[Problem]:
    url = config.checkpoint.endpoint_url
    where = f"checkpoint.endpoint_url = {url}"
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        remedy = "give for instance http://127.0.0.1:9000, or null for Amazon's"
        yield Problem(where, "is no address of a server, http or https", remedy)
    elif parts.username or parts.password:
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        yield Problem("checkpoint.endpoint_url", "has credentials in it", remedy)
