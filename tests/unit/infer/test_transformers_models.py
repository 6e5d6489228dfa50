"""The embedded sampler over transformers' own modules: log-probs are those of one forward pass of
transformers over the whole sequence, whatever the engine did."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from sections import sampler_settings
from torch import nn
from transformers.integrations import hub_kernels
from transformers.utils import logging

from pentad.core.errors import RunError, UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf import states
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import build_unfiled, load_to_sample
from pentad_tools.models.types_table import CLOSE, own_logprobs, write_tiny

logging.disable_progress_bar()
FAMILIES = ["cohere", "cohere2", "gemma4_unified_text", "phimoe"]
"""Windows, heads that differ by layer, scaled logits, experts."""
CARRYING = {
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid": {"layer_types": ["attention", "mamba"]},
    "jamba": {},
    "kimi_linear": {},
    "lfm2": {},
    "nemotron_h": {"time_step_min": 0.5, "time_step_max": 0.6},
}
"""Layers that carry state from token to token. Passes over several tokens limit the time steps of
the last one, which matters with these."""
CASES = {
    "plain": {},
    "chunked": {"max_running": 2, "max_batch_tokens": 3},
    "preempted": {"kv_cache_tokens": 48},
}


@dataclass(frozen=True)
class Written:
    folder: str
    theirs: nn.Module


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def write(family):
        if family not in made:
            folder = str(tmp_path_factory.mktemp(family))
            more = CARRYING.get(family, {})
            made[family] = Written(folder, write_tiny(family, folder, **more))
        return made[family]

    return write


@pytest.fixture
def keep():
    """Samplers that are closed after the test."""
    made = []

    def add(sampler):
        made.append(sampler)
        return sampler

    yield add
    for sampler in made:
        asyncio.run(sampler.close())


@pytest.fixture
def sampler_of(keep):
    def make(folder, dtype=torch.float32, **keys):
        given = {"max_running": 64, "kv_cache_tokens": 8192, "block_size": 4} | keys
        settings = sampler_settings(**given)
        return keep(EmbeddedSampler.from_folder(folder, settings, dtype=dtype))

    return make


REQUESTS = [
    Request(
        id=f"{i}",
        prompt_ids=tuple(3 + 7 * j % 90 for j in range(1 + 5 * i)),  # they begin alike
        params=SamplingParams(max_new_tokens=9),
        seeds=(i, i + 100),
    )
    for i in range(5)
]


def draw(sampler):
    async def main():
        return await asyncio.gather(*(sampler.generate(request) for request in REQUESTS))

    return asyncio.run(main())


def gap(results, theirs):
    """The largest difference of a log-prob."""
    found = 0.0
    for request, made in zip(REQUESTS, results, strict=True):
        for one in made:
            ids = torch.tensor([*request.prompt_ids, *one.ids])
            expected = own_logprobs(theirs, ids)[-len(one.ids) :]
            found = max(found, float((torch.tensor(one.logprobs) - expected).abs().max()))
    return found


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, case) for family in FAMILIES for case in CASES),
        *(("lfm2", case) for case in CASES),
        *((family, "chunked") for family in sorted({*CARRYING} - {"lfm2"})),
        ("gemma3n_text", "chunked"),  # layers that share keys and values
    ],
)
def test_logprobs_are_those_of_one_forward_pass(sampler_of, written, family, case):
    sampler = sampler_of(written(family).folder, **CASES[case])
    assert gap(draw(sampler), written(family).theirs) < CLOSE
    stats = sampler.stats()
    assert stats["prefill_tokens_reused"] > 0
    assert stats["preemptions"] >= (case == "preempted")


@pytest.mark.parametrize("part", ["layers.1.self_attn.v_proj.weight", "norm.weight"])
def test_a_small_defect_of_the_weights_shows(sampler_of, written, part):
    sampler = sampler_of(written("cohere").folder)
    model = sampler.engine.model
    with torch.no_grad():
        model.get_parameter(f"model.{part}").mul_(1.003)
    assert gap(draw(sampler), written("cohere").theirs) > 5 * CLOSE


def test_a_layer_that_sees_further_than_its_window_shows(sampler_of, written):
    sampler = sampler_of(written("cohere2").folder)
    attention = sampler.engine.model.get_submodule("model.layers.0.self_attn")
    assert attention.pentad_window == 4
    attention.pentad_window = 5
    assert gap(draw(sampler), written("cohere2").theirs) > 10 * CLOSE


def test_a_model_that_waits_for_weights_takes_published_ones_and_no_others(keep, written):
    """As a run has it: blank at first, then the trainer's tensors by their names on disk."""
    folder, theirs = written("phimoe").folder, written("phimoe").theirs
    place = {"device": "cpu", "dtype": torch.float32}
    sampler = keep(EmbeddedSampler(build_unfiled(folder, **place), sampler_settings()))
    pairs = list(iter_hf(load_to_sample(folder, **place)))

    async def refused():
        with pytest.raises(UserError, match="missing"):
            await sampler.install(0, pairs[1:])
        await sampler.install(0, pairs)

    asyncio.run(refused())
    assert gap(draw(sampler), theirs) < CLOSE
    asyncio.run(sampler.sleep())
    asyncio.run(sampler.wake())
    assert gap(draw(sampler), theirs) < CLOSE
    blank = keep(EmbeddedSampler(build_unfiled(folder, **place), sampler_settings()))
    with pytest.raises(RunError, match="not finite"):
        draw(blank)


