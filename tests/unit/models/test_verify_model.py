"""`verify-model` passes every family of the package and catches wrong maps, each a real mistake."""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import pytest
import transformers
from family_toys import FAMILY_CONFIGS
from tables import table
from tower_toys import write_whole

from pentad.core.errors import UserError
from pentad.models import families, towers
from pentad.models.families import spec_of
from pentad.models.spec import MEGATRON
from pentad.weights import cuts
from pentad.weights.cuts import Seam
from pentad.weights.map import Glu, Stack, Transposed, as_spec
from pentad_tools.models import checks
from pentad_tools.models.cases import variants_of
from pentad_tools.models.verify import (
    FamilySubject,
    iter_outcomes,
    subject_of,
    verify,
    verify_subject,
)

transformers.utils.logging.disable_progress_bar()


FIRST = ["glm4_moe", "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
WHOLE = ["qwen3"]
"""Families whose every variant `make test` tries; of the others it tries one."""
CHOSEN = {"llama": "llama3 rope", "mistral": "window", "qwen2": "yarn rope"}
CHOSEN |= {"qwen2_moe": "linear rope", "qwen3_moe": "every second layer", "glm4_moe": "head norms"}
MORE = sorted({*families.known_families()} - {*FIRST})


@pytest.mark.parametrize("family", [*CHOSEN, *MORE])
def test_a_variant_of_each_further_family_passes(family):
    subject = subject_of(family)
    chosen = CHOSEN.get(family) or [*subject.spec.variants, "tied", "untied"][0]
    config = subject.configs[chosen]
    report = verify_subject(FamilySubject(subject.spec, {chosen: config}))
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]


@pytest.mark.full
@pytest.mark.parametrize("family", MORE)
def test_every_variant_of_the_further_families_passes(family):
    report = verify(family)
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]
    cases = {outcome.case for outcome in report.outcomes}
    assert cases >= {*spec_of(family).variants, "untied"}
    assert family == "phi3" or cases >= {"linear rope", "llama3 rope", "yarn rope"}


@pytest.mark.parametrize("family", table(FIRST, [one for one in FIRST if one not in WHOLE]))
def test_the_families_of_the_package_pass(family):
    report = verify(family)
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]
    ran = {outcome.check for outcome in report.outcomes}
    assert ran >= {*checks.CHECKS, *checks.WEIGHT_CHECKS}
    cases = {outcome.case for outcome in report.outcomes}
    assert cases >= {"untied", "tied", "linear rope", "llama3 rope", "yarn rope"}
    assert ("window" in cases) == (family not in ("llama", "glm4_moe"))
    wanted = {"biases", "head norms", "dense layers", "top-k as it is"}
    assert wanted <= cases or family != "glm4_moe"


def test_every_family_is_found_by_its_file():
    assert families.known_families() == sorted([*FIRST, *FAMILY_CONFIGS])


def subject_in_place(spec, monkeypatch, variant="untied", **changes):
    """A spec that takes its family's place, at one variant."""
    module = ModuleType(f"mutant_{id(spec)}")
    module.SPEC = spec
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(families.REGISTERED, spec.family, f"{module.__name__}:SPEC")
    keys = transformers.AutoConfig.for_model(spec.family).to_dict()
    config = {**variants_of(keys)[variant], **changes}
    return FamilySubject(spec, {variant: config})


def faults(*given, **changes):
    """The checks that fail."""
    report = verify_subject(subject_in_place(*given, **changes))
    return {outcome.check: outcome.detail for outcome in report.outcomes if not outcome.passed}


def is_caught(*given):
    """Whether a check fails; those after it are not run."""
    return not all(outcome.passed for outcome in iter_outcomes(subject_in_place(*given), []))


def edited(rules, target, **changes):
    """The rules with one changed (or, with no changes, dropped)."""
    assert any(rule.target == target for rule in rules)
    kept = (r if r.target != target else replace(r, **changes) for r in rules)
    return tuple(rule for rule in kept if changes or rule.target != target)


