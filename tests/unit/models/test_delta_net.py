"""Gated delta nets: no state passes from one packed sequence to the next, chunks equal single
tokens, one compiled graph, and what cannot be done with them is rejected by name.

`test_families.py` has them packed and sampled, `test_verify_model.py` against transformers.
"""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
import transformers
from family_toys import FAMILY_CONFIGS, LINEAR_FAMILIES
from sections import sampler_settings

from pentad.core.errors import UserError
from pentad.core.fit import check_fit, no_tree
from pentad.core.layout import Layout
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.states import StateSlots, StepMemory
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, lora_map_of, lora_words
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model, load_model
from pentad.ops.attention import build_attend
from pentad.ops.delta import PackedMemory, RememberingAttend, recall_token, scan
from pentad.parallel.blocks import compile_run
from pentad.planner.adapters import num_factors
from pentad.weights.megatron.arguments import unsayable
from pentad.weights.peft import word_of

CPU = torch.device("cpu")
FAMILY = "qwen3_5_text"
LENGTHS = [70, 5, 130]  # a chunk and a part, a part, two chunks and a part


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_packed(model, ids, lengths, wanted):
    """Hidden states of the sequence `wanted`, and the gradients that they alone give."""
    positions = torch.cat([torch.arange(num) for num in lengths])
    attend = build_attend(lengths, device=CPU, dtype=torch.float32, head_dim=8)
    attend = RememberingAttend(attend, PackedMemory(lengths, CPU))
    hidden = model(ids, positions, attend).split(lengths)[wanted]
    trained = [x for name, x in model.named_parameters() if not name.startswith(("embed", "head"))]
    return hidden, torch.autograd.grad(hidden.square().sum(), trained)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_sequence_does_not_see_its_neighbours(wanted):
    """Bit for bit, convolutions and states, forward and backward; also beside one that is NaN."""
    model = create_model(replace(dims_of(FAMILY_CONFIGS[FAMILY]), padding_id=None), seed=3)
    ids = torch.randint(0, 36, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.embed.weight[36] = float("nan")
    hidden, gradients = run_packed(model, ids, LENGTHS, wanted)
    others = [part.clone() for part in ids.split(LENGTHS)]
    for number, part in enumerate(others):
        if number != wanted:
            part += 1
            part %= 36
    changed, changed_gradients = run_packed(model, torch.cat(others), LENGTHS, wanted)
    assert torch.equal(hidden, changed)
    for one, other in zip(gradients, changed_gradients, strict=True):
        assert torch.equal(one, other)
    for number, part in enumerate(others):
        if number != wanted:
            part[-1] = 36
    with torch.no_grad():
        assert torch.equal(hidden, run_packed_hidden(model, torch.cat(others), wanted))


def run_packed_hidden(model, ids, wanted):
    positions = torch.cat([torch.arange(num) for num in LENGTHS])
    attend = build_attend(LENGTHS, device=CPU, dtype=torch.float32, head_dim=8)
    return model(ids, positions, attend).split(LENGTHS)[wanted]


def inputs_of(num):
    q, k = random(num, 2, 6), random(num, 2, 6, seed=1)
    return q, k, random(num, 4, 5, seed=2), -random(num, 4, seed=3).abs(), random(num, 4).sigmoid()


def test_chunks_give_what_single_tokens_give():
    given = inputs_of(sum(LENGTHS))
    found = PackedMemory(LENGTHS, CPU).recall(0, *given)
    for parts, chunked in zip(
        zip(*(x.split(LENGTHS) for x in given), strict=True), found.split(LENGTHS), strict=True
    ):
        state = torch.zeros(1, 4, 6, 5)
        for at, wanted in enumerate(chunked):
            out, state = recall_token(*(x[at : at + 1] for x in parts), state)
            assert (out[0] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("steps", [[(70, 1)], [(3, 0), (66, 0), (0, 2), (1, 68), (0, 1)]])
def test_steps_of_a_sampler_continue_each_rows_own_state(steps):
    """Rows 2 and 0 of a table, in steps of so many tokens each, against both computed whole."""
    dims = replace(dims_of(FAMILY_CONFIGS[FAMILY]), linear_key_heads=2, linear_value_heads=4)
    slots = StateSlots(dims, 3, device=CPU, dtype=torch.float32)
    slots.states.fill_(7.0)  # of sequences before
    slots.inputs.fill_(7.0)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    given = inputs_of(sum(lengths))
    x, weight = random(sum(lengths), slots.inputs.shape[-1]), random(slots.inputs.shape[-1], 3)
    whole = PackedMemory(lengths, CPU)
    wanted = whole.recall(0, *given).split(lengths), whole.convolve(0, x, weight).split(lengths)
    by_row = [torch.arange(lengths[0]), lengths[0] + torch.arange(lengths[1])]
    done = [0, 0]
    for counts in steps:
        which = [row for row in (0, 1) if counts[row]]
        tokens = torch.cat([by_row[row][done[row] : done[row] + counts[row]] for row in which])
        rows, starts, nums = (
            torch.tensor([values[row] for row in which]).numpy()
            for values in ((2, 0), done, counts)
        )
        memory = StepMemory(slots, rows, starts, nums)
        found = memory.recall(0, *(one[tokens] for one in given))
        mixed = memory.convolve(0, x[tokens], weight)
        parts = found.split(nums.tolist()), mixed.split(nums.tolist())
        for number, row in enumerate(which):
            place = slice(done[row], done[row] + counts[row])
            for mine, true in zip(parts, wanted, strict=True):
                assert (mine[number] - true[row][place]).abs().max() < 1e-5
            done[row] += counts[row]


def test_the_scans_gradients_are_those_of_its_numbers():
    sizes = [(3, 2, 4, 5), (3, 2, 4, 6), (3, 2, 4, 6), (3, 2), (2, 2, 6, 5)]
    given = [random(*size, seed=n).double().requires_grad_() for n, size in enumerate(sizes)]
    counts = torch.tensor([2, 1])
    assert torch.autograd.gradcheck(lambda *x: scan(*x, counts), given)


def test_blocks_of_any_lengths_share_one_compiled_graph():
    """The compiler traces a layer whole, and loops over chunks are no part of its graph."""
    torch._dynamo.reset()
    model, graphs = create_model(dims_of(FAMILY_CONFIGS[FAMILY]), seed=3), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = model.layers["0"]
    run = compile_run(lambda *args: type(block).forward(block, *args), backend)
    for lengths in ([70, 5], [130, 64, 20], [300, 7]):
        x, turn = random(sum(lengths), 24), random(sum(lengths), 8)
        attend = RememberingAttend(causal_attend, PackedMemory(lengths, CPU))
        with torch.no_grad():
            wanted = block(x, turn, turn, attend)[0]
            assert (run(x, turn, turn, attend)[0] - wanted).abs().max() < 1e-5
    assert len(graphs) == 1
    assert sum("delta_scan" in str(node.target) for node in graphs[0].graph.nodes) == 1


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_in_double_precision_logits_are_transformers(family, tmp_path):
    """To the rounding of the delta rule, which both compute in float32."""
    config = dict(FAMILY_CONFIGS[family])
    hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    theirs = transformers.AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", experts_implementation="eager"
    )
    theirs = theirs.double().eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float64)
    ids = torch.randint(0, 37, (150,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
        found = ours.logits(ours(ids, torch.arange(len(ids)), causal_attend))
    # The norm behind a state enlarges what is rounded in it where the state says little.
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_after_new_weights_states_are_computed_again():
    dims = dims_of(FAMILY_CONFIGS[FAMILY])
    old, new = create_model(dims, seed=1), create_model(dims, seed=2)
    settings = sampler_settings(max_running=3, kv_cache_tokens=512, on_update="reprefill")
    sampler = EmbeddedSampler(old, settings, version=0)
    prompt = [(7 * i) % 37 for i in range(20)]
    params = SamplingParams(max_new_tokens=60)
    request = Request(id="a", prompt_ids=prompt, params=params, seeds=(1, 2))

    async def scenario():
        drawn = asyncio.Event()
        task = asyncio.create_task(sampler.generate(request, lambda *_: drawn.set()))
        waiting = asyncio.create_task(drawn.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert drawn.is_set(), task.result()
        await sampler.install(1, list(iter_hf(new)))
        found = await task
        again = await sampler.generate(replace(request, id="b"))
        await sampler.close()
        return [*found, *again]

    for one in asyncio.run(scenario()):
        first = one.versions.count(0)
        with torch.no_grad():
            ids = torch.tensor([*prompt, *one.ids])
            logits = new.logits(new(ids, torch.arange(len(ids)), causal_attend))
        logits = logits[len(prompt) - 1 : -1][first:]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.ids[first:])[:, None])[:, 0]
        # Those of the weights before differ by 1 and more; sixty tokens carry their rounding on.
        assert (torch.tensor(one.logprobs[first:]) - wanted).abs().max() < 1e-3


def test_no_prefix_of_another_request_is_taken():
    """Its keys are in the cache, its states are not."""
    sampler = EmbeddedSampler(
        create_model(dims_of(FAMILY_CONFIGS[FAMILY]), seed=1),
        sampler_settings(max_running=3, kv_cache_tokens=512, keep_prefixes=True),
        version=0,
    )
    prompt, params = list(range(37)), SamplingParams(max_new_tokens=2)

    async def scenario():
        for name in "ab":
            await sampler.generate(Request(id=name, prompt_ids=prompt, params=params, seeds=(1,)))
        stats = sampler.stats()
        await sampler.close()
        return stats

    assert asyncio.run(scenario())["prefill_tokens_computed"] == 2 * len(prompt)


REJECTED_LAYOUTS = {
    "cp": (Layout(cp=2), "c2 splits tokens over ranks.*linear_attention layers of qwen3_5_text"),
    "tp": (Layout(tp=8), "t8 must divide linear_num_key_heads = 4.*t can be 1, 2, 4"),
}


@pytest.mark.parametrize("case", REJECTED_LAYOUTS)
def test_layouts_that_tear_a_state_are_rejected(case):
    layout, sentence = REJECTED_LAYOUTS[case]
    with pytest.raises(UserError, match=sentence):
        check_fit(layout, dims_of(FAMILY_CONFIGS[FAMILY]))


def test_what_delta_nets_do_not_do_is_rejected_by_name():
    dims = dims_of(FAMILY_CONFIGS[FAMILY])
    assert "gated delta nets" in unsayable(dims)[0].rule
    reason = no_tree(Layout(), "archon", strict=False, balanced=False, dims=dims)
    assert "linear_attention layers" in reason
    with pytest.raises(UserError, match="strict = true: the linear_attention layers of qwen3_5"):
        EmbeddedSampler(create_model(dims), sampler_settings(max_running=2, strict=True))


WRONG = {
    "another kind of layer": (
        {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
        "layer_types = .*must name linear_attention or full_attention for each of 3 layers",
    ),
    "no attention at all": ({"layer_types": ["linear_attention"] * 3}, "names no full_attention"),
    "no attention by the interval": (
        {"layer_types": None, "full_attention_interval": 4},
        "full_attention_interval = 4: names no full_attention",
    ),
    "heads that do not divide": (
        {"linear_num_value_heads": 6},
        "linear_num_value_heads = 6: must be a multiple of linear_num_key_heads = 4",
    ),
    "no width": ({"linear_key_head_dim": 0}, "linear_key_head_dim = 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_of_other_layers_are_rejected(case):
    changes, sentence = WRONG[case]
    with pytest.raises(UserError, match=sentence):
        dims_of({**FAMILY_CONFIGS[FAMILY], **changes})


def test_adapters_are_for_matrices_with_a_tensor_of_their_own():
    dims = dims_of(FAMILY_CONFIGS[FAMILY])
    with pytest.raises(UserError, match="holds q in shared tensors.*k, v, o, gate, up, down"):
        lora_words(dims, LoraConfig(rank=4))
    chosen = lora_map_of(dims, LoraConfig(rank=4, targets=["k", "o"])).entries
    assert {"layers.0.attn.o.lora.a", "layers.1.attn.k.lora.a"} <= chosen.keys()
    assert word_of("model.layers.0.linear_attn.out_proj") == "o"


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_plan_counts_the_factors_of_each_kind_of_layer(family):
    dims = dims_of(FAMILY_CONFIGS[family])
    for targets in (["o"], ["k", "v", "o"]):
        lora = LoraConfig(rank=4, targets=targets)
        entries = lora_map_of(dims, lora).entries.values()
        assert num_factors(dims, lora) == sum(math.prod(entry.shape) for entry in entries)
