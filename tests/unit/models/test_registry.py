"""Models from folders and back: what is accepted, what is refused, what is left as it was."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pentad.core.errors import UserError
from pentad.models import families
from pentad.models.families import dims_of, family_of, spec_of
from pentad.models.hf_weights import native_shards
from pentad.models.registry import build_model, create_model, load_model, load_weights, save_model
from pentad.weights import transfer
from pentad.weights.transfer import RandomReader, Shard
from pentad_tools.models.cases import (
    DEEPSEEK_SIZES,
    EXPERT_SIZES,
    PARTIAL_ROTARY,
    SHARED_SIZES,
    SIZES,
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 20,
    "intermediate_size": 13,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path):
    save_model(create_model(dims_of(CONFIG), seed=1), tmp_path / "hf", hf_config=CONFIG)
    return tmp_path / "hf"


def edit(folder, **changes):
    """Adds, replaces or (with None) removes tensors of the folder's file."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, file)


FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERT_SIZES, **SHARED_SIZES},
    "qwen3_moe": EXPERT_SIZES,
    "glm4_moe": {**DEEPSEEK_SIZES, **PARTIAL_ROTARY},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_draw_the_bits_of_one_thread_whole_and_in_parts(family, monkeypatch):
    dims = dims_of({"model_type": family, **SIZES, **FAMILIES[family]})
    model = build_model(dims, device="cpu", dtype=torch.float32)
    whole = native_shards(model)
    parts = {}  # the second of three ranks, where there are rows enough
    for name, shard in whole.items():
        (start, stop), *rest = shard.box
        rows = (start + stop // 3, start + 2 * stop // 3)
        parts[name] = Shard(torch.empty_like(shard.tensor[slice(*rows)]), (rows, *rest))
    drawn = {}
    for num, alone_bytes in ((1, transfer.ALONE_BYTES), (4, 0)):
        monkeypatch.setattr(transfer, "NUM_READERS", num)
        monkeypatch.setattr(transfer, "ALONE_BYTES", alone_bytes)
        for shards in (whole, parts):
            transfer.fill(shards, model.weight_map, RandomReader(model.weight_map, shards, 3))
        drawn[num] = [s.tensor.detach().clone() for s in (*whole.values(), *parts.values())]
    one, four = drawn.values()
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))
    cut = [shard.tensor[slice(*parts[name].box[0])] for name, shard in whole.items()]
    assert all(torch.equal(a, s.tensor) for a, s in zip(cut, parts.values(), strict=True))


def test_a_tied_head_on_disk_is_accepted_if_it_is_the_embedding(folder):
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, **{"lm_head.weight": table.clone()})
    assert torch.equal(load_model(folder).head_weight, table)
    edit(folder, **{"lm_head.weight": table + 1e-3})
    sentence = "lm_head.weight: differs from model.embed_tokens.weight, but the config ties the two"
    with pytest.raises(UserError, match=sentence):
        load_model(folder)


def test_tensors_that_carry_nothing_are_passed_over(folder):
    edit(folder, **{"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    load_model(folder)


def test_every_problem_is_told_at_once_and_the_model_stays_as_it_was(folder):
    model = create_model(dims_of(folder), seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    edit(
        folder,
        **{
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.ones(14, 20),
            "model.layers.0.mlp.up_proj.bias": torch.ones(13),
        },
    )
    with pytest.raises(UserError) as caught:
        load_weights(model, folder)
    told = "\n".join(str(problem) for problem in caught.value.problems)
    assert "model.norm.weight: missing; the model needs it as [20]" in told
    assert "up_proj.weight: shape [14, 20], but the config makes it [13, 20]" in told
    assert "up_proj.bias: no rule of the map matches it" in told
    assert len(caught.value.problems) == 3
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "no config.json there; give a folder with config.json"),
        ("{", "is not JSON"),
        ("[]", "has no JSON object"),
        ('{"model_type": "mamba"}', "model_type = mamba: no such model family; use one of"),
        ("{}", "model_type = None: no such model family"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_model(tmp_path)


def test_a_folder_travels_whole(folder, tmp_path):
    generation = transformers.GenerationConfig(eos_token_id=7, max_new_tokens=9)
    generation.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    model = load_model(folder)
    out = tmp_path / "out"
    save_model(model, out, dtype=torch.bfloat16, source_folder=folder, shard_bytes=2000)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert {**CONFIG, **config} == config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16 and theirs.generation_config.max_new_tokens == 9
    assert (out / "tokenizer_config.json").exists()
    expected = load_model(folder, dtype=torch.bfloat16)
    again = load_model(out, dtype=torch.bfloat16)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_rule_can_keep_its_tensor_in_a_dtype_of_its_own(monkeypatch):
    spec = spec_of("qwen3_moe")
    router = "layers.{i}.ffn.router.weight"
    rules = tuple(replace(r, dtype="float32") if r.target == router else r for r in spec.rules)
    module = ModuleType("precise")
    module.SPEC = replace(spec, rules=rules, family="precise")
    monkeypatch.setitem(sys.modules, "precise", module)
    monkeypatch.setattr(families, "REGISTERED", {})
    config = transformers.Qwen3MoeConfig(
        vocab_size=31, hidden_size=20, num_hidden_layers=1, num_experts=4, moe_intermediate_size=6,
        num_attention_heads=5, num_key_value_heads=5, num_experts_per_tok=2,
    )  # fmt: skip
    dims = dims_of(config, "precise:SPEC")
    assert dims.family == "precise"
    model = build_model(dims, device="meta", dtype=torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert kinds.pop("layers.0.ffn.router.weight") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


def test_a_config_cannot_name_code_to_run(folder, tmp_path):
    """A folder from elsewhere is data: its model_type is a name, never a path."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nSPEC = 1\n")
    config = {**CONFIG, "model_type": f"{tmp_path}/evil.py:SPEC"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type = .*evil.py:SPEC: is not a name of a family"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_tied_tables_are_compared_to_their_last_row(folder, monkeypatch):
    monkeypatch.setattr(transfer, "TWIN_BYTES", 200)  # a few rows at a time
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, **{"lm_head.weight": table.clone()})
    load_model(folder)
    table[-1, -1] += 1
    edit(folder, **{"lm_head.weight": table})
    with pytest.raises(UserError, match="differs from model.embed_tokens.weight"):
        load_model(folder)


def test_integers_are_no_weights(folder):
    table = load_file(folder / "model.safetensors")["model.norm.weight"]
    edit(folder, **{"model.norm.weight": table.to(torch.int8)})
    with pytest.raises(UserError, match="model.norm.weight: holds torch.int8, and weights are"):
        load_model(folder)


def test_a_family_of_thousands_of_letters_is_refused():
    with pytest.raises(UserError, match="is not a name of a family") as refused:
        family_of({"model_type": "x" * 4000})
    assert len(str(refused.value)) < 400
