"""LoRA in one process: what is trained, its gradients, and what full training would do."""

import asyncio

import pytest
import torch
from engine_toys import (
    CONFIG,
    VOCAB,
    ValueLoss,
    bring_back,
    keep_state,
    make_engine,
    make_rows,
    train,
    weights_of,
)
from sections import sampler_settings
from torch.nn import functional as F

from pentad.core.errors import RunError, UserError
from pentad.core.types import Request, Row, SamplingParams
from pentad.engine.frozen import FrozenBase, restored_tags
from pentad.engine.section import LoraConfig, OptimizerConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, lora_map_of
from pentad.models.hf_weights import iter_hf, native_tensors
from pentad.models.joined import leave_room
from pentad.models.lora import apply_lora, factors_of, fill_factors, share_weights
from pentad.models.registry import build_model, initialise
from pentad.ops.digest import digest_of
from pentad.sync.publisher import take_snapshot

MOE = CONFIG | {
    "model_type": "qwen2_moe",
    "tie_word_embeddings": False,
    "head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [1],
}
IDS = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(5))


def adapted(config=CONFIG, dtype=torch.float64, **keys):
    """A model with random factors, all in one dtype."""
    lora = LoraConfig(rank=keys.pop("rank", 3), alpha=keys.pop("alpha", 6.0), **keys)
    model = build_model(dims_of(config), device="meta", dtype=dtype)
    apply_lora(model, lora)
    model = model.to_empty(device="cpu")
    initialise(model, 1)
    fill_factors(model, 1)
    gen = torch.Generator().manual_seed(2)
    for name, tensor in native_tensors(model, model.adapter_map).items():
        if name.endswith(".b"):
            tensor.data.normal_(0, 0.1, generator=gen)
    return model.to(dtype)


def loss_of(model) -> torch.Tensor:
    logits = model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))
    return F.cross_entropy(logits[:-1], IDS[1:], reduction="sum")


@pytest.mark.parametrize("experts", ["shared_outer", "each"])
def test_gradients_are_those_of_finite_differences(experts):
    with pytest.MonkeyPatch.context() as patch:  # norms and routers compute in float32
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        check_slopes(adapted(MOE, experts=experts))


def check_slopes(model) -> None:
    loss_of(model).backward()
    gen = torch.Generator().manual_seed(0)
    for name, factor in native_tensors(model, model.adapter_map).items():
        assert factor.grad is not None, name
        if not name.startswith(("layers.0.", "layers.1.ffn")):  # a mixture and a plain mlp
            continue
        direction = torch.randn(factor.shape, generator=gen, dtype=factor.dtype)
        losses = []
        for sign in (1, -1):
            factor.data += sign * 1e-6 * direction
            losses.append(loss_of(model).item())
            factor.data -= sign * 1e-6 * direction
        slope = (losses[0] - losses[1]) / 2e-6
        assert float((factor.grad * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6)
    frozen = native_tensors(model)
    assert frozen and all(tensor.grad is None for tensor in frozen.values())


def test_it_computes_what_peft_computes():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted()
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIG), attn_implementation="eager"
    ).double()
    theirs.load_state_dict(dict(iter_hf(model)), strict=False)
    keys = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0)
    theirs = peft.get_peft_model(theirs, keys).double()
    mine = dict(iter_hf(model, weight_map=model.adapter_map))
    named = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert named.keys() == mine.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(mine[name])
    logits = theirs(input_ids=IDS[None]).logits[0]
    loss = F.cross_entropy(logits[:-1], IDS[1:], reduction="sum")
    own = loss_of(model)
    assert loss.item() == pytest.approx(own.item(), rel=1e-6)  # norms are in float32
    loss.backward()
    own.backward()
    gradients = {n: t.grad for n, t in native_tensors(model, model.adapter_map).items()}
    pairs = {
        "model.layers.1.self_attn.q_proj.lora_A": gradients["layers.1.attn.q.lora.a"],
        "model.layers.2.mlp.up_proj.lora_B": gradients["layers.2.ffn.gate_up.lora.b"][1],
        "model.layers.0.mlp.down_proj.lora_A": gradients["layers.0.ffn.down.lora.a"],
    }
    for name, gradient in pairs.items():
        theirs = named[f"{name}.weight"].grad
        torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-5)


