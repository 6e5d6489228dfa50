"""Broken and hostile Megatron folders: a sentence that names file or tensor, nothing written."""

import argparse
import collections
import io
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron_models import hf_folder, rank_file, run, tensors_of
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import Metadata

from pentad.core.errors import UserError
from pentad.models.conversion_files import RECORD
from pentad.weights.pickles import INERT, load_metadata, load_rank_file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    for kind in ("qwen3", "mixed"):
        source = hf_folder(root / kind, kind)
        run(source, root / f"{kind} legacy", "legacy", tp=2, pp=2)
        run(source, root / f"{kind} dist", "torch_dist", shard_bytes=1 << 16)
    return root


@pytest.fixture
def legacy(made, tmp_path):
    return shutil.copytree(made / "qwen3 legacy", tmp_path / "mg")


@pytest.fixture
def dist(made, tmp_path):
    return shutil.copytree(made / "qwen3 dist", tmp_path / "mg")


def refusal(folder, **settings) -> str:
    """What a conversion of the folder says; the target must not have come into being."""
    target = folder.parent / "out"
    with pytest.raises(UserError) as caught:
        run(folder, target, "hf", **settings)
    assert not target.exists()
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".out")]
    return str(caught.value)


def change(folder, name, edit):
    content = rank_file(folder, name)
    edit(content)
    torch.save(content, folder / "release" / name / "model_optim_rng.pt")
    (folder / RECORD).unlink(missing_ok=True)  # it would tell the change first


def test_a_missing_rank_is_named_with_the_layout(legacy):
    shutil.rmtree(legacy / "release" / "mp_rank_01_001")
    text = refusal(legacy)
    assert "release/mp_rank_01_001: missing: the arguments in its files say tp 2 pp 2" in text


def test_a_missing_rank_file_is_named(legacy):
    (legacy / "release" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    assert "mp_rank_01_001: no model_optim_rng.pt in it." in refusal(legacy)


def test_a_missing_rank_is_named_also_without_arguments(legacy):
    for path in (legacy / "release").iterdir():
        change(legacy, path.name, lambda content: content.pop("args"))
    shutil.rmtree(legacy / "release" / "mp_rank_01_001")
    text = refusal(legacy)
    assert (
        "release/mp_rank_01_001: missing: the other folders are of a layout with tp 2 pp 2" in text
    )
    shutil.rmtree(legacy / "release" / "mp_rank_00_001")
    assert "its files hold 2 layers, but the config says 4" in refusal(legacy)


def test_a_rank_too_many_is_named(legacy):
    shutil.copytree(legacy / "release" / "mp_rank_01_001", legacy / "release" / "mp_rank_02_001")
    text = refusal(legacy)
    assert "mp_rank_02_001: does not belong there: the arguments in its files say tp 2 pp 2" in text


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("tensor_model_parallel_size", 4, "mp_rank_03_001: missing: the arguments"),
        ("pipeline_model_parallel_size", 1, "mp_rank_00: missing: the arguments"),
        ("virtual_pipeline_model_parallel_size", 2, "say vpp = 2, its files hold 1"),
        ("num_layers", 6, "args.num_layers = 6, but config.json makes it 4"),
    ],
)
def test_arguments_that_do_not_match_the_folder_are_told(legacy, argument, value, expected):
    change(
        legacy, "mp_rank_00_000", lambda content: vars(content["args"]).update({argument: value})
    )
    assert expected in refusal(legacy)


def test_an_old_layout_of_qkv_is_refused(legacy):
    change(legacy, "mp_rank_00_000", lambda content: content.update(checkpoint_version=1.0))
    assert "checkpoint_version = 1.0, and before 3.0 qkv was laid out otherwise" in refusal(legacy)


def test_missing_unknown_and_misshapen_tensors_are_told_together(legacy):
    def spoil(content):
        model = content["model"]
        del model["decoder.layers.0.mlp.linear_fc2.weight"]
        model["decoder.layers.0.mlp.adapter.weight"] = torch.zeros(3)
        model["decoder.layers.1.self_attention.q_layernorm.weight"] = torch.zeros(7)

    change(legacy, "mp_rank_01_001", spoil)
    text = refusal(legacy)
    at = "release: mp_rank_01_001:model:decoder.layers."
    assert (
        f"{at}0.mlp.linear_fc2.weight: missing; the layout (tp 2 pp 2) puts [40, 42] there" in text
    )
    assert f"{at}0.mlp.adapter.weight: no rule of the map matches it" in text
    assert f"{at}1.self_attention.q_layernorm.weight: shape [7], but config and layout" in text