@pytest.mark.parametrize("part", ["copy", "write", "limits"])
def test_a_state_that_is_not_kept_shows(sampler_of, written, part):
    """After a prompt that several answers share, after each step, and in single tokens."""
    family = "nemotron_h" if part == "limits" else "lfm2"
    sampler = sampler_of(written(family).folder)
    if part == "limits":
        for module in sampler.engine.model.modules():
            module._forward_hooks.clear()
    else:
        setattr(sampler.engine.runner.slots, part, lambda rows, states: None)
    assert gap(draw(sampler), written(family).theirs) > 10 * CLOSE


def test_single_tokens_that_transformers_adds_to_each_other_are_passes_of_their_own(
    sampler_of, written
):
    """A norm of Falcon-H1 drops the dimension of single tokens."""
    sampler = sampler_of(written("falcon_h1").folder)
    model = sampler.engine.model
    assert not model.batches_tokens and model.continues_runs
    assert sampler_of(written("lfm2").folder).engine.model.batches_tokens
    model.batches_tokens = True
    with pytest.raises(RunError, match="index_copy_"):
        draw(sampler)


def test_runs_that_transformers_does_not_continue_are_computed_again(sampler_of, written):
    """Jamba's scan takes no state, so a later part of a prompt begins with the first one."""
    continues = {}
    for family in ("jamba", "lfm2"):
        sampler = sampler_of(written(family).folder, **CASES["chunked"])
        continues[family] = sampler.engine.model.continues_runs
    assert continues == {"jamba": False, "lfm2": True}
    sampler = sampler_of(written("jamba").folder, **CASES["chunked"])
    sampler.engine.model.continues_runs = True
    assert gap(draw(sampler), written("jamba").theirs) > 10 * CLOSE


