"""Adapters beside models of transformers: peft's gradients on the same model, and refusals."""

import pytest
import torch
from engine_toys import PolicyLoss, train, weights_of
from sections import engine_settings
from test_hf_families import EXPERTS, config_of, own_logprobs, write
from torch.nn import functional as F

from pentad.checkpoint.exports import AdapterExporter
from pentad.core.errors import RunError, UserError
from pentad.core.roles import NativeWeights
from pentad.core.types import Row
from pentad.engine.engine import build_engine
from pentad.engine.section import LoraConfig, OptimizerConfig
from pentad.models.families import dims_of, known_families, lora_map_of
from pentad.models.hf.config import read_hf_config
from pentad.models.hf.module import build_hf_model
from pentad.samplers.weight_proof import check_targets
from pentad.weights.peft import A, read_adapter

IDS = torch.randint(0, 40, (23,), generator=torch.Generator().manual_seed(5))
LORA = LoraConfig(rank=3, alpha=6.0)


def make(folder, lora=LORA, **settings):
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2))
    return build_engine(folder, engine_settings(lora=lora, **settings), backend="fsdp", seed=2)


def likelihood() -> Row:
    """The sum of -log p of all tokens but the first, as loss and count of 1."""
    weights = torch.ones(len(IDS))
    weights[0] = 0
    return Row(IDS, {"weights": weights, "advantages": weights.clone()}, 1.0)


