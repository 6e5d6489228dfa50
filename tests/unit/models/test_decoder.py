"""The decoder's seams: stages, attention core, dispatch, wrapping, heads, fresh weights."""

import pytest
import torch
import transformers
from closeness import assert_close
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.families import dims_of
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model, load_model, load_weights, save_model

DIMS = ModelDims(
    family="qwen3_moe",
    vocab_size=31,
    hidden_size=20,
    num_layers=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=13,
    qk_norm=True,
    num_experts=3,
    num_experts_per_token=2,
    moe_intermediate_size=7,
    moe_layers=(False, True) * 6,
)
IDS = torch.randint(0, 31, (11,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(11)


def test_attention_is_asked_once_per_layer_with_its_global_index():
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return causal_attend(layer, q, k, v)

    stage = Decoder(DIMS, layers=[4, 5, 6], is_first=False, is_last=False)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter)
    stage(torch.randn(11, 20), POSITIONS, attend)
    assert seen == [(i, (11, 6, 4), (11, 2, 4), (11, 2, 4)) for i in (4, 5, 6)]
    assert set(stage.state_dict()) == {n for n in stage.state_dict() if n.split(".")[1] in "456"}


def test_positions_turn_the_heads_not_the_order_of_tokens():
    model = create_model(DIMS, seed=3)
    seen = {}

    def attend(layer, q, k, v):
        seen.setdefault(layer, q)
        return causal_attend(layer, q, k, v)

    model(IDS, POSITIONS, attend)
    first = seen.pop(0)
    seen.clear()
    model(IDS, POSITIONS + 5, attend)
    assert not torch.allclose(first, seen[0])
    seen.clear()
    shuffled = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    model(IDS[shuffled], POSITIONS[shuffled], attend)
    assert_close(seen[0], first[shuffled])


def test_a_core_without_windows_fails_on_a_layer_that_has_one():
    dims = dims_of(
        transformers.Qwen2Config(
            vocab_size=31,
            hidden_size=20,
            intermediate_size=13,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=5,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
        )
    )
    model = create_model(dims)

    def attend(layer, q, k, v):
        return causal_attend(layer, q, k, v)

    with pytest.raises(TypeError, match="window"):
        model(IDS, POSITIONS, attend)
    windows = []

    def noting(layer, q, k, v, window=None):
        windows.append((layer, window))
        return causal_attend(layer, q, k, v, window)

    model(IDS, POSITIONS, noting)
    assert windows == [(0, None), (1, 4)]


def test_fresh_weights_depend_on_seed_and_name_alone():
    whole, again, other = (create_model(DIMS, seed=seed) for seed in (1, 1, 2))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        if "norm" not in name:
            assert not torch.equal(tensor, other.state_dict()[name]), name
    deeper = ModelDims(**{**_fields(DIMS), "num_layers": 14, "moe_layers": (False, True) * 7})
    bigger = create_model(deeper, seed=1).state_dict()
    assert all(torch.equal(bigger[name], tensor) for name, tensor in whole.state_dict().items())
    table = whole.state_dict()["embed.weight"]
    assert 0.017 < table.std() < 0.023  # 620 draws with standard deviation 0.02
    assert (whole.state_dict()["norm.weight"] == 1).all()


def _fields(dims):
    return {name: getattr(dims, name) for name in type(dims).__dataclass_fields__}


def test_blocks_can_be_checkpointed_and_compiled_with_the_same_gradients():
    plain, checkpointed, compiled = (create_model(DIMS, seed=1) for _ in range(3))
    for i, block in checkpointed.layers.items():
        checkpointed.layers[i] = checkpoint_wrapper(block)
    for block in compiled.layers.values():
        block.compile(backend="eager")
    grads = []
    for model in (plain, checkpointed, compiled):
        hidden = model(IDS, POSITIONS, causal_attend)
        model.logits(hidden).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_twelve_compiled_layers_are_few_graphs():
    """Layer numbers must not be constants of the graph: beyond eight, dynamo gives up."""
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounter  # a second of every process that collects

    counter = CompileCounter()
    model = create_model(
        ModelDims(**{**_fields(DIMS), "moe_layers": (), "num_experts": 0, "family": "qwen3"})
    )
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        model(IDS, POSITIONS, causal_attend)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_dispatch_can_be_replaced():
    model = create_model(DIMS, seed=1)
    expected = model(IDS, POSITIONS, causal_attend)
    calls = []

    def by_hand(x, weights, chosen, experts, beside):
        calls.append(len(x))
        out = torch.zeros_like(x)
        one_of = torch.eye(DIMS.num_experts, dtype=torch.int64)
        for t in range(len(x)):
            for weight, e in zip(weights[t], chosen[t].tolist(), strict=True):
                out[t] += weight * experts(x[t : t + 1], one_of[e])[0]
        return out

    for i, block in model.layers.items():
        if DIMS.is_moe(int(i)):
            block.ffn.dispatch = by_hand
    assert_close(model(IDS, POSITIONS, causal_attend), expected)
    assert calls == [11] * 6


def test_a_value_head_is_initialised_trained_saved_and_restored(tmp_path):
    config = {**transformers.Qwen3Config().to_dict(), "tie_word_embeddings": True}
    config |= {"vocab_size": 31, "hidden_size": 20, "intermediate_size": 13, "head_dim": 4}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    config |= {"layer_types": None, "architectures": None}
    actor = create_model(dims_of(config), seed=1)
    save_model(actor, tmp_path / "actor", hf_config=config)
    critic = load_model(tmp_path / "actor", value_head=True, seed=7)
    fresh = critic.value_head.weight.detach().clone()
    assert fresh.abs().sum() > 0
    assert torch.equal(
        fresh, load_model(tmp_path / "actor", value_head=True, seed=7).value_head.weight
    )
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        values = critic.values(critic(IDS, POSITIONS, causal_attend))
        loss = (values - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    save_model(critic, tmp_path / "critic", source_folder=tmp_path / "actor")
    again = load_model(tmp_path / "critic", value_head=True, seed=8)
    for (name, a), (_, b) in zip(iter_hf(critic), iter_hf(again), strict=True):
        assert torch.equal(a, b), name
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    score, values = (
        theirs(IDS[None]).logits[0, 0],
        critic.values(critic(IDS, POSITIONS, causal_attend)),
    )
    assert_close(score, values[-1], scale=float(values.abs().max()))
    assert load_weights(again, tmp_path / "critic") == []
    assert load_weights(again, tmp_path / "actor", seed=7) == ["value_head.weight"]
    with pytest.raises(UserError, match="score.weight: the folder holds this head, but the model"):
        load_model(tmp_path / "critic")


def test_an_actor_may_carry_both_heads():
    model = create_model(DIMS, value_head=True, lm_head=True)
    hidden = model(IDS, POSITIONS, causal_attend)
    assert model.logits(hidden).shape == (11, 31) and model.values(hidden).shape == (11,)
    names = dict(iter_hf(model))
    assert "score.weight" in names and "lm_head.weight" in names


def test_heads_that_are_not_there_say_so():
    with pytest.raises(AssertionError, match="without a language-model head"):
        _ = create_model(DIMS, value_head=True).head_weight
    with pytest.raises(AssertionError, match="without a value head"):
        create_model(DIMS).values(torch.zeros(1, 20))
