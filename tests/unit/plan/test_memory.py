"""The memory model is held against the real model: every tensor that lives is counted."""

import weakref
from dataclasses import fields, replace

import pytest
import torch
from sections import engine_settings, planned_keys
from tables import table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pentad.core.dims import ModelDims
from pentad.core.layout import Layout
from pentad.engine.predictor import wrap_model
from pentad.models.catalog import public_dims
from pentad.models.families import class_of
from pentad.ops import logprob
from pentad.ops.attention import build_attend
from pentad.planner import memory
from pentad.planner.activations import ends_bytes, kept_bytes
from pentad.planner.memory import (
    Training,
    gathered_weights,
    held_params,
    rule_of_thumb,
    sharded_params,
    stage_layers,
    training_phases,
)
from pentad.planner.sampling import Sampling, kv_token_bytes, sampler_weights

MODELS = public_dims()

CPU = torch.device("cpu")
NUM_TOKENS, NUM_SEQUENCES = 512, 4
MOE = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "moe_layers": (True, False, True, True, True, True),
}
GLM = {
    **MOE,
    "shared_expert_size": 64,
    "shared_expert_gate": False,
    "router_score": "sigmoid",
    "router_bias": True,
    "rotary_dim": 16,
    "moe_layers": (False, True, True, True, True, True),
}
DELTA = {
    "linear_layers": (True, True, True, False, True, True),
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 24,
    "linear_value_dim": 32,
    "linear_conv": 4,
    "attn_gate": True,
}
OSS = {
    **MOE,
    "moe_layers": (True,) * 6,
    "attn_sinks": True,
    "moe_bias": True,
    "activation": "clamped",
}
MODES = [("none", "op"), ("full", "op"), ("selective", 2), ("selective", "op")]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage from its first appearance to its end."""

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in ignored}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


LATENT = {
    "kv_latent": 40,
    "q_latent": 48,
    "value_dim": 20,
    "rotary_dim": 8,
    "rotary_pairs": "neighbours",
}


BY_LAYER = {
    **{"value_norm": True, "wide_norms": True, "layer_scale": True, "post_norms": True},
    "activation": "gelu_tanh",
    "own": ({}, {"head_dim": 48, "num_kv_heads": 1, "values_are_keys": True}) * 3,
}
BESIDE = {**MOE, **BY_LAYER, "has_dense_beside": True}
INPUTS = BY_LAYER | {
    "layer_embed_dim": 24,
    "own": (*BY_LAYER["own"][:4], {"kv_from": 2}, {**BY_LAYER["own"][1], "kv_from": 3}),
}


def tiny(vocab_size: int, **extra) -> ModelDims:
    family = "qwen3_moe" if "num_experts" in extra else "qwen3"
    family = "qwen2_moe" if "shared_expert_size" in extra else family
    family = "glm4_moe" if "router_bias" in extra else family
    family = "glm4" if "post_norms" in extra else family
    family = "qwen3_5_text" if "linear_layers" in extra else family
    family = "gpt_oss" if "moe_bias" in extra else family
    family = "deepseek_v3" if "kv_latent" in extra else family
    family = "gemma4_text" if "value_norm" in extra else family
    extra |= {"layer_embed_rows": vocab_size} if "layer_embed_dim" in extra else {}
    heads = {"num_kv_heads": 6} if "kv_latent" in extra else {"num_kv_heads": 2}
    return ModelDims(
        family=family,
        vocab_size=vocab_size,
        hidden_size=96,
        num_layers=6,
        num_heads=6,
        **heads,
        head_dim=32,
        intermediate_size=320,
        qk_norm=family not in ("qwen2_moe", "deepseek_v3"),
        **extra,
    )


def measure(dims: ModelDims, mode: str, selective: str | int, **extra) -> tuple[int, int]:
    """(bytes kept after forward, peak of forward and backward), weights and inputs not counted."""
    torch.manual_seed(0)
    decoder = class_of(dims.family)(dims)
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        torch.nn.init.normal_(tensor, std=0.02)
    settings = engine_settings(ac_mode=mode, ac_selective=selective, **extra)
    predictor = wrap_model(decoder, settings, CPU)
    length = NUM_TOKENS // NUM_SEQUENCES
    lengths = [length] * NUM_SEQUENCES
    attend = build_attend(lengths, device=CPU, dtype=torch.float32, head_dim=dims.head_dim)
    ids_T = torch.randint(0, dims.vocab_size, (NUM_TOKENS,))
    positions_T = torch.arange(length).repeat(NUM_SEQUENCES)
    with LiveBytes([ids_T, positions_T, *decoder.parameters()]) as live:
        logprobs_T, _, _ = predictor(ids_T, positions_T, ids_T, attend)
        kept = live.now
        logprobs_T.sum().backward()
    return kept, live.peak


KINDS = {
    **{"dense": {}, "post norms": {"post_norms": True}, "moe": MOE},
    **{"shared": {**MOE, "shared_expert_size": 160}, "glm": GLM, "delta": DELTA, "latent": LATENT},
    **{"oss": OSS, "by layer": BY_LAYER, "beside": BESIDE, "inputs": INPUTS},
}
SIZES = (50, 4000)
CASES = [(kind, size, *mode) for kind in KINDS for size in SIZES for mode in MODES]


def is_left_out(case):
    """Of the two sizes of the vocabulary, in turn one with each kind and mode."""
    kind, size, *mode = case
    return (list(KINDS).index(kind) + MODES.index(tuple(mode)) + SIZES.index(size)) % 2 == 1


@pytest.mark.parametrize(
    ("kind", "vocab_size", "mode", "selective"), table(CASES, [*filter(is_left_out, CASES)])
)
def test_kept_and_peak_bytes_are_those_of_the_real_model(kind, vocab_size, mode, selective):
    dims = tiny(vocab_size, **KINDS[kind])
    keys = planned_keys(dtype="float32", ac_mode=mode, ac_selective=selective)
    training = Training(
        dims=dims,
        layout=Layout(),
        model=keys,
        microbatch_tokens=NUM_TOKENS,
        device="cpu",
    )
    kept, peak = measure(dims, mode, selective)
    per_token = sum(kept_bytes(dims, i, Layout(), keys) for i in range(dims.num_layers))
    per_token += ends_bytes(dims, Layout(), keys)
    # What is not counted: statistics of norms and routers, a few numbers a token.
    assert NUM_TOKENS * per_token == pytest.approx(kept, rel=0.02)
    parts = training_phases(training, 0)["backward"].device
    resident = parts["weights"] + parts["optimizer"] + parts["overhead"]
    # Which gradients exist at the worst moment is counted by whole layers.
    assert sum(parts.values()) - resident == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("room", [None, 12 * 4000 * 32])  # all tokens at once, 32 of them
def test_kept_logits_are_counted_in_backward(room, monkeypatch):
    dims = tiny(4000)
    if room is not None:
        monkeypatch.setitem(memory.CHUNK_BYTES, "cpu", room)
    keys = planned_keys(dtype="float32", ac_mode="none", keep_logits=True)
    training = Training(
        dims=dims,
        layout=Layout(),
        model=keys,
        microbatch_tokens=NUM_TOKENS,
        device="cpu",
    )
    kept, peak = measure(dims, "none", "op", keep_logits=True)
    per_token = sum(kept_bytes(dims, i, Layout(), keys) for i in range(dims.num_layers))
    per_token += ends_bytes(dims, Layout(), keys) + 4 * dims.vocab_size
    assert NUM_TOKENS * per_token == pytest.approx(kept, rel=0.02)
    phases = training_phases(training, 0)
    parts = phases["backward"].device
    resident = parts["weights"] + parts["optimizer"] + parts["overhead"]
    assert sum(parts.values()) - resident == pytest.approx(peak, rel=0.1)
    plain = planned_keys(dtype="float32", ac_mode="none")
    without = training_phases(replace(training, model=plain), 0)
    assert parts["logits"] - without["backward"].device.get("logits", 0) >= NUM_TOKENS * 4 * 4000
    assert phases["log-prob"].device == without["log-prob"].device


def test_kept_logits_of_a_gpu_are_those_of_this_ranks_tokens_and_rows():
    """16384 tokens over cp 2 and 151936 rows over tp 4 in float32; one chunk's gradient besides."""
    size = {"microbatch_tokens": 16384, "num_microbatches": 1}
    training = training_of("Qwen3-8B", Layout(cp=2, tp=4), **size)
    more = memory.logit_bytes(training, keeps=True) - memory.logit_bytes(training)
    chunk = memory.CHUNK_BYTES["cuda"] / (3 * 4)  # elements
    assert more == pytest.approx(4 * (8192 * 151936 / 4 - chunk))


