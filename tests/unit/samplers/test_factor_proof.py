"""What a server must hold of an adapter, without a server: room for targets, and exact factors."""

import pytest
import torch

from pentad.core.errors import InfraFailure, UserError
from pentad.engine.section import LoraConfig
from pentad.models.families import dims_of, lora_map_of, map_of
from pentad.samplers.vllm import entry_of, lora_flags
from pentad.samplers.weight_proof import check_targets, max_rank, prove_factors
from pentad.weights.peft import expanded, word_of

DIMS = dims_of(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    }
)
LORA = LoraConfig(rank=4, alpha=6, targets=("q", "experts"))
WHERE = "vLLM at here"


def modules() -> list[str]:
    named = [name.removesuffix(".weight") for name in map_of(DIMS).sources]
    return [name for name in named if word_of(name) in ("q", "k", "experts")]


def published() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sources = lora_map_of(DIMS, LORA).sources
    return {n: torch.randn(source.shape, generator=generator) for n, source in sources.items()}


def held(factors) -> dict[str, str]:
    """As a server in bfloat16 holds them: each expert's, and B scaled."""
    return {
        name: entry_of(t.bfloat16() * (1.5 if name.endswith("lora_B.weight") else 1))
        for name, t in expanded(factors).items()
    }


def prove(found, factors):
    prove_factors(WHERE, found, list(factors.items()), LORA, torch.bfloat16)


def test_a_server_with_room_for_every_target_is_taken():
    check_targets(WHERE, modules(), DIMS, LORA)


@pytest.mark.parametrize("skipped", ["self_attn.q_proj", "mlp.experts.2.down_proj"])
def test_a_server_that_would_skip_a_target_is_refused_by_its_word(skipped):
    some = [name for name in modules() if not name.endswith(f"layers.1.{skipped}")]
    word = "q" if "q_proj" in skipped else "experts"
    rule = rf"skip the factors of 1 modules, first model\.layers\.1\.{skipped}; leave {word} out"
    with pytest.raises(UserError, match=rule):
        check_targets(WHERE, some, DIMS, LORA)


def test_what_is_held_as_published_passes_and_any_other_number_does_not():
    factors = published()
    prove(held(factors), factors)
    for name in list(factors):
        other = dict(factors)
        other[name] = factors[name].clone()
        other[name].view(-1)[0] += 1
        with pytest.raises(InfraFailure, match="its policy is not the trained one"):
            prove(held(other), factors)


def test_factors_that_are_missing_or_too_many_are_found():
    factors = published()
    found = held(factors)
    first = next(iter(found))
    with pytest.raises(InfraFailure, match=f"{first} has checksum None"):
        prove({n: entry for n, entry in found.items() if n != first}, factors)
    with pytest.raises(InfraFailure, match="holds 1 factors that were not published, first extra"):
        prove({**found, "extra.lora_A.weight": "0"}, factors)


def test_vllm_is_started_with_room_that_it_can_have():
    assert [max_rank(rank) for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
    assert lora_flags(LORA) == ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