def swapped(rules, a, b):
    sources = {rule.target: rule.source for rule in rules}
    return edited(edited(rules, a, source=sources[b]), b, source=sources[a])


L = "layers.{i}."
HF = "model.layers.{i}."
M = "decoder.layers.{i}."


@dataclass(frozen=True)
class Naive:
    """[q; k; v] without regard to query groups."""

    q: str
    k: str
    v: str

    def regions(self, shape, sizes, index):
        out, row = [], 0
        for source, symbol in ((self.q, "Q"), (self.k, "K"), (self.v, "K")):
            part = (sizes[symbol], *shape[1:])
            (region,) = as_spec(source).regions(part, sizes, index)
            out.append(replace(region, target_start=(row, *region.target_start[1:])))
            row += sizes[symbol]
        return out


@dataclass(frozen=True)
class Reversed:
    """Experts stacked from the last to the first."""

    each: str

    def regions(self, shape, sizes, index):
        regions = Stack(self.each).regions(shape, sizes, index)
        last = shape[0] - 1
        return [
            replace(r, target_start=(last - r.target_start[0], *r.target_start[1:]))
            for r in regions
        ]


def misread(spec, change):
    return replace(spec, read_dims=lambda hf: change(spec.read_dims(hf), hf))


def native_mutants():
    qwen3, moe = spec_of("qwen3"), spec_of("qwen3_moe")
    rules = qwen3.rules
    gate, up = HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"
    o_proj = Transposed(HF + "self_attn.o_proj.weight")
    expert = HF + "mlp.experts.{e}."

    def wrong(new_rules, spec=qwen3):
        return replace(spec, rules=new_rules)

    yield (
        "gate and up swapped",
        wrong(edited(rules, L + "ffn.gate_up.weight", source=Glu(up, gate))),
    )
    yield "k and v swapped", wrong(swapped(rules, L + "attn.k.weight", L + "attn.v.weight"))
    yield (
        "q and k norm swapped",
        wrong(swapped(rules, L + "attn.q_norm.weight", L + "attn.k_norm.weight")),
    )
    yield (
        "input and post norm swapped",
        wrong(swapped(rules, L + "attn_norm.weight", L + "ffn_norm.weight")),
    )
    yield "a rule dropped", wrong(edited(rules, L + "attn.v.weight"))
    yield (
        "one tensor mapped twice",
        wrong(edited(rules, L + "attn.q_norm.weight", source=HF + "self_attn.k_norm.weight")),
    )
    yield (
        "head from the embedding",
        wrong(edited(rules, "head.weight", source="model.embed_tokens.weight")),
    )
    yield (
        "every layer's norm from layer 0",
        wrong(
            edited(rules, L + "attn_norm.weight", source="model.layers.0.input_layernorm.weight")
        ),
    )
    yield "o transposed", wrong(edited(rules, L + "attn.o.weight", source=o_proj))
    yield "key heads not cut", replace(qwen3, plan={"V": "tp", "Q": "tp", "F": "tp"})
    yield "ffn not cut", replace(qwen3, plan={"V": "tp", "Q": "tp", "K": "tp"})
    yield "hidden dim cut", replace(qwen3, plan={**qwen3.plan, "D": "tp"})
    yield (
        "q and k norms not built",
        replace(qwen3, read_dims=lambda hf: replace(qwen3.read_dims(hf), qk_norm=False)),
    )
    yield (
        "norm eps not read",
        replace(qwen3, read_dims=lambda hf: replace(qwen3.read_dims(hf), norm_eps=1e-6)),
    )
    yield (
        "rope theta not read",
        replace(qwen3, read_dims=lambda hf: replace(qwen3.read_dims(hf), rope_theta=1e4)),
    )
    down = Reversed(expert + "down_proj.weight")
    yield (
        "experts in reverse",
        wrong(edited(moe.rules, L + "ffn.experts.down", source=down), moe),
    )
    flipped = Stack(Glu(expert + "up_proj.weight", expert + "gate_proj.weight"))
    yield (
        "an expert's gate and up swapped",
        wrong(edited(moe.rules, L + "ffn.experts.gate_up", source=flipped), moe),
    )
    yield (
        "dense layers forgotten",
        wrong(edited(moe.rules, L + "ffn.down.weight", when=lambda dims, i: False), moe),
    )
    yield (
        "router dealt with the experts",
        replace(moe, rules=edited(moe.rules, L + "ffn.router.weight", shape="E D")),
    )
    yield "router's rows cut", replace(moe, plan={**moe.plan, "R": "ep"})
    no_gather = tuple(seam for seam in qwen3.seams if seam.module != "layers.{i}.attn")
    yield "no seam before attention", replace(qwen3, seams=no_gather)
    turned = [replace(s, kind="gather") if s.module.endswith("down") else s for s in qwen3.seams]
    yield "a seam of the wrong kind", replace(qwen3, seams=tuple(turned))
    idle = (*qwen3.seams, Seam("layers.{i}.attn_norm", "gather"))
    yield "a seam where nothing is cut", replace(qwen3, seams=idle)
    yield (
        "a norm that begins at random",
        wrong(edited(rules, L + "attn_norm.weight", init="normal")),
    )
    yield (
        "a projection that begins at zero",
        wrong(edited(rules, L + "attn.q.weight", init="zeros")),
    )
    yield "transformers' class misnamed", replace(qwen3, classes=("Qwen2ForCausalLM", ""))
    yield "scalar class not named", replace(qwen3, classes=(qwen3.classes[0], ""))
    for what, change in {
        "initial range not read": lambda dims, hf: replace(dims, initializer_range=0.02),
        "context length not read": lambda dims, hf: replace(dims, max_position=32768),
        "layers taken for key heads": lambda dims, hf: replace(
            dims, num_kv_heads=hf["num_hidden_layers"]
        ),
        "key heads taken for layers": lambda dims, hf: replace(
            dims, num_layers=hf["num_key_value_heads"]
        ),
    }.items():
        yield what, misread(qwen3, change)
    old_keys = ("rope_theta", "rope_scaling")
    yield (
        "older rope keys not read",
        replace(
            qwen3,
            read_dims=lambda hf: qwen3.read_dims(
                {key: value for key, value in hf.items() if key not in old_keys}
            ),
        ),
    )
    yield (
        "router cut with the experts",
        replace(moe, rules=edited(moe.rules, L + "ffn.experts.gate_up", shape="R 2 M D")),
    )