def test_the_experts_are_those_of_merged_weights():
    """Merged in float64 nothing is lost: both ways must agree with the mixture as it is."""
    for experts in ("shared_outer", "each"):
        model = adapted(MOE, experts=experts)
        own = loss_of(model)
        for block in model.layers.values():
            for host, key in _matrices(block):
                factors = host.get_submodule(f"{key}_lora" if key else "lora")
                weight = getattr(host, key or "weight")
                weight.data += factors.scale * (factors.b @ factors.a)
                factors.b.data.zero_()
        assert loss_of(model).item() == pytest.approx(own.item(), rel=1e-12)


def _matrices(block):
    for module in block.modules():
        if hasattr(module, "gate_up_lora"):
            yield from ((module, "gate_up"), (module, "down"))
        elif hasattr(module, "lora"):
            yield module, ""


def test_only_factors_move_and_the_frozen_weights_stay_bit_for_bit():
    engine = make_engine(lora=LoraConfig(rank=4))
    rows = make_rows()
    before = {name: tensor.clone() for name, tensor in engine.held.frozen().items()}
    plain = make_engine().forward(rows)
    for mine, theirs in zip(engine.forward(rows), plain, strict=True):
        assert torch.equal(mine["logprobs"], theirs["logprobs"]), "B is 0"
    began = weights_of(engine)
    train(engine, rows, steps=3)
    assert all(torch.equal(before[n], t) for n, t in engine.held.frozen().items())
    assert not any(torch.equal(began[n], t) for n, t in weights_of(engine).items())
    assert set(engine.masters) == set(began) and all("lora" in name for name in began)
    assert {t.dtype for t in engine.masters.values()} == {torch.float32}
    published = dict(engine.iter_weights())
    assert published["model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 24)
    assert len(published) == 3 * 7 * 2


@pytest.mark.parametrize("targets", ["all-linear", ()])
def test_a_critic_trains_its_head_with_factors_or_alone(targets):
    """Both in float32; a checkpoint holds them and continues bit for bit."""
    lora, rows = LoraConfig(rank=4, targets=targets), make_rows()
    critic, other = (make_engine(value_head=True, lr=3e-2, lora=lora) for _ in range(2))
    frozen = {name: tensor.clone() for name, tensor in critic.held.frozen().items()}
    assert {n for n in weights_of(critic) if "lora" not in n} == {"value_head.weight"}
    assert any("lora" in name for name in weights_of(critic)) is bool(targets)
    assert {t.dtype for t in critic.masters.values()} == {torch.float32}
    began, first = weights_of(critic), train(critic, rows, ValueLoss())
    assert train(critic, rows, ValueLoss(), steps=20).loss < first.loss
    assert not any(torch.equal(began[n], t) for n, t in weights_of(critic).items())
    assert all(torch.equal(frozen[n], t) for n, t in critic.held.frozen().items())
    bring_back(other, keep_state(critic))
    for one in (critic, other):
        train(one, rows, ValueLoss())
    assert all(torch.equal(t, weights_of(other)[n]) for n, t in weights_of(critic).items())


def test_recomputed_blocks_give_the_same_factors_bit_for_bit():
    rows, found = make_rows(), []
    for keys in (
        {"gradient_checkpointing": False},
        {"ac_mode": "selective", "ac_selective": "op"},
        {"ac_mode": "full"},
    ):
        engine = make_engine(lora=LoraConfig(rank=4), config=MOE, **keys)
        train(engine, rows, steps=2)
        found.append(weights_of(engine))
    for other in found[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in found[0].items())


def test_full_rank_moves_weights_as_full_training_does():
    """With A = 1 the gradient of B is that of the weight, and the first one of A is 0."""
    optimizer = OptimizerConfig(lr=1e-2, gradient_clipping=None)
    targets = ("q", "k", "v", "gate", "up")
    lora = LoraConfig(rank=24, alpha=24.0, targets=targets)
    engine = make_engine(lora=lora, optimizer=optimizer)
    with torch.no_grad():
        for name, tensor in engine.tensors.items():
            if name.endswith(".a"):
                tensor.copy_(torch.eye(24).expand_as(tensor))
    full, rows = make_engine(optimizer=optimizer), make_rows()
    began = weights_of(full)
    train(engine, rows)
    train(full, rows)
    for name, tensor in engine.tensors.items():
        if name.endswith(".b"):
            weight = name.replace(".lora.b", ".weight")
            moved = weights_of(full)[weight] - began[weight]
            assert moved.abs().max() > 5e-3
            torch.testing.assert_close(tensor, moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q", "experts"), "qwen3 has no experts; use all-linear, or some of q, k, v, o, gate"),
        (("gate",), "gate and up are one product here; name both or neither"),
        (("head",), "log-probs are computed together with the head"),
        ((), "nothing would be trained"),
    ],
)
def test_targets_that_the_family_lacks_are_refused(targets, said):
    with pytest.raises(UserError, match=said):
        lora_map_of(dims_of(CONFIG), LoraConfig(targets=targets))


