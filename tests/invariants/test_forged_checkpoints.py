"""A checkpoint whose files are whole, but do not hold what a run saves, is damage: it is named and
set aside, and the one before it is used."""

import hashlib
import json

import pytest
from run_lab import steps_of

from pentad.checkpoint.folders import FileEntry, Manifest, PieceEntry, commit_marker
from pentad.core.errors import UserError
from pentad.data.packing import pack_arrays

WORDS = (
    *("recover.freq_steps=1", "recover.keep_last=50", "saver.mode=sync"),
    *("trial_name=forged", "total_train_epochs=9"),
)


def run(lab, command, num_steps):
    return getattr(lab, command)(*WORDS, f"total_train_steps={num_steps}")


def forge(root, step, path, change):
    """A file of the forger's, with the digest it has, and a COMMIT that fits; the facts of the
    manifest where that is the file. Returns which file it is."""
    info = root / f"recover_info/globalstep{step}"
    manifest = Manifest.from_bytes((info / "manifest.json").read_bytes())
    facts, entries = dict(manifest.facts), dict(manifest.files)
    if path == "manifest.json":
        facts = change(facts)
    elif "/" in path:
        path = path.format(step=step)
    else:
        path = f"recover_info/globalstep{step}/{path}"
    if "/" in path:
        data = change
        if callable(change):
            data = json.dumps(change(json.loads((root / path).read_bytes()))).encode()
        (root / path).write_bytes(data)
        piece = PieceEntry("x", 0, len(data), hashlib.sha256(data).hexdigest())
        entries[path] = FileEntry(len(data), (piece,))
    text = Manifest(step, entries, facts).to_bytes()
    (info / "manifest.json").write_bytes(text)
    (info / "COMMIT").write_bytes(commit_marker(text))
    return root / path if "/" in path else info / path


def without(key):
    return lambda value: {name: one for name, one in value.items() if name != key}


def having(*path, **changes):
    """The value with others in the object at the path."""

    def change(value):
        if not path:
            return value | changes
        return value | {path[0]: having(*path[1:], **changes)(value[path[0]])}

    return change


def packed(meta):
    return b"".join(pack_arrays(meta, {}))


COUNTERS = "default/recover_checkpoint/globalstep{step}/counters.json"
OF_ANY = [
    ("manifest.json", lambda facts: {}),
    ("manifest.json", without("time")),
    ("manifest.json", having(config=["no", "keys"])),
    ("manifest.json", having("config", train_dataset=None)),
    ("manifest.json", having("config", ref="here")),
    ("dataloader_info.json", lambda value: {}),
    ("dataloader_info.json", having(data=3)),
    ("checkpoint_info.json", having(frequency={})),
    ("checkpoint_info.json", having(frequency={"seconds_since": "long"})),
    ("saver_info.json", having("default", last_saved=None)),
    ("saver_info.json", having("default", scores=[[1, "good"]])),
    ("stats_logger_info.json", having("recorder", alarmed=[1])),
    ("stats_logger_info.json", having("bounds", lasting={"x": "y"})),
    (COUNTERS, without("model")),
    (COUNTERS, having(num_steps="2")),
    (COUNTERS, having(tags=None)),
    (COUNTERS, having(tags=[1])),
]
OF_RL = [
    ("dataloader_info.json", having(ledger=[])),
    ("dataloader_info.json", having("ledger", next_gid=None)),
    ("dataloader_info.json", having("ledger", groups_per_batch=5)),
    ("dataloader_info.json", having("ledger", live=[{"gid": 3}])),
    ("groups.bin", b"no groups"),
    ("groups.bin", packed([{}])),
    ("groups.bin", packed([{"gid": "x", "samples": []}])),
    ("groups.bin", packed([{"gid": 1, "samples": [{"arrays": {"ids": ["missing", 3]}}]}])),
]


@pytest.mark.parametrize(("command", "forgeries"), [("sft", OF_ANY), ("train", OF_RL)])
def test_each_is_named_and_the_one_before_is_used(lab, capsys, command, forgeries):
    num_steps = len(forgeries) + 1
    first = run(lab, command, num_steps)
    root = first.model.parents[1]
    files = [forge(root, step, *what) for step, what in enumerate(forgeries, start=1)]
    capsys.readouterr()
    again = run(lab, command, num_steps + 1)
    said = capsys.readouterr().err
    for step, file in enumerate(files, start=1):
        assert f"{file}: does not have the content that a run saves (" in said
        damaged = root / f"recover_info/globalstep{step}.damaged"
        assert f"the checkpoint is renamed to {damaged}\n" in said
        assert str(file) in (damaged / "why.txt").read_text()
    assert "resumed after step 1 from" in said
    assert [record["step"] for record in steps_of(again)] == [*range(1, num_steps + 2)]


def test_a_manifest_of_the_run_folder_that_is_none_is_refused(lab):
    summary = run(lab, "sft", 1)
    file = summary.records / "manifest.json"
    value = json.loads(file.read_bytes())
    for change in ({"config": 3}, {"starts": {}}, {"config_digest": None}):
        file.write_text(json.dumps(value | change))
        with pytest.raises(UserError, match="not the manifest of a run; choose another"):
            run(lab, "sft", 2)