def test_logit_room_is_that_of_the_kernel():
    assert memory.CHUNK_BYTES == logprob.CHUNK_BYTES
    assert memory.LOGIT_COPIES == logprob.LOGIT_COPIES


def training_of(name: str, layout: Layout, **extra) -> Training:
    """Keys of the engine go into its block, the rest beside it."""
    beside = {field.name for field in fields(Training)} & {*extra}
    beside = {name: extra.pop(name) for name in beside}
    return Training(
        dims=MODELS[name],
        layout=layout,
        model=planned_keys(**extra),
        **{"microbatch_tokens": 8192, "num_microbatches": 8, **beside},
    )


@pytest.mark.parametrize(
    ("name", "layout", "per_rank"),
    [
        ("Qwen3-8B", Layout(dp_shard=4, cp=2), 1),
        ("Qwen3-8B", Layout(pp=4, dp_shard=2), 2),
        ("Qwen3-30B-A3B", Layout(pp=2, dp_shard=4, ep=4), 2),
        ("Qwen3-30B-A3B", Layout(pp=2, dp_shard=4, cp=2, ep=4, etp=2), 1),
        ("Qwen3-0.6B", Layout(dp_replicate=2, dp_shard=2), 1),
    ],
)
def test_the_shards_of_all_ranks_add_up_to_the_model(name, layout, per_rank):
    schedule = "1F1B" if per_rank == 1 else "Interleaved1F1B"
    training = training_of(name, layout, pp_schedule=schedule, stages_per_rank=per_rank)
    total = sum(
        sharded_params(training, held_params(training, pp_rank)) * layout.stage_world
        for pp_rank in range(layout.pp)
    )
    assert total == pytest.approx(training.dims.num_params, rel=1e-9)