@pytest.mark.parametrize(("name", "spec"), [pytest.param(n, s, id=n) for n, s in native_mutants()])
def test_a_wrong_model_file_is_caught(name, spec, monkeypatch):
    assert is_caught(spec, monkeypatch)


TUNING = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@pytest.mark.parametrize(
    ("family", "variant", "change"),
    [
        pytest.param(
            "qwen3",
            "yarn rope, tuned",
            lambda dims, hf: replace(
                dims,
                rope_scaling={k: v for k, v in dims.rope_scaling.items() if k not in TUNING},
            ),
            id="yarn's tuning dropped",
        ),
        pytest.param(
            "qwen3_moe",
            "every second layer",
            lambda dims, hf: replace(dims, moe_layers=(True,) * dims.num_layers),
            id="sparse step not read",
        ),
        pytest.param(
            "qwen3",
            "window",
            lambda dims, hf: replace(dims, sliding_window=dims.sliding_window + 1),
            id="window one too wide",
        ),
        pytest.param(
            "ministral3",
            "untied",
            lambda dims, hf: replace(dims, query_growth_step=10),
            id="queries grow a token late",
        ),
        *(
            pytest.param(
                "glm4_moe",
                "untied",
                lambda dims, hf, change=change: replace(dims, **change),
                id=f"glm4_moe with {change}",
            )
            for change in (
                {"router_score": "softmax"},
                {"router_scale": 1.0},
                {"router_bias": False},
                {"rotary_dim": 0},
                {"rotary_dim": 8},
                {"norm_topk_prob": False},
                {"shared_expert_gate": True},
                {"moe_layers": (True,) * 3},
            )
        ),
    ],
)
def test_a_switch_that_is_misread_is_caught_by_its_variant(family, variant, change, monkeypatch):
    assert is_caught(misread(spec_of(family), change), monkeypatch, variant)


