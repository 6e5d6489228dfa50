"""Weight decay and the padding row: what transformers decays and freezes, family by family."""

import pytest
import torch
import transformers
from engine_toys import CONFIG, PolicyLoss, make_engine, make_rows, train
from torch import nn

from pentad.models import families
from pentad.models.families import dims_of
from pentad.models.hf import config as hf_config
from pentad.models.hf.config import measure, read_hf_config
from pentad.models.hf.module import build_hf_map
from pentad.models.language_model import LanguageModel, _is_decayed
from pentad.models.registry import build_model
from pentad_tools.models.cases import SIZES, variants_of

FURTHER = {
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": None},
    "cohere": {"use_qk_norm": True},
    "starcoder2": {"use_bias": True},
    "olmo2": {},
}
MATRICES = {"gpt_oss", "cohere"}
"""Whose biases of stacked experts, or norms of heads, have two dims."""


def decayed_by_transformers(causal: nn.Module) -> set[str]:
    """Matrices that its Trainer decays, by their names in memory, without the tables."""
    tables = {f"{name}.weight" for name, x in causal.named_modules() if isinstance(x, nn.Embedding)}
    parameters = dict(causal.named_parameters())
    names = transformers.Trainer.get_decay_parameter_names(None, causal)
    held = set(names) & parameters.keys()  # a tied head is its table
    return {name for name in held if name not in tables and parameters[name].ndim >= 2}


FAMILIES = [
    pytest.param(family, config, id=f"{family}, {variant}")
    for family in families.known_families()
    for variant, config in variants_of(transformers.AutoConfig.for_model(family).to_dict()).items()
    if "rope" not in variant
]


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_a_family_decays_what_transformers_decays(family, config, monkeypatch):
    # Whether fsdp can pack rows of it or not, its tensors have names.
    packable = hf_config.PACKABLE | {"linear_attention"}
    monkeypatch.setattr(hf_config, "PACKABLE", packable)
    source = {"model_type": family, **config}
    dims = dims_of(source)
    model = build_model(dims, device="meta", dtype=torch.float32)
    with torch.device("meta"):
        causal = transformers.AutoModelForCausalLM.from_config(read_hf_config(source))
    theirs = build_hf_map(causal, dims, family).entries
    wanted = {r.source for name in decayed_by_transformers(causal) for r in theirs[name].regions}
    entries = model.weight_map.entries
    held = dict(model.named_parameters())
    assert "value_head.weight" in model.decayed - held.keys()
    mine = {r.source for name in model.decayed & held.keys() for r in entries[name].regions}
    assert mine == wanted
    biases = {r.source for name in held for r in entries[name].regions} - wanted
    kinds = ("norm", "bias", "embed_tokens", "sinks", "A_log")
    assert all(any(kind in name for kind in kinds) for name in biases)


@pytest.mark.parametrize("family", FURTHER)
def test_a_model_of_transformers_decays_what_its_trainer_decays(family):
    source = {"model_type": family, **SIZES, "hidden_size": 168, **FURTHER[family]}
    config = read_hf_config(source)
    with torch.device("meta"):
        causal = transformers.AutoModelForCausalLM.from_config(config)
    model = LanguageModel(measure(config))  # whether or not its forward can be packed
    model.add_module("theirs", causal)
    hf_map = build_hf_map(causal, model.dims, family)
    names = dict(causal.named_parameters())
    kept = {name for name in names if name not in decayed_by_transformers(causal)}
    decayed = {name for name in names if _is_decayed(hf_map.entries[name])}
    assert decayed - {name.removeprefix("theirs.") for name in model.tables} == names.keys() - kept
    assert any(names[name].ndim > 1 for name in kept - decayed) == (family in MATRICES)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_padding_row_has_the_gradient_it_has_in_transformers(is_tied):
    source = CONFIG | {"pad_token_id": 5, "tie_word_embeddings": is_tied}
    engine = make_engine(config=source)
    weights = dict(engine.iter_weights())
    theirs = transformers.AutoModelForCausalLM.from_config(read_hf_config(source))
    theirs.load_state_dict(weights, strict=not is_tied)
    rows = make_rows()
    assert sum(int((row.ids == 5).sum()) for row in rows) > 3
    for row in rows:
        logp = torch.log_softmax(theirs(row.ids[None]).logits[0], -1)
        at = logp[:-1].gather(1, row.ids[1:, None])[:, 0]
        columns = row.columns["weights"] * row.columns["advantages"]
        (-(columns[1:] * at).sum()).backward()
    wanted = theirs.model.embed_tokens.weight.grad
    assert bool(wanted[5].any()) == is_tied, "a tied head gives the row a gradient"
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss())
    mine = engine.parameters["embed.weight"].grad
    torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)  # fp32 sums in another order


@pytest.mark.parametrize(
    ("given", "wanted"), [(None, None), (0, 0), (36, 36), (37, None), (-1, 36), (-38, None)]
)
def test_the_padding_row_is_found_as_torch_finds_it(given, wanted):
    assert dims_of(CONFIG | {"pad_token_id": given}).padding_id == wanted


def test_a_frozen_padding_row_stays():
    source = CONFIG | {"pad_token_id": 5, "tie_word_embeddings": False}
    engine = make_engine(config=source)
    before = engine.parameters["embed.weight"].detach().clone()
    rows = make_rows()
    train(engine, rows, steps=2)
    moved = (engine.parameters["embed.weight"] != before).any(1)
    seen = {int(i) for row in rows for i in row.ids}
    assert 5 in seen and not moved[5] and moved[4] and moved[6]