@pytest.mark.parametrize("family", ["granite", "starcoder2", "phi3", "gpt_neox", "gemma2"])
def test_gradients_and_exports_are_those_of_peft_on_the_same_model(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = write(tmp_path / "base", family)
    engine = make(tmp_path / "base")
    keys = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0)
    theirs = peft.get_peft_model(model, keys).eval()
    named = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    gen = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in engine.tensors.items():
            if name.endswith(".b"):
                tensor.normal_(0, 0.1, generator=gen)
        mine = dict(engine.iter_weights())
        assert named.keys() == mine.keys()
        for name, parameter in named.items():
            parameter.copy_(mine[name])
    logits = theirs(input_ids=IDS[None]).logits[0]
    loss = F.cross_entropy(logits[:-1], IDS[1:], reduction="sum")
    loss.backward()
    engine.begin_step()
    own = engine.accumulate([likelihood()], PolicyLoss())
    assert own.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in engine.held.gradients().items():
        module, _, key = name.rpartition(".lora.")
        expected = named[f"{module}.lora_{key.upper()}.weight"].grad
        # Sums of a few hundred float32 terms in another order.
        error = (gradient - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
    engine.end_step()
    AdapterExporter().export(engine, tmp_path / "adapter", is_async=False)
    loaded = peft.PeftModel.from_pretrained(write(tmp_path / "base", family), tmp_path / "adapter")
    (output,) = engine.forward([likelihood()])
    torch.testing.assert_close(
        output["logprobs"][1:], own_logprobs(loaded.eval(), likelihood()), rtol=1e-4, atol=1e-4
    )
    lora = LORA.model_copy(update={"init_path": str(tmp_path / "adapter")})
    warm = make(tmp_path / "base", lora)
    assert all(torch.equal(t, warm.tensors[name]) for name, t in weights_of(engine).items())
    assert read_adapter(tmp_path / "adapter").spec == engine.base.spec


def test_only_factors_move_in_float32_beside_weights_in_their_own_dtype(tmp_path):
    write(tmp_path / "base", "granite")
    engine = make(tmp_path / "base", dtype="bfloat16")
    frozen = {name: tensor.clone() for name, tensor in engine.held.frozen().items()}
    assert {t.dtype for n, t in frozen.items() if n.endswith("proj.weight")} == {torch.bfloat16}
    assert {t.dtype for t in engine.masters.values()} == {torch.float32}
    began = weights_of(engine)
    train(engine, [likelihood()], steps=2)
    assert not any(torch.equal(began[n], t) for n, t in weights_of(engine).items())
    assert all(torch.equal(frozen[n], t) for n, t in engine.held.frozen().items())
    assert all(p.grad is None for p in engine.decoder.parameters() if not p.requires_grad)
    assert {t.dtype for s in engine.optimizer.state.values() for t in s.values()} == {torch.float32}
    assert engine.lend_base() is None and not isinstance(engine.iter_weights(), NativeWeights)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_give_the_same_factors_bit_for_bit(mode, tmp_path):
    write(tmp_path / "base", "granite")
    found = []
    for keys in ({"gradient_checkpointing": False}, {"ac_mode": mode}):
        engine = make(tmp_path / "base", **keys)
        train(engine, [likelihood()], steps=2)
        found.append(weights_of(engine))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_the_effect_of_an_adapter_can_be_tested_and_is_put_back(tmp_path):
    write(tmp_path / "base", "starcoder2")
    engine = make(tmp_path / "base")
    train(engine, [likelihood()])
    before = weights_of(engine)
    (moved,) = engine.forward([likelihood()])
    engine.shake_adapter(1.0)
    (shaken,) = engine.forward([likelihood()])
    assert not torch.equal(shaken["logprobs"], moved["logprobs"])
    engine.shake_adapter(0.0)
    assert all(torch.equal(before[name], t) for name, t in weights_of(engine).items())


WORDS = "q, k, v, o"
REFUSED = [
    ("starcoder2", {}, ("gate",), f"starcoder2 of transformers has no gate.*{WORDS}, c_fc, c_proj"),
    ("gpt_neox", {}, ("q", "dense"), "has no q; .* query_key_value, dense, dense_h_to_4h, dense_4"),
    ("gpt2", {}, "all-linear", "gpt2 of transformers has no linear layers in its blocks"),
    ("granitemoe", EXPERTS, "all-linear", f"holds experts in shared .* name some of {WORDS}.$"),
    ("granitemoe", EXPERTS, ("q", "experts"), f"holds experts in shared .* name some of {WORDS}.$"),
    ("granite", {}, ("head",), "log-probs are computed together with the head"),
    ("granite", {}, ("gate",), "gate and up are one product here"),
]


@pytest.mark.parametrize(("family", "more", "targets", "said"), REFUSED)
def test_targets_that_a_model_type_lacks_are_refused_with_its_names(family, more, targets, said):
    model = build_hf_model(config_of(family, **more), dtype=torch.float32)
    with pytest.raises(UserError, match=said):
        model.lora_map(LoraConfig(targets=targets))


def test_an_up_projection_without_a_gate_is_a_target_of_its_own():
    model = build_hf_model(config_of("apertus"), dtype=torch.float32)
    names = model.lora_map(LoraConfig(targets=("up",))).sources
    assert {name.rpartition(".lora")[0] for name in names} == {
        f"model.layers.{i}.mlp.up_proj" for i in range(2)
    }


@pytest.mark.parametrize(
    ("family", "routers", "plain"),
    [
        ("hunyuan_v1_moe", ["gate.wg"], []),
        ("qwen2_moe", ["gate", "shared_expert_gate"], ["gate_proj"]),
        ("gemma3n_text", ["modality_router"], ["per_layer_input_gate"]),
    ],
)
def test_routers_take_no_factors_and_other_gates_do(family, routers, plain):
    linears = build_hf_model(config_of(family, **EXPERTS), dtype=torch.float32).linears
    for name in routers:
        assert not [found for found in linears if found.endswith(f".{name}")]
    for name in plain:
        assert [found for found in linears if found.endswith(f".{name}")]


def test_factors_of_a_model_with_a_file_have_the_names_that_its_sampler_reads():
    """All-linear is the same set of modules for both, unless some of them are fused on one side."""
    compared = []
    for family in known_families():
        try:
            config = config_of(family, **EXPERTS).to_dict() | {"model_type": family}
            theirs = build_hf_model(read_hf_config(config), dtype=torch.float32)
            dims = dims_of(config)
            targets = LORA.targets if not dims.num_experts else ("q", "o")
            lora = LORA.model_copy(update={"targets": targets})
            ours = lora_map_of(dims, lora)
        except UserError:  # of another kind of attention, or fused
            continue
        mine = theirs.lora_map(lora)
        assert mine.sources.keys() == ours.sources.keys(), family
        for name, source in ours.sources.items():
            found = mine.sources[name]
            assert (found.shape, found.init) == (source.shape, source.init), name
        compared.append(family)
    assert {"llama", "mistral", "qwen3", "olmo2", "smollm3", "gemma3_text"} <= set(compared)


def test_a_server_without_room_for_a_layer_of_such_a_type_is_refused(tmp_path):
    write(tmp_path / "base", "starcoder2")
    engine = make(tmp_path / "base")
    modules = sorted({name.removesuffix(A) for name, _ in engine.iter_weights() if A in name})
    dims, folder = engine.dims, str(tmp_path / "base")
    check_targets("vLLM", modules, dims, LORA, folder)
    some = [name for name in modules if not name.endswith("c_fc")]
    with pytest.raises(UserError, match="would skip the factors of 2 modules.*leave c_fc out"):
        check_targets("vLLM", some, dims, LORA, folder)


def test_a_checkpoint_of_another_base_is_refused(tmp_path):
    write(tmp_path / "base", "granite")
    engine = make(tmp_path / "base")
    counters = engine.state_counters()
    with torch.no_grad():
        engine.held.frozen()["model.norm.weight"].add_(1e-3)
    changed = type(engine.base).of(engine.held, engine.settings.model, tmp_path / "base")
    engine.base = changed
    with pytest.raises(RunError, match="the folder has changed, or it is another model"):
        engine.begin_restore(counters)
