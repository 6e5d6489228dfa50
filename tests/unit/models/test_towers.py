"""Text towers of multimodal folders: logits of the whole model, and the whole on disk."""

import itertools
import json

import pytest
import torch
from closeness import assert_close
from tables import table
from tower_toys import (
    CONFIGS,
    PROCESSOR,
    others_of,
    read_whole,
    tensors_of,
    write_whole,
)
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from pentad.core.errors import UserError
from pentad.models.catalog import dims_of as planned_dims_of
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, language_config_of
from pentad.models.hf_weights import kept_buffers
from pentad.models.registry import load_model, save_model
from pentad.planner.figures import Device
from pentad.planner.plan import build_plan
from pentad.planner.prepare import prepare

IDS = torch.tensor([3, 9, 4, 4, 11, 2, 7, 5, 6, 10, 3, 8, 8, 2, 4, 9, 5])


@torch.no_grad()
def logits_of(folder):
    model = load_model(folder)
    return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))


@torch.no_grad()
def their_logits(model):
    return model(input_ids=IDS[None]).logits[0].float()


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_tower_has_the_logits_of_the_whole_model_and_is_saved_in_it(kind, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    theirs = write_whole(source, kind)
    assert_close(logits_of(source), their_logits(theirs))

    model = load_model(source)
    with torch.no_grad():
        for tensor in (*model.parameters(), *kept_buffers(model).values()):
            tensor.mul_(1.25)
    save_model(model, out, source_folder=source)

    before, after, others = tensors_of(source), tensors_of(out), others_of(source)
    assert after.keys() == before.keys() and others
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - others)
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert (out / "preprocessor_config.json").read_text() == PROCESSOR
    again = read_whole(out)
    assert type(again) is type(theirs)
    assert_close(their_logits(again), logits_of(out))


def test_three_equal_positions_turn_as_plain_rotary_whatever_the_sections(tmp_path):
    for kind, sections in (("qwen2_5_vl", [1, 0, 3]), ("qwen3_vl", [0, 3, 1])):
        text = CONFIGS[kind]["text_config"]
        rope = text["rope_parameters"] | {"mrope_section": sections}
        theirs = write_whole(tmp_path / kind, kind, text_config={**text, "rope_parameters": rope})
        equal = torch.arange(len(IDS)).expand(3, 1, -1)
        with torch.no_grad():
            logits = theirs(input_ids=IDS[None], position_ids=equal).logits[0]
            apart = theirs(
                input_ids=IDS[None], position_ids=equal * torch.tensor([1, 2, 3])[:, None, None]
            )
        assert_close(logits_of(tmp_path / kind), logits)
        assert (apart.logits[0] - logits).abs().max() > 1e-3


@pytest.mark.parametrize("begin", ["model.language_model.", "language_model.model."])
def test_folders_of_either_spelling_are_read_and_keep_it(begin, tmp_path):
    from safetensors.torch import save_file

    theirs = write_whole(tmp_path, "llava")
    head = "lm_head." if begin.startswith("model.") else "language_model.lm_head."
    spelled = {}
    for name, tensor in tensors_of(tmp_path).items():
        name = name.replace("language_model.model.", begin).replace("language_model.lm_head.", head)
        spelled[name] = tensor
    save_file(spelled, tmp_path / "model.safetensors", {"format": "pt"})
    assert_close(logits_of(tmp_path), their_logits(theirs))
    save_model(load_model(tmp_path), tmp_path / "out", source_folder=tmp_path)
    assert tensors_of(tmp_path / "out").keys() == spelled.keys()


def test_a_folder_in_bf16_is_saved_in_float32_with_the_other_towers_as_they_were(tmp_path):
    write_whole(tmp_path / "wide", "qwen2_5_vl").to(torch.bfloat16).save_pretrained(tmp_path / "s")
    (tmp_path / "s" / "tekken.json").write_text("{}")
    save_model(
        load_model(tmp_path / "s"),
        tmp_path / "out",
        dtype=torch.float32,
        source_folder=tmp_path / "s",
    )
    before, after = tensors_of(tmp_path / "s"), tensors_of(tmp_path / "out")
    for name, tensor in after.items():
        is_other = name in others_of(tmp_path / "s")
        assert tensor.dtype == (torch.bfloat16 if is_other else torch.float32)
        assert torch.equal(tensor.float(), before[name].float())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert (tmp_path / "out" / "tekken.json").exists()  # the tokenizer of Mistral's folders


def test_configs_of_released_folders_are_read(tmp_path):
    """Flat ones of Qwen2.5-VL, and those of Gemma 3 and LLaVA that leave most keys out."""
    flat = {
        "model_type": "qwen2_5_vl",
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936},
        **{"max_window_layers": 70, "sliding_window": 32768, "use_sliding_window": False},
        **{"rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "hidden_size": 1280},
    }
    dims = dims_of(flat)
    assert (dims.family, dims.num_layers, dims.tie_embeddings) == ("qwen2", 36, True)
    assert dims.rope_theta == 1e6 and not dims.rope_scaling
    gemma = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    dims = dims_of({"model_type": "gemma3", "text_config": gemma, "vision_config": {}})
    assert (dims.vocab_size, dims.num_heads, dims.head_dim) == (262208, 8, 256)
    llava = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    dims = dims_of({"model_type": "llava", "text_config": llava})
    assert (dims.hidden_size, dims.num_layers, dims.tower_names[0][1]) == (
        4096,
        32,
        "model.language_model.",
    )


