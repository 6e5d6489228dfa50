"""The meeting of ranks that a launcher started."""

import asyncio
import json
import os
import signal
import socket
import threading
import time

import pytest

from pentad.core.errors import RunError, UserError
from pentad.runtime import launched, wire
from pentad.runtime.launched import SCHEDULER, LaunchedProcess, Meeting
from pentad.runtime.rank import Rank
from pentad.runtime.roles import RoleSpec


@pytest.fixture
def meetings(tmp_path, monkeypatch):
    """Those of two ranks, whose folder is shared, and of one on a machine without it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first = Meeting(Rank(0, 2), tmp_path / "shared")
    return first, *(Meeting(Rank(1, 2), tmp_path / name) for name in ("shared", "other"))


def test_the_store_without_authentication_has_no_token(meetings, tmp_path):
    leader, follower, elsewhere = meetings
    leader.open("secret", "a@1")
    said = json.loads(follower.store.get(SCHEDULER))
    (private,) = (tmp_path / "shared").iterdir()
    assert said == {"folder": private.name, "pins": "a@1"} and private.stat().st_mode & 0o77 == 0
    assert follower._token(said["folder"]) == "secret"
    with pytest.raises(UserError, match=r"different commits on the hub: a@1 and a@2"):
        follower.serve(None, "a@2")
    with pytest.raises(UserError, match=r"fileroot = .*other: does not have the folder"):
        elsewhere.serve(None, "a@1")
    follower.store.set("pentad/1", json.dumps(["10.0.0.2", 4000]))
    assert leader.address(1) == ("10.0.0.2", 4000)
    assert not private.exists()


def test_the_end_of_rank_0_before_the_others_have_come_ends_them_and_its_token(meetings, tmp_path):
    leader, follower, _ = meetings
    leader.open("secret", "a@1")
    leader.close()
    assert not list((tmp_path / "shared").iterdir())
    leader.close()
    leader.store.delete_key(SCHEDULER)
    threading.Timer(0.2, lambda: vars(leader).pop("store")).start()
    with pytest.raises(RunError, match="rank 0 ended"):
        follower.serve(None, "a@1")


def spec_in(folder):
    log = folder / "rank-1.log"
    return RoleSpec(name="learner-1", target="role_targets:Thing", payload={}, log=log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_connection_ends_a_rank(meetings, tmp_path, monkeypatch, number):
    leader, follower, _ = meetings
    monkeypatch.setattr(launched, "JOIN_S", 5.0)
    spec = spec_in(tmp_path)
    leader.open("secret", "")

    def stop():
        leader.store.wait(["pentad/1"])
        time.sleep(0.3)  # the address is published before the loop runs
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=stop).start()
    with pytest.raises(RunError, match=f"stopped by {number.name} before rank 0 connected"):
        follower.serve(spec, "")
    assert signal.getsignal(number) == before


def test_a_signal_after_the_first_connection_does_not_end_a_rank(meetings, tmp_path):
    leader, follower, _ = meetings
    spec = spec_in(tmp_path)
    leader.open("secret", "")
    found = []

    async def call():
        process = LaunchedProcess(spec, "secret", leader.address(1))
        async with asyncio.timeout(20):
            connection = await wire.connect(process.name, process.address, "secret", 0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.3)
            found.append(await connection.call("echo", text="here"))
            await connection.close()

    caller = threading.Thread(target=lambda: asyncio.run(call()))
    caller.start()
    with pytest.raises(RunError, match="rank 0 ended"):  # not by a call of `end`
        follower.serve(spec, "")
    caller.join()
    assert found == [{"text": "here"}]


def test_a_launcher_without_an_address_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR: is not set, and WORLD_SIZE is; start with"):
        Meeting(Rank(0, 2), tmp_path)
