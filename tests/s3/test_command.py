"""`pentad verify-checkpoint s3://...` as a user types it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pentad.checkpoint.s3 import Store
from pentad.checkpoint.upload import upload
from pentad.cli.main import app


def verify(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify-checkpoint", *words])
    return result.exit_code, result.output


def test_a_checkpoint_in_a_store_is_verified_and_compared_with_a_local_one(
    remote, make_checkpoint, client
):
    checkpoint = make_checkpoint(3, size=2000)
    upload(Store(remote), checkpoint)
    where = [remote.uri, "--endpoint-url", remote.endpoint_url]
    code, said = verify(*where, "--json")
    found = json.loads(said)
    assert code == 0 and found["is_whole"] and found["checkpoints"][0]["step"] == 3
    code, said = verify(*where[:1], str(checkpoint.root), *where[1:])
    assert code == 0 and "The two hold the same." in said
    key = f"{remote.prefix}default/recover_checkpoint/globalstep3/__0_0.distcp"
    client.put_object(Bucket=remote.bucket, Key=key, Body=bytes(2000))
    code, said = verify(*where)
    assert code == 1 and "1 damaged" in said
    assert f"s3://{remote.bucket}/{key}: piece tensor.0" in said.replace("\n", "")


def test_a_place_that_is_none_ends_in_a_sentence(remote):
    code, said = verify(f"{remote.uri}/nothing", "--endpoint-url", remote.endpoint_url)
    assert code == 1 and "holds no checkpoint" in said
    code, said = verify("s3://No_Bucket/x")
    assert code == 2 and "s3://No_Bucket/x" in said