def test_ranks_that_disagree_are_told(legacy):
    def spoil(content):
        content["model"]["decoder.layers.1.self_attention.k_layernorm.weight"] += 1

    change(legacy, "mp_rank_01_000", spoil)
    assert re.search("ranks disagree: mp_rank_01_000:model:.*k_layernorm", refusal(legacy))


def test_parts_of_differing_type_are_told(legacy):
    def spoil(content):
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        content["model"][name] = content["model"][name].half()

    change(legacy, "mp_rank_01_000", spoil)
    assert "decoder.layers.1.mlp.linear_fc2.weight: is torch.float32 in mp_rank_00" in refusal(
        legacy
    )


def test_a_truncated_rank_file_is_told(legacy):
    path = legacy / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    assert re.search(
        r"mp_rank_00_001/model_optim_rng.pt: is not a whole torch file", refusal(legacy)
    )


def test_a_file_without_a_model_is_told(legacy):
    change(legacy, "mp_rank_00_000", lambda content: content.pop("model"))
    assert "mp_rank_00_000: has neither model nor model0" in refusal(legacy)


def test_a_config_of_another_model_is_told(legacy, made):
    shutil.copy(made / "mixed" / "config.json", legacy / "config.json")
    assert "args.num_experts = None, but config.json makes it 6" in refusal(legacy)


