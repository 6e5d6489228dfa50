"""Conversions: HF to Megatron's formats at any layout and back, byte for byte."""

import shutil

import pytest
import torch
from megatron_models import (
    MODELS,
    bytes_of_folder,
    config_of,
    fused_qkv,
    hf_folder,
    rank_file,
    run,
    tensors_of,
)
from tables import table
from torch.distributed.checkpoint import load as dcp_load

from pentad.core.errors import UserError
from pentad.models.families import dims_of, map_of
from pentad.models.hf_weights import native_tensors
from pentad.models.registry import build_model, column_of, load_model, open_weights
from pentad.weights import transfer
from pentad.weights.hf import HfFolder
from pentad.weights.megatron.arguments import build_args
from pentad.weights.megatron.dist import WrittenBlock, write_index
from pentad.weights.megatron.layout import MegatronLayout, build_layout
from pentad.weights.megatron.outputs import Filler, LegacyOutput
from pentad.weights.megatron.stored import dist_pieces

DENSE = [{"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 2, "vpp": 2}]
EXPERT = [
    {"tp": 2, "ep": 3, "etp": 1},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 2},
    {"tp": 4, "ep": 6, "etp": 2},
]
EXPERT_KEY = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


OPTIONS = [{}, {"spec": "local", "tp": 4}, {"separate_layers": True}]


def layouts_of(kind):
    return [DENSE, EXPERT] if "num_experts" in MODELS[kind] else [DENSE]


GRID = [(kind, sizes) for kind in MODELS for some in layouts_of(kind) for sizes in some]
DIST = [(kind, options) for kind in MODELS for options in OPTIONS]


def in_turn(kind, choices):
    """One of them for each kind of model, which does not change how files are cut."""
    return choices[list(MODELS).index(kind) % len(choices)]


GRID_REST = [
    (kind, sizes)
    for kind, sizes in GRID
    if sizes not in [in_turn(kind, some) for some in layouts_of(kind)]
]
DIST_REST = [(kind, options) for kind, options in DIST if options != in_turn(kind, OPTIONS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {kind: hf_folder(root / str(n), kind) for n, kind in enumerate(MODELS)}


@pytest.mark.parametrize(("kind", "sizes"), table(GRID, GRID_REST))
def test_hf_to_legacy_to_hf_gives_the_same_bytes(folders, tmp_path, kind, sizes):
    run(folders[kind], tmp_path / "mg", "legacy", **sizes)
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    assert bytes_of_folder(tmp_path / "hf") == bytes_of_folder(folders[kind])


@pytest.mark.parametrize(("kind", "options"), table(DIST, DIST_REST))
def test_hf_to_torch_dist_to_hf_gives_the_same_bytes(folders, tmp_path, kind, options):
    run(folders[kind], tmp_path / "mg", "torch_dist", shard_bytes=1 << 16, **options)
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    assert bytes_of_folder(tmp_path / "hf") == bytes_of_folder(folders[kind])


def test_ranks_hold_what_megatron_puts_on_them(folders, tmp_path):
    """Names, layer numbers and cuts of TP 2, PP 2, written out by hand."""
    hf = tensors_of(folders["qwen3"])
    run(folders["qwen3"], tmp_path / "mg", "legacy", tp=2, pp=2)
    for tp in range(2):
        for pp in range(2):
            content = rank_file(tmp_path / "mg", f"mp_rank_{tp:02d}_{pp:03d}")
            model = {k: v for k, v in content["model"].items() if v is not None}
            assert content["checkpoint_version"] == 3.0
            for local in range(2):
                i, at = 2 * pp + local, f"decoder.layers.{local}."
                qkv = fused_qkv(hf, i, "weight", num_groups=4).chunk(2)[tp]
                assert torch.equal(model.pop(at + "self_attention.linear_qkv.weight"), qkv)
                ours = f"model.layers.{i}."
                halves = [hf[f"{ours}mlp.{x}_proj.weight"].chunk(2)[tp] for x in ("gate", "up")]
                assert torch.equal(model.pop(at + "mlp.linear_fc1.weight"), torch.cat(halves))
                for theirs, name in {
                    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
                }.items():
                    assert torch.equal(model.pop(at + theirs), hf[ours + name].chunk(2, 1)[tp])
                for theirs, name in {
                    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
                    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
                    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
                }.items():
                    assert torch.equal(model.pop(at + theirs), hf[ours + name])
            ends = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
            if pp == 1:
                ends = {"output_layer.weight": "lm_head.weight"}
                norm = model.pop("decoder.final_layernorm.weight")
                assert torch.equal(norm, hf["model.norm.weight"])
            for theirs, name in ends.items():
                padded = torch.zeros(256, 40)
                padded[:211] = hf[name]
                assert torch.equal(model.pop(theirs), padded.chunk(2)[tp])
            assert not model


def test_experts_are_dealt_whole_and_cut_by_etp(folders, tmp_path):
    hf = tensors_of(folders["mixed"])
    run(folders["mixed"], tmp_path / "mg", "legacy", tp=2, ep=3, etp=2)
    for tp in range(2):
        for ep in range(3):
            model = rank_file(tmp_path / "mg", f"mp_rank_{tp:02d}_{ep:03d}")["model"]
            for e in range(2):
                at, ours = (
                    "decoder.layers.2.mlp.experts.",
                    f"model.layers.2.mlp.experts.{2 * ep + e}.",
                )
                halves = [hf[f"{ours}{x}_proj.weight"].chunk(2)[tp] for x in ("gate", "up")]
                assert torch.equal(model[f"{at}linear_fc1.weight{e}"], torch.cat(halves))
                down = hf[ours + "down_proj.weight"].chunk(2, 1)[tp]
                assert torch.equal(model[f"{at}linear_fc2.weight{e}"], down)
            assert "decoder.layers.1.mlp.linear_fc1.weight" in model
            assert "decoder.layers.2.pre_mlp_layernorm.weight" in model


def test_chunks_of_a_virtual_pipeline_interleave(folders, tmp_path):
    hf = tensors_of(folders["qwen2, tied"])
    run(folders["qwen2, tied"], tmp_path / "mg", "legacy", pp=2, vpp=2)
    for pp in range(2):
        content = rank_file(tmp_path / "mg", f"mp_rank_00_{pp:03d}")
        for chunk in range(2):
            model = content[f"model{chunk}"]
            norm = model["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
            expected = hf[f"model.layers.{2 * chunk + pp}.input_layernorm.weight"]
            assert torch.equal(norm, expected)
            assert ("output_layer.weight" in model) == (pp == 1 and chunk == 1)
            assert ("embedding.word_embeddings.weight" in model) == (pp == 0 and chunk == 0)


def test_a_tied_head_has_a_copy_on_the_last_stage_only_if_that_is_not_the_first(folders, tmp_path):
    run(folders["qwen2, tied"], tmp_path / "a", "legacy")
    assert "output_layer.weight" not in rank_file(tmp_path / "a", "mp_rank_00")["model"]
    run(folders["qwen2, tied"], tmp_path / "b", "legacy", pp=4)
    head = rank_file(tmp_path / "b", "mp_rank_00_003")["model"]["output_layer.weight"]
    assert torch.equal(head[:211], tensors_of(folders["qwen2, tied"])["model.embed_tokens.weight"])


def test_a_tied_head_that_is_stored_twice_comes_back_twice(tmp_path):
    once = tensors_of(hf_folder(tmp_path / "once", "qwen2, tied"))["model.embed_tokens.weight"]
    twice = hf_folder(tmp_path / "twice", "qwen2, tied", **{"lm_head.weight": once})
    run(twice, tmp_path / "mg", "legacy", tp=2)
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    assert bytes_of_folder(tmp_path / "hf") == bytes_of_folder(twice)


def test_torch_reads_torch_dist_folders_without_megatron(folders, tmp_path):
    """Plain torch.distributed.checkpoint, and the stacking and fusing written out by hand."""
    for kind in ("qwen3", "experts"):
        hf = tensors_of(folders[kind])
        run(folders[kind], tmp_path / kind, "torch_dist", tp=2)
        layers = range(4)
        state = {
            "decoder.layers.self_attention.linear_qkv.weight": torch.zeros(4, 120, 40),
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.zeros(4, 40),
            "embedding.word_embeddings.weight": torch.zeros(256, 40),
        }
        if kind == "experts":
            state["decoder.layers.mlp.experts.experts.linear_fc1.weight"] = torch.zeros(
                4, 6, 56, 40
            )
        dcp_load(state, checkpoint_id=tmp_path / kind / "release", no_dist=True)
        qkv = torch.stack([fused_qkv(hf, i, "weight", num_groups=4) for i in layers])
        assert torch.equal(state["decoder.layers.self_attention.linear_qkv.weight"], qkv)
        table = state["embedding.word_embeddings.weight"]
        assert torch.equal(table[:211], hf["model.embed_tokens.weight"]) and not table[211:].any()
        if kind == "experts":
            fused = [
                torch.cat(
                    [
                        hf[f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight"]
                        for x in ("gate", "up")
                    ]
                )
                for i in layers
                for e in range(6)
            ]
            found = state["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
            assert torch.equal(found.flatten(0, 1), torch.stack(fused))


def test_mixed_layers_have_a_key_each(folders, tmp_path):
    run(folders["mixed"], tmp_path / "mg", "torch_dist")
    state = {
        "decoder.layers.1.mlp.linear_fc2.weight": torch.zeros(40, 84),
        "decoder.layers.2.mlp.experts.experts.linear_fc2.weight": torch.zeros(6, 40, 28),
        "decoder.layers.2.pre_mlp_layernorm.weight": torch.zeros(40),
    }
    dcp_load(state, checkpoint_id=tmp_path / "mg" / "release", no_dist=True)
    hf = tensors_of(folders["mixed"])
    down = torch.stack([hf[f"model.layers.2.mlp.experts.{e}.down_proj.weight"] for e in range(6)])
    assert torch.equal(state["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"], down)
    dense = state["decoder.layers.1.mlp.linear_fc2.weight"]
    assert torch.equal(dense, hf["model.layers.1.mlp.down_proj.weight"])
    norm = state["decoder.layers.2.pre_mlp_layernorm.weight"]
    assert torch.equal(norm, hf["model.layers.2.post_attention_layernorm.weight"])


def write_dist(folder, pieces, filler, cut=1):
    """A torch_dist folder by hand, each tensor cut into so many blocks of its last dim."""
    folder.mkdir(parents=True)
    items = []
    with (folder / "__0_0.distcp").open("wb") as file:
        for piece in pieces:
            whole = filler.fill(piece)
            for number, block in enumerate(whole.chunk(cut, dim=-1)):
                start = file.tell()
                shape = (1,) * len(piece.lead) + tuple(block.shape)
                torch.save(block.clone().view(shape), file)
                last = number * (whole.shape[-1] // cut)
                offset = (*piece.lead, *(0,) * (whole.dim() - 1), last)
                item = WrittenBlock(piece.key, offset, shape, "float32", start, file.tell() - start)
                items.append(item)
    write_index(folder, {"__0_0.distcp": items}, pieces, "te")


@pytest.mark.parametrize(("form", "cut"), [("stacked", 2), ("separate", 2), ("singleton", 1)])
def test_torch_dist_keys_of_every_form_and_cut_are_read(folders, tmp_path, form, cut):
    dims = dims_of(config_of("mixed" if form != "stacked" else "experts"))
    source = folders["mixed" if form != "stacked" else "experts"]
    column = column_of(dims, 256)
    pieces = dist_pieces(column, form)
    write_dist(tmp_path / "mg" / "iter_0000003", pieces, Filler(HfFolder(source), None), cut)
    shutil.copy(source / "config.json", tmp_path / "mg")
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    found, expected = tensors_of(tmp_path / "hf"), tensors_of(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_megatron_layout_becomes_another(folders, tmp_path):
    run(folders["mixed"], tmp_path / "a", "legacy", tp=2, pp=2, ep=2, iteration=30)
    run(tmp_path / "a", tmp_path / "b", "torch_dist", tp=4)
    run(tmp_path / "b", tmp_path / "c", "legacy", tp=4, ep=3, etp=1)
    run(folders["mixed"], tmp_path / "direct", "legacy", tp=4, ep=3, etp=1, iteration=30)
    assert (tmp_path / "c" / "iter_0000030").is_dir()
    assert bytes_of_folder(tmp_path / "c") == bytes_of_folder(tmp_path / "direct")


def test_types_are_kept_or_changed_as_told(tmp_path):
    source = hf_folder(tmp_path / "hf", "qwen3", torch.bfloat16)
    run(source, tmp_path / "mg", "legacy", tp=2)
    model = rank_file(tmp_path / "mg", "mp_rank_01")["model"]
    assert model["decoder.layers.0.mlp.linear_fc2.weight"].dtype == torch.bfloat16
    run(tmp_path / "mg", tmp_path / "wide", "hf", dtype="float32")
    wide, narrow = tensors_of(tmp_path / "wide"), tensors_of(source)
    assert all(torch.equal(wide[name], narrow[name].float()) for name in narrow)
    assert '"dtype": "float32"' in (tmp_path / "wide" / "config.json").read_text()


def test_fused_tensors_of_differing_types_are_refused(tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    odd = {name: torch.zeros(24, 40, dtype=torch.bfloat16)}
    source = hf_folder(tmp_path / "hf", "qwen3", **odd)
    with pytest.raises(UserError, match=f"{name} .torch.bfloat16. in one tensor.*--dtype"):
        run(source, tmp_path / "mg", "legacy")
    run(source, tmp_path / "mg", "legacy", dtype="float32")


def test_stages_of_unequal_length_are_read(folders, tmp_path):
    """As Megatron writes them with num_layers_in_first_pipeline_stage, also without arguments."""
    dims = dims_of(config_of("qwen3"))
    layout = MegatronLayout(tp=2, pp=2, stages=(1, 3))
    column = column_of(dims, 256)
    args = build_args(
        dims,
        layout,
        vocab_rows=256,
        vocab_divisor=128,
        file_format="legacy",
        spelling="te",
        dtype=torch.float32,
    )
    output = LegacyOutput(
        column,
        layout,
        Filler(HfFolder(folders["qwen3"]), None),
        args,
        iteration=None,
        spelling="te",
    )
    for name in output.files:
        output.write(name, tmp_path / "mg" / "release" / name)
    shutil.copy(folders["qwen3"] / "config.json", tmp_path / "mg")
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    found, expected = tensors_of(tmp_path / "hf"), tensors_of(folders["qwen3"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3", {"tp": 2, "pp": 2}),
        ("experts", {"ep": 2}),
        ("mixed", {"tp": 2, "ep": 3, "etp": 1}),
    ],
)
def test_folders_without_arguments_tell_their_layout(folders, tmp_path, kind, sizes):
    """As other converters leave them: no args, weights only."""
    run(folders[kind], tmp_path / "mg", "legacy", **sizes)
    for path in (tmp_path / "mg" / "release").glob("*/*.pt"):
        content = torch.load(path, weights_only=False)
        torch.save({"model": content["model"], "checkpoint_version": 3.0}, path)
    (tmp_path / "mg" / "pentad-convert.json").unlink()
    run(tmp_path / "mg", tmp_path / "hf", "hf")
    found, expected = tensors_of(tmp_path / "hf"), tensors_of(folders[kind])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("to", ["legacy", "torch_dist"])
def test_a_model_starts_from_a_megatron_folder(folders, tmp_path, to):
    """The reader in the place of the HF folder: the same native weights."""
    run(folders["mixed"], tmp_path / "mg", to, tp=2)
    dims = dims_of(folders["mixed"])
    model = build_model(dims, device="cpu", dtype=torch.float32)
    shards = transfer.whole_shards(native_tensors(model))
    transfer.fill(shards, map_of(dims), open_weights(tmp_path / "mg", dims))
    expected = native_tensors(load_model(folders["mixed"]))
    assert all(torch.equal(shards[name].tensor, expected[name]) for name in expected)


def test_arguments_tell_the_layout(folders, tmp_path):
    run(folders["mixed"], tmp_path / "mg", "legacy", tp=2, pp=2, ep=3, etp=1)
    args = rank_file(tmp_path / "mg", "mp_rank_00_000_000")["args"]
    assert args.tensor_model_parallel_size == args.pipeline_model_parallel_size == 2
    assert args.expert_model_parallel_size == 3 and args.expert_tensor_parallel_size == 1
    assert args.virtual_pipeline_model_parallel_size is None
    assert (args.num_layers, args.hidden_size, args.kv_channels) == (4, 40, 6)
    assert args.moe_layer_freq == [1, 0, 1, 1] and args.padded_vocab_size == 256
    assert args.untie_embeddings_and_output_weights and args.qk_layernorm


def test_a_layout_that_does_not_fit_is_refused_with_values_that_do(folders, tmp_path):
    with pytest.raises(UserError) as caught:
        run(folders["mixed"], tmp_path / "mg", "legacy", tp=5, pp=3, ep=4)
    text = str(caught.value)
    assert "tp = 5: must divide num_heads = 12; use one of 1, 2, 3, 4, 6, 12." in text
    assert "pp * vpp = 3 must divide num_layers = 4; use one of 1, 2, 4." in text
    assert "ep = 4: must divide num_experts = 6; use one of 1, 2, 3, 6." in text
    assert "etp = 5 (it is tp unless given)" in text
    assert not any(path.name.startswith(".mg") for path in tmp_path.iterdir())
    with pytest.raises(UserError, match="etp = 2: must divide tp = 1 in legacy folders"):
        run(folders["mixed"], tmp_path / "mg", "legacy", etp=2)
    with pytest.raises(UserError, match="qwen3 has no experts; leave both out"):
        run(folders["qwen3"], tmp_path / "mg", "legacy", ep=2)
    with pytest.raises(UserError, match="tp = 2: splits Megatron's files"):
        run(folders["qwen3"], tmp_path / "mg", "hf", tp=2)


def test_layouts_count_ranks_as_megatron_does():
    dims = dims_of({**config_of("experts"), "num_hidden_layers": 8})
    layout = build_layout(dims, tp=2, pp=2, vpp=2)
    assert [list(layout.layers(p, v)) for p in range(2) for v in range(2)] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]
    # World of 2, TP 2, ETP 1, EP 2: rank 0 is (tp 0, ep 0), rank 1 is (tp 1, ep 1).
    folded = build_layout(dims, tp=2, ep=2, etp=1)
    assert sorted(folded.folders()) == ["mp_rank_00_000", "mp_rank_01_001"]
    assert len(folded.grid()) == 4


@pytest.mark.slow
def test_several_processes_write_the_same_bytes(folders, tmp_path):
    run(folders["mixed"], tmp_path / "one", "legacy", tp=2, pp=2)
    ended = run(folders["mixed"], tmp_path / "two", "legacy", tp=2, pp=2, processes=2)
    assert ended.status == "written" and ended.num_files == 4
    assert bytes_of_folder(tmp_path / "two") == bytes_of_folder(tmp_path / "one")


def test_files_have_a_size_limit(folders, tmp_path):
    run(folders["mixed"], tmp_path / "mg", "torch_dist", shard_bytes=1 << 16)
    parts = sorted((tmp_path / "mg" / "release").glob("*.distcp"))
    assert len(parts) > 5
    assert max(path.stat().st_size for path in parts) < 2 * (1 << 16)