def test_tensor_parallelism_cuts_all_but_norms_and_repeated_kv_heads():
    dims = MODELS["Qwen3-8B"]
    held = held_params(training_of("Qwen3-8B", Layout(tp=4)), 0)
    norms = dims.num_layers * dims.layer_parts(0).norms + dims.hidden_size
    assert held.total == (dims.num_params - norms) // 4 + norms
    repeated = held_params(training_of("Qwen3-8B", Layout(tp=16)), 0)
    kv = dims.num_layers * dims.layer_parts(0).kv
    assert repeated.total == (dims.num_params - norms - kv) // 16 + norms + kv // 8


def test_a_tied_table_stands_on_both_ends_of_a_pipeline():
    tied = training_of("Qwen3-0.6B", Layout(pp=2))
    held = [held_params(tied, rank).total for rank in range(2)]
    assert sum(held) == tied.dims.num_params + tied.dims.embedding_params


def test_zbv_puts_both_ends_on_the_first_rank():
    training = training_of("Qwen3-8B", Layout(pp=2), pp_schedule="ZBVZeroBubble", stages_per_rank=2)
    first = stage_layers(training, 0)
    assert first[0].start == 0 and first[1].stop == 36


def test_gradients_stay_whole_under_a_pipeline():
    """Appendix A.4 of the Archon tutorial: 4 bytes for each parameter a rank holds."""
    training = training_of("Qwen3-30B-A3B", Layout(pp=2, dp_shard=8), stages_per_rank=1)
    for pp_rank in range(2):
        parts = training_phases(training, pp_rank)["backward"].device
        assert parts["gathered gradients"] == 4 * held_params(training, pp_rank).total


