"""A store that cannot be used is found before anything of a run starts, in one sentence."""

from __future__ import annotations

import pytest
from server import free_ports

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.trainer import preflight
from pentad.trainer.preflight import the_remote_store_answers


@pytest.fixture
def found(server, bucket):
    def ask(uri: str = f"s3://{bucket}/team", url: str = server.url) -> list[str]:
        overrides = [f"checkpoint.remote_uri={uri}", f"checkpoint.endpoint_url={url}"]
        config, _ = resolve(load_config(None, overrides))
        return [str(problem) for problem in the_remote_store_answers(config)]

    return ask


def test_a_store_that_can_be_written_is_no_problem_and_stays_empty(found, client, bucket):
    assert found() == []
    assert "Contents" not in client.list_objects_v2(Bucket=bucket, Prefix="team/.pentad")


def test_a_bucket_that_is_not_there_is_named(found, server):
    (sentence,) = found("s3://nowhere-to-be-found/team")
    start = f"checkpoint.remote_uri = s3://nowhere-to-be-found/team at {server.url}: "
    assert sentence.startswith(f"{start}there is no bucket nowhere-to-be-found; make it")


def test_wrong_credentials_are_named(found, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (sentence,) = found()
    assert "the credentials are refused (SignatureDoesNotMatch)" in sentence
    assert "AWS_SECRET_ACCESS_KEY" in sentence and "wrong" not in sentence


def test_missing_credentials_are_named(found, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (sentence,) = found()
    assert "there are no credentials; set AWS_ACCESS_KEY_ID" in sentence


def test_boto3_is_asked_for_where_it_is_missing(found, monkeypatch):
    monkeypatch.setattr(preflight, "installed", lambda name: None)
    (sentence,) = found()
    assert sentence.endswith("needs boto3, which is not installed; pip install 'pentad[s3]'.")


def test_a_server_that_is_not_there_is_named(found):
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    (sentence,) = found(url=url)
    assert f"at {url}: cannot be reached" in sentence and "checkpoint.endpoint_url" in sentence