@pytest.mark.parametrize("on_update", ["continue", "reprefill"])
def test_states_of_older_weights_are_kept_or_computed_again(keep, written, on_update):
    """As keys and values are."""
    folder, theirs = written("granitemoehybrid").folder, written("granitemoehybrid").theirs
    place = {"device": "cpu", "dtype": torch.float32}
    settings = sampler_settings(max_running=4, kv_cache_tokens=512, on_update=on_update)
    new = [(name, x.clone()) for name, x in iter_hf(load_to_sample(folder, **place))]
    old = load_to_sample(folder, **place)
    with torch.no_grad():
        for name, parameter in old.named_parameters():
            if "layers.1.mamba.in_proj" in name:  # the states differ, but no keys and values
                parameter.mul_(1.5)
    sampler = keep(EmbeddedSampler(old, settings, version=0))
    params = SamplingParams(max_new_tokens=40)
    request = Request(id="a", prompt_ids=tuple(range(3, 20)), params=params, seeds=(1, 2))

    async def update():
        drawn = asyncio.Event()
        task = asyncio.create_task(sampler.generate(request, lambda *_: drawn.set()))
        await drawn.wait()
        await sampler.install(1, new)
        return await task

    for made in asyncio.run(update()):
        num_old = made.versions.count(0)
        assert 0 < num_old < 40
        ids = torch.tensor([*request.prompt_ids, *made.ids])
        expected = own_logprobs(theirs, ids)[-40:]
        diff = float((torch.tensor(made.logprobs) - expected)[num_old:].abs().max())
        assert diff < CLOSE if on_update == "reprefill" else diff > 10 * CLOSE


def test_a_slot_has_the_states_of_a_row(sampler_of, written):
    sampler = sampler_of(written("nemotron_h").folder, max_running=3)
    kinds, slots = sampler.engine.model.state_kinds, sampler.engine.runner.slots
    # Four heads of 16 x 8, and inputs of a convolution over four tokens.
    shapes = {kind.name: kind.shape for kind in kinds}
    assert shapes == {"conv_states": (4 * 16 + 2 * 2 * 8, 4), "recurrent_states": (4, 16, 8)}
    held = sum(x.nbytes for x in slots.held)
    assert held == 3 * sum(kind.num_bytes for kind in kinds) == 3 * 4 * (96 * 4 + 4 * 16 * 8)


def test_models_built_by_two_threads_leave_transformers_as_it_was(written, monkeypatch):
    """While one is probed, another begins; kernels would be off afterwards."""
    chosen, meet = hub_kernels.is_torchdynamo_exporting, Barrier(2)
    own = states._continues

    def slowly(*given):
        with suppress(BrokenBarrierError):
            meet.wait(timeout=1)  # for the other thread, if nothing keeps it out
        return own(*given)

    monkeypatch.setattr(states, "_continues", slowly)
    place = {"device": "cpu", "dtype": torch.float32}
    with ThreadPoolExecutor(2) as threads:
        built = [threads.submit(build_unfiled, written("lfm2").folder, **place) for _ in range(2)]
    assert all(one.result().continues_runs for one in built)
    assert hub_kernels.is_torchdynamo_exporting is chosen


def test_a_cache_in_eight_bits_holds_heads_of_several_widths(sampler_of, written):
    sampler = sampler_of(written("gemma4_unified_text").folder, kv_cache_dtype="int8")
    assert gap(draw(sampler), written("gemma4_unified_text").theirs) < 0.1


def test_half_precision_differs_by_its_rounding_alone(sampler_of, written):
    """Also where a family computes a part of a layer in float32."""
    for family in ("gemma3n_text", "cohere", "granitemoehybrid", "kimi_linear"):
        sampler = sampler_of(written(family).folder, torch.bfloat16)
        assert gap(draw(sampler), written(family).theirs) < 0.15


def test_what_needs_layers_of_our_own_is_rejected(written):
    settings = sampler_settings(strict=True)
    model = build_unfiled(written("cohere").folder, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError) as caught:
        EmbeddedSampler(model, settings)
    said = str(caught.value)
    assert "strict = true: needs a model file, and cohere has none" in said
    model = build_unfiled(written("lfm2").folder, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="adapter: layers of lfm2 use some of their matrices"):
        EmbeddedSampler(model, sampler_settings(lora=LoraConfig(rank=2)))


def test_calls_of_attention_that_were_not_expected_end_the_run(sampler_of, written):
    """The cache knows a layer by the order of calls alone."""
    sampler = sampler_of(written("cohere").folder)
    model = sampler.engine.model
    model.body.layers = model.body.layers[:1]
    with pytest.raises(RunError, match="1 calls of attention, where 2 were"):
        draw(sampler)