def test_no_config_at_all_is_told(legacy, made):
    (legacy / "config.json").unlink()
    assert "no config.json in it" in refusal(legacy)
    run(legacy, legacy.parent / "out", "hf", config=str(made / "qwen3"))
    found, expected = tensors_of(legacy.parent / "out"), tensors_of(made / "qwen3")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoints_are_chosen_by_tracker_or_name(legacy):
    shutil.copytree(legacy / "release", legacy / "iter_0000012")
    (legacy / "latest_checkpointed_iteration.txt").write_text("13")
    text = refusal(legacy)
    assert "iter_0000013: there is no such checkpoint; there are iter_0000012, release" in text
    (legacy / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "is neither a number nor release" in refusal(legacy)
    (legacy / "latest_checkpointed_iteration.txt").unlink()
    assert "no latest_checkpointed_iteration.txt to choose by" in refusal(legacy)
    assert run(legacy, legacy.parent / "out", "hf", checkpoint="iter_0000012").status == "written"


def test_folders_that_are_no_checkpoint_are_told(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds neither safetensors nor a Megatron checkpoint" in refusal(tmp_path / "empty")
    assert "there is no such folder" in refusal(tmp_path / "nothing")


def test_a_truncated_distcp_file_is_told(dist):
    path = dist / "release" / "__1_0.distcp"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    assert f"__1_0.distcp: has {size - 100} bytes, but .metadata needs {size}" in refusal(dist)
    path.unlink()
    assert "__1_0.distcp: missing, but .metadata puts weights in it" in refusal(dist)


def test_a_damaged_block_is_told(dist):
    path = dist / "release" / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    (dist / RECORD).unlink()
    assert "__0_0.distcp: is not a whole torch file" in refusal(dist)


def rewrite_metadata(dist, edit):
    path = dist / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata.state_dict_metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_missing_unknown_and_misshapen_keys_are_told(dist):
    path = dist / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    entries["lora.weight"] = entries["decoder.final_layernorm.weight"]
    index = next(index for index in storage if index.fqn == "decoder.final_layernorm.weight")
    storage[type(index)("lora.weight", index.offset)] = storage[index]
    del entries["decoder.layers.self_attention.q_layernorm.weight"]
    entries["decoder.layers.self_attention.k_layernorm.weight"].size = torch.Size([4, 3, 2])
    path.write_bytes(pickle.dumps(metadata))
    text = refusal(dist)
    assert "lora.weight: no rule of the map matches it" in text
    assert "k_layernorm.weight: shape [4, 3, 2], but the config makes it [4, 6]" in text
    assert "q_layernorm.weight: missing; the model needs it as [4, 6]" in text


def test_a_key_without_all_its_blocks_is_told(dist):
    def spoil(entries):
        entries["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()

    rewrite_metadata(dist, spoil)
    assert "linear_fc2.weight: 3360 of 13440 elements are in no file" in refusal(dist)


def test_optimizer_state_is_no_weight(dist):
    def add(entries):
        name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
        entries[name] = entries["decoder.final_layernorm.weight"]

    rewrite_metadata(dist, add)
    assert run(dist, dist.parent / "out", "hf").status == "written"


def test_another_backend_is_told(dist):
    (dist / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "sharded_backend = zarr, only torch_dist is read" in refusal(dist)


def test_a_hf_folder_with_a_tensor_too_many_is_told(made, tmp_path):
    source = hf_folder(tmp_path / "hf", "qwen3", **{"score.weight": torch.zeros(1, 40)})
    with pytest.raises(UserError, match="score.weight: no rule of the map matches it"):
        run(source, tmp_path / "mg", "legacy")
    assert not (tmp_path / "mg").exists()


class Bomb:
    """A pickle that would write a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').write('boom')",)


class Shell:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("bomb", [Bomb, Shell])
def test_a_hostile_rank_file_is_refused_and_not_run(legacy, tmp_path, bomb):
    mark = tmp_path / "boom"
    change(legacy, "mp_rank_00_001", lambda content: content.update(args=bomb(mark)))
    text = refusal(legacy)
    assert re.search(
        r"its pickle contains ((builtins\.)?exec|posix\.system), and only weights", text
    )
    assert not mark.exists()


def test_a_hostile_class_within_the_weights_is_refused(legacy, tmp_path):
    mark = tmp_path / "boom"

    def spoil(content):
        content["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = Bomb(mark)

    change(legacy, "mp_rank_00_001", spoil)
    assert re.search(r"its pickle contains (builtins\.)?exec,", refusal(legacy))
    assert not mark.exists()


def test_a_hostile_index_is_refused_and_not_run(dist, tmp_path):
    """torch itself would unpickle it freely."""
    mark = tmp_path / "boom"
    (dist / "release" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    assert ".metadata: its pickle contains builtins.exec" in refusal(dist)
    metadata = Metadata({"x": Bomb(mark)})
    (dist / "release" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ".metadata: its pickle contains builtins.exec" in refusal(dist)
    assert not mark.exists()


def test_a_hostile_common_file_is_refused_and_not_run(dist, tmp_path):
    mark = tmp_path / "boom"
    torch.save({"args": Bomb(mark)}, dist / "release" / "common.pt")
    assert re.search(r"common.pt: its pickle contains (builtins\.)?exec,", refusal(dist))
    assert not mark.exists()


def test_a_hostile_block_is_refused_and_not_run(dist, tmp_path):
    mark = tmp_path / "boom"
    path = dist / "release" / "__0_0.distcp"
    size = path.stat().st_size
    torch.save(Bomb(mark), path)
    path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    assert "__0_0.distcp" in refusal(dist)
    assert not mark.exists()


def test_an_index_that_is_no_pickle_is_told(dist):
    (dist / "release" / ".metadata").write_bytes(b"hello")
    assert ".metadata: is not a whole torch file" in refusal(dist)


def test_the_known_classes_of_training_files_are_let_through_and_dropped(tmp_path):
    """Random states, paths, enums and namespaces that Megatron's own files carry."""
    content = {
        "args": argparse.Namespace(
            load=pathlib.Path("x"), dtype=torch.bfloat16, sig=signal.SIGTERM
        ),
        "rng_state": [{"np": numpy.random.get_state(), "py": random.getstate()}],
        "other": SimpleNamespace(a=1),
        "model": collections.OrderedDict(w=torch.ones(2), s=io.BytesIO(b"fp8")),
    }
    torch.save(content, tmp_path / "x.pt")
    found = load_rank_file(tmp_path / "x.pt")
    assert torch.equal(found["model"]["w"], torch.ones(2))
    assert found["args"].dtype == torch.bfloat16
    assert type(found["args"].load).__name__ == "Inert"
    assert all("." in name for name in INERT)


def test_an_index_that_torch_wrote_is_read(tmp_path):
    dcp_save({"w": torch.ones(3, 2), "n": 5}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = load_metadata(tmp_path / "c" / ".metadata")
    assert tuple(metadata.state_dict_metadata["w"].size) == (3, 2)


def test_a_damaged_record_is_as_good_as_none(legacy):
    forged = {"identity": 1, "request": 2, "source": 3, "files": 4, "extra": 5}
    for number, text in enumerate(("{", "[]", json.dumps(forged))):
        (legacy / RECORD).write_text(text)
        assert run(legacy, legacy.parent / f"out{number}", "hf").status == "written"