@pytest.mark.parametrize(
    "change", [{"dtype": ""}, {"dtype": "bfloat16"}, {"init": "ones"}, {"init": "normal"}], ids=str
)
def test_a_selection_bias_that_is_rounded_or_starts_elsewhere_is_caught(change, monkeypatch):
    spec = spec_of("glm4_moe")
    wrong = replace(spec, rules=edited(spec.rules, L + "ffn.router.bias", **change))
    assert is_caught(wrong, monkeypatch)


def test_key_and_value_biases_swapped_are_caught(monkeypatch):
    spec = spec_of("qwen2")
    rules = swapped(spec.rules, L + "attn.k.bias", L + "attn.v.bias")
    assert "logits and gradients" in faults(replace(spec, rules=rules), monkeypatch)


def test_a_tensor_kept_in_its_own_dtype_passes(monkeypatch):
    spec = spec_of("qwen3")
    kept = replace(spec, rules=edited(spec.rules, L + "attn_norm.weight", dtype="float32"))
    assert not faults(kept, monkeypatch)


def test_a_forgotten_tie_is_caught(monkeypatch):
    spec = spec_of("qwen3")
    wrong = replace(spec, rules=edited(spec.rules, "head.weight", tied=""))
    assert is_caught(wrong, monkeypatch, "tied")


def megatron_mutants():
    attn = L + "attn."
    qkv = M + "self_attention.linear_qkv.weight"
    naive = Naive(attn + "q.weight", attn + "k.weight", attn + "v.weight")
    twisted = replace(
        next(rule.source for rule in MEGATRON if rule.target == qkv),
        k=attn + "v.weight",
        v=attn + "k.weight",
    )
    yield "naive [q; k; v]", edited(MEGATRON, qkv, source=naive)
    yield "Megatron k and v swapped", edited(MEGATRON, qkv, source=twisted)
    norms = (
        M + "self_attention.linear_qkv.layer_norm_weight",
        M + "mlp.linear_fc1.layer_norm_weight",
    )
    yield "Megatron norms swapped", swapped(MEGATRON, *norms)
    yield "Megatron rule dropped", edited(MEGATRON, M + "mlp.linear_fc2.weight")
    head = next(rule for rule in MEGATRON if rule.target == "output_layer.weight")
    wrong_head = replace(head.source, source="embed.weight")
    yield "Megatron head from the embedding", edited(MEGATRON, head.target, source=wrong_head)


@pytest.mark.parametrize(
    ("name", "column"), [pytest.param(n, c, id=n) for n, c in megatron_mutants()]
)
def test_a_wrong_megatron_column_is_caught(name, column, monkeypatch):
    found = faults(replace(spec_of("qwen3"), megatron=column), monkeypatch)
    assert set(found) == {"Megatron"}


def test_fc1_cut_as_a_plain_chunk_is_caught(monkeypatch):
    monkeypatch.setattr(checks, "MEGATRON_PLAN", {**checks.MEGATRON_PLAN, "156": "tp"})
    column = edited(MEGATRON, M + "mlp.linear_fc1.weight", shape="156 D")
    spec = replace(spec_of("qwen3"), megatron=column)
    found = faults(spec, monkeypatch, intermediate_size=78)  # even: each rank gets whole rows
    assert set(found) == {"Megatron"} and "logits at tp 2" in found["Megatron"]