def lora_engine(rank: int = 4, **settings):
    return make_engine(lora=LoraConfig(rank=rank), **settings)


def same(mine, theirs) -> bool:
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a["logprobs"], b["logprobs"]) for a, b in pairs)


def test_the_reference_is_the_frozen_weights_for_no_bytes_and_others_copy_factors():
    engine, rows = lora_engine(), make_rows()
    first = engine.forward(rows)
    engine.save_tag("ref")
    train(engine, rows, steps=2)
    assert list(engine.tags.memory()) == [], "it costs nothing"
    assert same(engine.forward(rows, "ref"), first) and same(engine.forward(rows, "base"), first)
    moved = engine.forward(rows)
    assert not same(moved, first)
    engine.save_tag("old_actor")
    train(engine, rows)
    assert same(engine.forward(rows, "old_actor"), moved)
    held = sum(tensor.numel() for tensor in engine.tags.views("old_actor").values())
    assert held == sum(tensor.numel() for tensor in engine.masters.values())
    engine.save_tag("ref")  # as ref_update_interval asks for: no longer the frozen weights
    assert same(engine.forward(rows, "ref"), engine.forward(rows))


def test_a_checkpoint_holds_factors_alone_and_continues_bit_for_bit():
    rows = make_rows()
    engine, other = lora_engine(), lora_engine()
    engine.save_tag("ref")
    train(engine, rows, steps=2)
    kept = keep_state(engine)
    assert not any(name.endswith(".weight") for name in kept[0])
    assert kept[1]["tags"] == ["ref"] and kept[1]["lora"]["digest"].startswith("float32:")
    bring_back(other, kept)
    train(engine, rows, steps=2)
    train(other, rows, steps=2)
    mine, theirs = weights_of(engine), weights_of(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert same(other.forward(rows, "ref"), engine.forward(rows, "ref"))


def test_a_checkpoint_of_another_adapter_or_base_is_refused():
    _, counters = keep_state(lora_engine())
    with pytest.raises(RunError, match="rank = 4, and this run has 8"):
        lora_engine(rank=8).begin_restore(counters)
    with pytest.raises(RunError, match="holds an adapter, and this run trains all weights"):
        make_engine().begin_restore(counters)
    changed = lora_engine()
    with torch.no_grad():
        changed.held.frozen()["norm.weight"].add_(1e-3)
    base = FrozenBase.of(changed.held, changed.settings.model, None)
    with pytest.raises(RunError, match="the folder has changed, or it is another model"):
        restored_tags(base, counters["lora"])


def test_a_shaken_adapter_moves_log_probs_and_comes_back_bit_for_bit():
    engine, rows = lora_engine(), make_rows()
    train(engine, rows)
    before, moved = weights_of(engine), engine.forward(rows)
    engine.shake_adapter(1.0)
    engine.shake_adapter(4.0)
    assert not same(engine.forward(rows), moved)
    engine.shake_adapter(0.0)
    assert all(torch.equal(before[name], t) for name, t in weights_of(engine).items())


@pytest.mark.parametrize("spoils", [False, True])
def test_a_sampler_of_this_process_takes_factors_by_native_name_and_compares_them(spoils):
    """Those of experts are a few tensors, not a pair for each expert; a wrong number is found."""
    engine, lora = make_engine(lora=LoraConfig(rank=4), config=MOE), LoraConfig(rank=4)
    train(engine, make_rows())
    model = build_model(engine.dims, device="meta", dtype=torch.float32)
    share_weights(model, engine.lend_base())
    sampler = EmbeddedSampler(model, sampler_settings(lora=lora, max_running=4))
    runner = sampler.engine.runner
    if spoils:
        runner.refresh = lambda: next(iter(factors_of(model))).b.data.view(-1)[:1].add_(1e-3)
    snapshot = take_snapshot(1, engine.iter_weights(), copy=False, hashed=False)

    async def install():
        receipt = await sampler.install(1, snapshot)
        await sampler.close()
        return receipt

    receipt = asyncio.run(install())
    assert receipt.num_tensors == snapshot.num_tensors == len(list(engine.iter_weights()))
    assert receipt.is_same is not spoils
    assert "pairs" not in vars(snapshot.weights), "nothing was cut into pairs"
    held = digest_of(iter_hf(model, weight_map=model.adapter_map)).hex()
    assert (held == snapshot.digest.hex()) is not spoils
    assert receipt.digest == (held if spoils else "")


def test_weights_with_room_for_a_sampler_are_as_before_and_trained_beside_as_before():
    plain, roomy = lora_engine(), lora_engine()
    before = {name: tensor.clone() for name, tensor in roomy.held.frozen().items()}
    for decoder in roomy.held.decoders:
        leave_room(decoder, 4)
    base = roomy.lend_base()
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())
    down, q = base["layers.0.ffn.down.weight"], base["layers.0.attn.q.weight"]
    hidden, inner = down.shape
    assert down.untyped_storage().nbytes() == (hidden + 16) * inner * down.element_size()
    assert (
        q.untyped_storage().data_ptr()
        == base["layers.0.attn.v.weight"].untyped_storage().data_ptr()
    )
    for engine in (plain, roomy):
        train(engine, make_rows())
    assert same(plain.forward(make_rows()), roomy.forward(make_rows()))
    trained = weights_of(plain)
    assert all(torch.equal(trained[name], t) for name, t in weights_of(roomy).items())