def test_null_in_a_text_config_is_what_transformers_makes_of_it():
    """As in Mistral Small 3.1 and Ministral 3: null is no window, and not the family's default."""
    sizes = CONFIGS["mistral3"]["text_config"] | {"vocab_size": 50}
    nulls = dict.fromkeys(("sliding_window", "pad_token_id", "head_dim", "num_key_value_heads"))
    for family in ("mistral", "ministral", "qwen2"):
        text = sizes | nulls | {"model_type": family}
        dims = dims_of({"model_type": "mistral3", "text_config": text})
        assert (dims.sliding_window, dims.padding_id, dims.sliding_layers) == (None, None, ())
        assert (dims.num_kv_heads, dims.head_dim) == (4, 8)
    long = CONFIGS["qwen2_vl"]["text_config"] | {"vocab_size": 50, "rope_parameters": None}
    assert dims_of({"model_type": "qwen2_vl", "text_config": {**long, "rope_theta": None}}) == (
        dims_of({"model_type": "qwen2_vl", "text_config": long})
    )


TIES = ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})


@pytest.mark.parametrize("kind", [*sorted(CONFIGS), "llava, smollm3"])
def test_embeddings_are_tied_as_transformers_ties_them(kind):
    """Wherever the key is, and where it is left out."""
    kind, _, family = kind.partition(", ")
    sizes = CONFIGS[kind]["text_config"] | {"vocab_size": 50}
    sizes |= {"model_type": family} if family else {}
    for of_whole, of_text in itertools.product(TIES, TIES):
        given = {**CONFIGS[kind], "text_config": sizes | of_text, **of_whole}
        given.pop("tie_word_embeddings" if not of_whole else "", None)
        theirs = CONFIG_MAPPING[kind](**json.loads(json.dumps(given)))
        found = dims_of({**given, "model_type": kind})
        assert found.tie_embeddings == theirs.tie_word_embeddings, (of_whole, of_text)
    if kind == "gemma3":  # the only class that takes it
        theirs = CONFIG_MAPPING[kind](text_config=dict(sizes), tie_word_embeddings=None)
        null = {"model_type": kind, "text_config": sizes, "tie_word_embeddings": None}
        assert dims_of(null).tie_embeddings == bool(theirs.tie_word_embeddings)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3_vl", {"hidden_act": "gelu"}, "hidden_act = 'gelu', only silu is built"),
        ("qwen2_5_vl", {"kv_lora_rank": 8}, "kv_lora_rank = 8: it uses latent attention"),
        (
            "qwen2_5_vl",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
            r"rope_parameters.mrope_section = \[1, 1, 1\]: must sum to 4",
        ),
        ("llava", {"model_type": "helium"}, "model_type = helium: no such model family"),
    ],
)
def test_what_the_family_lacks_is_rejected_by_name(kind, text, words):
    given = CONFIGS[kind]["text_config"] | {"vocab_size": 50} | text
    with pytest.raises(UserError, match=words):
        dims_of({"model_type": kind, "text_config": given})


SCALAR = sorted(CONFIGS)


@pytest.mark.parametrize("kind", table(SCALAR, sorted({*SCALAR} - {"gemma3", "glm4v", "qwen3_5"})))
def test_a_model_with_a_value_head_is_saved_as_a_language_model(kind, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_whole(source, kind)
    model = load_model(source, value_head=True, seed=3)
    save_model(model, out, source_folder=source)
    config = json.loads((out / "config.json").read_text())
    assert config["num_labels"] == 1 and "vision_config" not in config
    assert not {name for name in tensors_of(out) if "vision" in name or "visual" in name}
    with torch.no_grad():
        found = [
            one.values(one(IDS, torch.arange(len(IDS)), causal_attend))
            for one in (model, load_model(out, value_head=True))
        ]
        assert torch.equal(*found)
        if kind not in ("gemma4", "qwen3_5_moe"):  # transformers has no class of these families
            theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
            assert_close(found[0][-1], theirs(input_ids=IDS[None]).logits[0, 0])


def test_a_tower_that_its_family_cannot_express_is_not_saved_alone():
    """GLM-4V always has biases of queries, keys and values; GLM-4 has them by a key."""
    config = {"model_type": "glm4v", **CONFIGS["glm4v"]}
    config["text_config"] = {**config["text_config"], "vocab_size": 50, "attention_bias": False}
    with pytest.raises(UserError, match="text tower as glm4 would differ in qkv_bias"):
        language_config_of(config)


def test_quantised_and_unknown_wholes_are_rejected():
    text = CONFIGS["gemma3"]["text_config"] | {"vocab_size": 50}
    quantised = {"model_type": "gemma3", "text_config": text, "quantization_config": {"bits": 4}}
    with pytest.raises(UserError, match="its weights are quantised"):
        dims_of(quantised)
    with pytest.raises(UserError, match="model_type = paligemma: no such model family"):
        dims_of({"model_type": "paligemma", "text_config": text})
    with pytest.raises(UserError, match="text_config = None: must be a JSON object"):
        dims_of({"model_type": "gemma3"})


def test_a_tower_without_its_folder_is_not_saved(tmp_path):
    write_whole(tmp_path, "llava")
    with pytest.raises(UserError, match="saved with the other towers"):
        save_model(load_model(tmp_path), tmp_path / "out", hf_config=tmp_path)


def test_planning_reads_the_tower_and_counts_the_whole_export(tmp_path):
    write_whole(tmp_path, "mistral3")
    assert planned_dims_of(str(tmp_path)) == dims_of(tmp_path)
    words = [f"actor.path={tmp_path}", "reward.fn=sort_digits", "gconfig.max_new_tokens=8"]
    config, _ = prepare(None, [*words, "train_dataset.path=rows.jsonl"], "plan")
    plan = build_plan(config, Device("cpu", 1 << 34, "a test's"))
    exact = sum(tensor.nbytes for tensor in tensors_of(tmp_path).values())
    assert plan.files.export_bytes == pytest.approx(exact, rel=1e-3)