def test_torn_key_heads_are_caught(monkeypatch):
    monkeypatch.setattr(cuts, "UNITS", {"Q": "d"})
    found = faults(spec_of("qwen3"), monkeypatch)
    assert "logits and gradients" in found


def test_the_first_finding_names_tensor_and_rule(monkeypatch):
    spec = spec_of("qwen3")
    wrong = replace(spec, rules=edited(spec.rules, L + "attn.v.weight"))
    found = faults(wrong, monkeypatch)
    assert found["coverage"] == (
        "native tensor layers.0.attn.v.weight: the model has (56, 60), the map has none"
    )


def test_a_folder_is_verified_at_its_own_switches(tmp_path):
    config = transformers.Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    subject = subject_of(str(tmp_path))
    tiny = subject.configs["as configured"]
    assert tiny["tie_word_embeddings"] and tiny["rope_parameters"]["rope_type"] == "yarn"
    report = verify(str(tmp_path))
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]
    assert report.outcomes[0].check == "real headers"
    assert report.outcomes[0].detail.startswith("24 tensors")


LISTS = {"moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "moe_intermediate_size": [3072] * 32}
RELEASED = {
    "MiniMaxAI/MiniMax-M2": {
        **{"num_local_experts": 256, "num_experts_per_tok": 8, "head_dim": 128},
        **{"attn_type_list": [1] * 62, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
    },
    "tencent/Hunyuan-A13B-Instruct": {**LISTS, "use_cla": False},
    "allenai/OLMoE-1B-7B-0924": {"num_experts": 64, "num_experts_per_tok": 8, "clip_qkv": None},
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 27},
    },
}
"""Public models -> keys of their config.json beside those that are known of them."""


@pytest.mark.parametrize("name", RELEASED)
def test_a_config_of_a_released_mixture_is_verified_at_small_sizes(name, tmp_path):
    """With lists of a number for each layer, and keys that transformers passes over."""
    config = families.public_configs()[name] | RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject = subject_of(str(tmp_path))
    (tiny,) = subject.configs.values()
    dims = families.dims_of(tiny)
    assert (dims.num_experts, dims.num_layers) == (5, 3) and dims.num_params < 1e6
    if "MiniMax" in name:
        assert (dims.rotary_dim, dims.head_dim) == (8, 16)
        report = verify_subject(subject)
        assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]


@pytest.mark.parametrize("kind", ["glm4v", "mistral3", "qwen2_5_vl", "qwen3_5_moe"])
def test_a_multimodal_folder_is_verified_with_the_whole_model(kind, tmp_path):
    write_whole(tmp_path, kind)
    report = verify(str(tmp_path))
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]
    assert [outcome.check for outcome in report.outcomes[:2]] == ["real headers", "whole model"]


def test_a_tower_whose_config_is_misread_is_found(tmp_path, monkeypatch):
    write_whole(tmp_path, "qwen3_vl")
    wrong = replace(towers.TOWERS["qwen3_vl"], read_dims=partial(half_the_theta, tower="qwen3_vl"))
    monkeypatch.setattr(towers, "TOWERS", {**towers.TOWERS, "qwen3_vl": wrong})
    report = verify(str(tmp_path))
    (fault,) = [outcome for outcome in report.outcomes if not outcome.passed]
    assert fault.check == "whole model" and "differs from transformers" in fault.detail


def half_the_theta(hf, tower, right=towers.TOWERS):
    dims = right[tower].read_dims(hf)
    return replace(dims, rope_theta=dims.rope_theta / 2)


def test_a_family_that_transformers_lacks_is_refused(monkeypatch):
    module = ModuleType("unheard_of")
    module.SPEC = replace(spec_of("qwen3"), family="unheard")
    monkeypatch.setitem(sys.modules, "unheard_of", module)
    monkeypatch.setitem(families.REGISTERED, "unheard", "")
    with pytest.raises(UserError, match="transformers has no such model_type"):
        verify("unheard_of:SPEC")
