"""`pentad convert` makes a HF folder of a recovery checkpoint: the one the run would have saved."""

from pathlib import Path

import pytest
import torch
from engine_toys import CONFIG, make_rows, train
from sections import engine_settings
from typer.testing import CliRunner

from pentad.checkpoint.exports import export_model
from pentad.checkpoint.folders import find_checkpoints, info_folder, state_folder
from pentad.checkpoint.job import CommitJob, run_job
from pentad.checkpoint.shards import StateSaver
from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig
from pentad.models.hf_weights import iter_hf
from pentad.weights.hf import HfFolder
from pentad.weights.megatron.layout import find_weights
from pentad.weights.regions import full_box

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def train_and_save(root: Path, config=MOE, backend="archon", value_head=False, role="default"):
    settings = engine_settings(optimizer=OptimizerConfig(lr=1e-2), publish_dtype="bfloat16")
    engine = build_engine(
        config,
        settings,
        init_from_scratch=True,
        seed=3,
        value_head=value_head,
        backend=backend,
    )
    engine.save_tag("ref")
    if not value_head:
        train(engine, make_rows(), steps=2)
    for step in (1, 4):
        staged = StateSaver().save(
            engine.state_tensors(),
            root,
            state_folder(role, step),
            is_async=False,
            counters=engine.state_counters(),
        )
        run_job(CommitJob(root, info_folder(step), staged.result()["files"], ()))
    return engine


def same_folders(a: Path, b: Path) -> None:
    mine, other = HfFolder(a), HfFolder(b)
    assert mine.infos == other.infos
    for name, info in mine.infos.items():
        box = full_box(info.shape)
        assert torch.equal(mine.read(name, box), other.read(name, box)), name
    assert (a / "config.json").read_text() == (b / "config.json").read_text()


def convert(*words: str):
    return CliRunner().invoke(app, ["convert", *words])


@pytest.mark.parametrize(
    ("config", "backend"), [(MOE, "archon"), (CONFIG, "archon"), (MOE, "fsdp")], ids=str
)
def test_the_folder_is_what_the_run_would_have_saved(tmp_path, config, backend):
    root = tmp_path / "trial"
    engine = train_and_save(root, config, backend)
    export_model(engine, str(tmp_path / "direct"))
    shown = convert(str(root), str(tmp_path / "out"))
    assert shown.exit_code == 0, shown.output
    assert "actor after step 5" in shown.output and "It has no tokenizer" in shown.output
    same_folders(tmp_path / "out", tmp_path / "direct")


def test_every_path_into_a_trial_is_understood(tmp_path):
    root = tmp_path / "trial"
    train_and_save(root)
    places = {
        root / "recover_info": 5,
        root / "recover_info" / "globalstep1": 2,
        root / "default" / "recover_checkpoint": 5,
        root / "default" / "recover_checkpoint" / "globalstep1": 2,
    }
    for n, (place, step) in enumerate(places.items()):
        shown = convert(str(place), str(tmp_path / f"out{n}"), "--dtype", "float32")
        assert f"actor after step {step}" in shown.output, shown.output
        assert HfFolder(tmp_path / f"out{n}").infos["lm_head.weight"].dtype == torch.float32


def test_tags_and_roles_are_chosen(tmp_path):
    root = tmp_path / "trial"
    engine = train_and_save(root, CONFIG)
    with engine.use("ref"):
        wanted = {n: x.clone() for n, x in iter_hf(engine.held.decoders[0], torch.bfloat16)}
    assert convert(str(root), str(tmp_path / "ref"), "--tag", "ref").exit_code == 0
    found = HfFolder(tmp_path / "ref")
    for name, tensor in wanted.items():
        assert torch.equal(found.read(name, full_box(tensor.shape)), tensor), name
    critic = tmp_path / "critic"
    export_model(
        train_and_save(critic, CONFIG, value_head=True, role="critic"), str(tmp_path / "a")
    )
    assert convert(str(critic), str(tmp_path / "b"), "--role", "critic").exit_code == 0
    same_folders(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--role", "critic"], "--role critic: the checkpoint holds no such role; it has actor."),
        (["--tag", "old"], "--tag old: the checkpoint has actor, ref."),
        (["--to", "megatron"], "a recovery checkpoint becomes a HF folder; leave it out, and"),
        (["--tp", "2"], "--tp: a recovery checkpoint becomes a HF folder"),
        (["--release"], "--release: a recovery checkpoint becomes a HF folder"),
        (["--dtype", "int8"], "--dtype int8: use one of"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, words, said):
    train_and_save(tmp_path / "trial", CONFIG)
    shown = convert(str(tmp_path / "trial"), str(tmp_path / "out"), *words)
    assert shown.exit_code != 0 and said in " ".join(shown.output.split())
    assert not (tmp_path / "out").exists()


def test_damaged_missing_and_foreign_checkpoints_are_sentences(tmp_path):
    root, out = tmp_path / "trial", str(tmp_path / "out")
    train_and_save(root, CONFIG)
    shown = convert(str(root / "recover_info/globalstep2"), out)
    assert "globalstep2: is not committed; the steps 4, 1 are" in " ".join(shown.output.split())
    file = root / state_folder("default", 4) / "__0_0.distcp"
    torn = bytearray(file.read_bytes())
    torn[5000] ^= 1
    file.write_bytes(torn)
    shown = convert(str(root), out)
    assert shown.exit_code != 0 and "does not have the digest" in " ".join(shown.output.split())
    assert not Path(out).exists()
    (tmp_path / "empty" / "recover_info").mkdir(parents=True)
    shown = convert(str(tmp_path / "empty"), out)
    assert "holds no committed recovery checkpoint" in " ".join(shown.output.split())
    shown = convert(str(root), str(root / state_folder("default", 1)), "--force")
    assert "is inside the source" in " ".join(shown.output.split())
    assert len(find_checkpoints(root)) == 2


def test_a_run_does_not_start_from_a_recovery_checkpoint(tmp_path):
    root = tmp_path / "trial"
    train_and_save(root, CONFIG)
    words = "is a recovery checkpoint of a run, not a model; make a HF folder of it: pentad convert"
    with pytest.raises(UserError, match=words):
        find_weights(root / state_folder("default", 1))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{}")
    state = str(root / state_folder("default", 1))
    shown = CliRunner().invoke(app, ["train", str(recipe), f"actor.path={state}"])
    assert words in " ".join(shown.output.split())
