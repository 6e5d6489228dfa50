"""`pentad verify-checkpoint s3://...` on a real server."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pentad.checkpoint.s3 import Store
from pentad.checkpoint.upload import upload
from pentad.cli.main import app


def verify(remote, *words):
    command = ["verify-checkpoint", *map(str, words), "--endpoint-url", remote.endpoint_url]
    return CliRunner().invoke(app, [*command, "--json"])


def test_every_byte_in_the_store_is_verified_and_damage_is_named(remote, make_checkpoint):
    store = Store(remote)
    local = make_checkpoint(7)
    upload(store, local)
    upload(store, make_checkpoint(8))
    result = verify(remote, remote.uri)
    assert result.exit_code == 0, result.output
    assert [row["step"] for row in json.loads(result.output)["checkpoints"]] == [8, 7]
    result = verify(remote, local.root / local.info, f"{remote.uri}/{local.info}")
    assert (result.exit_code, json.loads(result.output)["differences"]) == (0, [])
    path = "default/recover_checkpoint/globalstep8/__1_0.distcp"
    data = bytearray((local.root / path).read_bytes())
    data[-1] ^= 1
    store.put(path, bytes(data))
    result = verify(remote, remote.uri)
    assert result.exit_code == 1
    assert f"{path}: piece tensor.39" in result.output
    assert verify(remote, f"{remote.uri}/{local.info}").exit_code == 0


def test_a_place_without_checkpoints_and_a_bad_address(remote):
    result = verify(remote, remote.uri)
    assert (result.exit_code, "holds no checkpoint" in result.output) == (1, True)
    result = verify(remote, "s3://x")
    assert (result.exit_code, "bucket's name" in result.output) == (2, True)