def test_resharding_saves_what_the_tutorial_says():
    """Appendix A.3: keeping weights whole costs (1 - 1/dp) of them in bf16, less two layers."""
    place, policy = Layout(pp=2, dp_shard=8), "reshard_after_forward_policy"
    keep = training_of("Qwen3-8B", place, stages_per_rank=1, **{policy: "never"})
    held = held_params(keep, 0)
    assert gathered_weights(keep, held) == 2 * held.total
    shard = training_of("Qwen3-8B", place, stages_per_rank=1)
    assert gathered_weights(shard, held) == 2 * (held.root + 2 * held.block)


def test_less_is_kept_the_more_is_recomputed():
    layout = Layout(dp_shard=2)
    kept = [
        training_phases(training_of("Qwen3-8B", layout, **keys), 0)["backward"]
        for keys in (
            {"ac_mode": "none"},
            {"ac_mode": "memory_budget", "ac_memory_budget": 0.5, "enable_compile": True},
            {"ac_mode": "full"},
        )
    ]
    sizes = [phase.device_bytes for phase in kept]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.5 * sizes[2]


def test_activations_shrink_with_microbatches_and_with_tp_and_cp():
    def kept(layout: Layout, tokens: int) -> float:
        training = training_of("Qwen3-8B", layout, microbatch_tokens=tokens)
        return training_phases(training, 0)["backward"].device["activations"]

    whole = kept(Layout(dp_shard=4), 8192)
    # 2%: the worst moment may move between the head and the last layer.
    assert kept(Layout(dp_shard=4), 4096) == pytest.approx(whole / 2, rel=0.02)
    assert kept(Layout(dp_shard=2, cp=2), 8192) == pytest.approx(whole / 2, rel=0.02)
    assert kept(Layout(dp_shard=2, tp=2), 8192) == pytest.approx(whole / 2, rel=0.02)


def test_offloading_moves_state_to_the_host():
    place = Layout(dp_shard=8)
    on = training_phases(training_of("Qwen3-8B", place), 0)["optimizer"]
    off = training_phases(training_of("Qwen3-8B", place, offload_params=True), 0)["optimizer"]
    moved = on.device_bytes - off.device_bytes
    assert moved == pytest.approx(16 * MODELS["Qwen3-8B"].num_params / 8)
    assert off.host_bytes - on.host_bytes == pytest.approx(moved)


def test_sampler_memory():
    dims = MODELS["Qwen3-8B"]
    whole = Sampling(dims=dims, sequence_tokens=1000, num_sequences=10, max_running=10)
    assert sampler_weights(whole) == 2 * dims.num_params
    assert kv_token_bytes(whole) == 2 * 36 * 8 * 128 * 2
    cut = replace(whole, tp=16)
    assert sampler_weights(cut) == dims.num_params / 8
    assert kv_token_bytes(cut) == kv_token_bytes(whole) / 8  # eight kv heads, held twice
    small = replace(whole, weight_dtype="fp8")
    layer = dims.hidden_size * (2 * 4096 + 2 * 1024 + 3 * dims.intermediate_size)
    assert sampler_weights(small) == 2 * dims.num_params - 36 * layer * (1 - 4 / 128**2)
    assert kv_token_bytes(small) == kv_token_bytes(whole)


def test_the_rule_of_thumb_is_computed_as_written():
    layout = Layout(pp=2, dp_shard=4, tp=2)
    training = training_of(
        "Qwen3-8B", layout, pp_schedule="Interleaved1F1B", stages_per_rank=2, num_microbatches=4
    )
    size = MODELS["Qwen3-8B"].num_params
    assert list(rule_of_thumb(training, 40_000).values()) == [
        2 * size / 8,
        4 * size / 4,
        8 * size / 8,
        4 * 10_000 * 4096 * 2,
    ]
