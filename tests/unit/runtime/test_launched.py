"""The meeting of ranks that a launcher started."""

import json
import socket
import threading

import pytest

from pentad.core.errors import RunError, UserError
from pentad.runtime.launched import SCHEDULER, Meeting
from pentad.runtime.rank import Rank


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


def test_a_launcher_without_an_address_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR: is not set, and WORLD_SIZE is; start with"):
        Meeting(Rank(0, 2), tmp_path)