def test_frozen_weights_that_have_left_their_device_are_brought_back_before_they_are_lent():
    engine = lora_engine()
    before = {name: tensor.clone() for name, tensor in engine.held.frozen().items()}
    engine.offload()
    base = engine.lend_base()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())
    engine.offload()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items()), "lent: it stays"


def test_lent_factors_are_brought_back_before_they_are_cut_into_pairs(monkeypatch):
    """The engine may have left its device after it lent them."""
    engine = lora_engine()
    weights, away = engine.iter_weights(), engine.offloaded.away
    monkeypatch.setattr(engine.offloaded, "come_back", away.clear)
    away[0] = None
    assert list(weights) and not away


@pytest.mark.parametrize("strict", [False, True])
def test_a_sampler_over_the_learners_tensors_draws_with_the_learners_log_probs(strict):
    engine = lora_engine(strict=strict)
    train(engine, make_rows())
    model = build_model(engine.dims, device="meta", dtype=torch.float32)
    base = engine.lend_base()
    share_weights(model, base)
    settings = sampler_settings(lora=LoraConfig(rank=4), strict=strict, max_running=4)
    sampler = EmbeddedSampler(model, settings)
    held = dict(sampler.engine.model.named_parameters())
    assert held["embed.weight"].data_ptr() == base["embed.weight"].data_ptr(), "no copy"
    assert held["layers.0.attn.q.weight"].data_ptr() == base["layers.0.attn.q.weight"].data_ptr()

    async def draw():
        receipt = await sampler.install(1, list(engine.iter_weights()))
        request = Request(
            id="r",
            prompt_ids=(5, 7, 9),
            params=SamplingParams(max_new_tokens=12),
            seeds=(1, 2),
        )
        made = await sampler.generate(request)
        await sampler.close()
        return receipt, made

    receipt, made = asyncio.run(draw())
    assert receipt.num_tensors == 3 * 7 * 2
    assert receipt.digest == digest_of(engine.iter_weights()).hex()
    for one in made:
        (found,) = engine.forward([Row(torch.tensor([5, 7, 9, *one.ids]), {})])
        said = torch.tensor(one.logprobs)
        gap = (found["logprobs"][3:] - said).abs().max()
        assert gap == 0 if strict else gap < 1e-5
