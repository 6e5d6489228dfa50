"""`pentad plan`: figures that add up, output that fits the page, exit codes that mean something."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pentad.cli import plan as cli
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.core import machine
from pentad.core.errors import UserError
from pentad.core.layout import Layout, parse_allocation
from pentad.core.machine import GIB, MIB, Gpu
from pentad.infer import engine
from pentad.planner.figures import MAX_ROWS, Device, RunPlan, inner_rows, span
from pentad.planner.memory import PHASES, held_params
from pentad.planner.plan import EMBEDDED_CPU_BYTES, build_plan, choose_device
from pentad.planner.prepare import prepare
from pentad.planner.present import with_data_here
from pentad.planner.remedies import KEEPING_SHARE, choose_logits, propose, with_values
from pentad.planner.sampling import kv_token_bytes

ROOT = Path(__file__).parents[3]
EXAMPLES = {
    "archon_qwen3_8b.yaml": ("sglang:d4t2+archon:d4p2t2", 24),
    "archon_qwen3_moe.yaml": ("sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)", 32),
}
OWN = "rollout.workflow=pentad.rollout.workflows:SingleTurn"  # one of the user's, to the rules
H100 = Device("cuda", 80 * GIB, "a test", False)


def plan_of(*overrides: str, device: Device = H100, recipe: str | None = None, **extra) -> RunPlan:
    path = ROOT / "examples" / recipe if recipe else None
    config, _ = prepare(path, list(overrides), "plan")
    return build_plan(config, device, **extra)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_tutorials_examples_plan_unmodified(name, monkeypatch, capsys):
    monkeypatch.setattr("pentad.planner.plan.find_gpus", lambda: ())
    monkeypatch.setenv("COLUMNS", "100")
    config, notes = prepare(ROOT / "examples" / name, [], "plan")
    assert cli.run_plan(config, notes) == 0
    out = capsys.readouterr().out
    allocation, devices = EXAMPLES[name]
    assert config.allocation_mode == allocation
    assert f"Placement: {devices} of {devices} GPUs in " in out
    assert "80 GiB each are assumed" in out
    assert "raised from 1 to the number of pipeline stages" in out
    assert out.splitlines()[-1].startswith("Fits: ")
    assert [phase for phase in PHASES if f"\n{phase} " not in out] == []


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_keeps_to_its_width(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in EXAMPLES:
        config, notes = prepare(ROOT / "examples" / name, [], "plan")
        cli.run_plan(config, notes, gpu_memory=40.0)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() and line.isascii() for line in lines)


def test_the_command_needs_no_torch_and_exits_with_what_it_found():
    env = os.environ | {"PENTAD_TRACEBACK": "", "COLUMNS": "100"}
    code = "import sys; sys.argv[0] = 'pentad'\nfrom pentad.cli.main import app\n"
    code += "try:\n    app()\nfinally:\n"
    code += "    print('HEAVY', sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, "plan", "examples/archon_qwen3_moe.yaml", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)

    small = run("--gpu-memory", "20")
    assert small.returncode == 1 and "HEAVY []" in small.stdout
    assert "Remedies, cheapest first" in small.stdout
    wrong = run("allocation_mode=sglang:d4+archon:d1p2e2", "actor.archon.pp_schedul=ZBV")
    assert wrong.returncode == 2
    assert "use archon:d2p2e2 (4 devices)" in wrong.stderr and "pp_schedule" in wrong.stderr


def test_json_carries_the_same_figures(capsys):
    config, notes = prepare(ROOT / "examples" / "archon_qwen3_moe.yaml", [], "plan")
    assert cli.run_plan(config, notes, gpu_memory=40.0, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    plan = build_plan(config, Device("cuda", 40 * GIB, "", False))
    assert found["peak_bytes"] == plan.peak_bytes
    assert found["model"]["num_params"] == 30_532_122_624
    (trainer,) = found["trainers"]
    peaks = [
        sum(phase["device"].values()) for row in trainer["pipeline_ranks"] for phase in row.values()
    ]
    assert max(peaks) == pytest.approx(plan.peak_bytes)
    assert found["fits"] is False and found["remedies"][-1]["fits"] is True


def test_remedies_come_in_the_tutorials_order_and_are_true():
    plan = plan_of(recipe="archon_qwen3_moe.yaml", device=Device("cuda", 40 * GIB, "", False))
    remedies = propose(plan)
    keys = [remedy.overrides[0].split("=")[0] for remedy in remedies]
    assert keys == ["allocation_mode"], "on its devices nothing else is needed"
    sizes = [plan.peak_bytes, *(remedy.peak_bytes for remedy in remedies)]
    assert sizes == sorted(sizes, reverse=True)
    assert [remedy.fits for remedy in remedies] == [*[False] * (len(remedies) - 1), True]
    # What is proposed can be typed, passes every rule, and needs what was said.
    typed = [text for remedy in remedies for text in remedy.overrides]
    again = plan_of(*typed, recipe="archon_qwen3_moe.yaml", device=plan.device)
    assert again.peak_bytes == remedies[-1].peak_bytes and again.fits
    assert again.allocation.num_devices == remedies[-1].num_devices == 48


def test_dense_models_get_tensor_parallelism_from_data_parallelism_first():
    device = Device("cuda", 16 * GIB, "", False)
    remedies = propose(plan_of(recipe="archon_qwen3_8b.yaml", device=device))
    assert remedies[-1].overrides == ("allocation_mode=sglang:d4t2+archon:d2p2t4",)
    assert remedies[-1].fits and remedies[-1].num_devices == 24


def test_zero_bubble_is_never_told_to_reshard():
    device = Device("cuda", 16 * GIB, "", False)
    keys = ("actor.archon.pp_schedule=ZBV", "actor.archon.enable_compile=auto")
    plan = plan_of(
        *keys, "actor.archon.ac_selective=2", recipe="archon_qwen3_8b.yaml", device=device
    )
    assert not any("reshard" in text for r in propose(plan) for text in r.overrides)


def test_a_plan_that_fits_has_no_remedies():
    assert propose(plan_of("actor.path=Qwen/Qwen3-0.6B", "actor.mb_spec.n_mbs=64")) == []


def test_batch_arithmetic():
    plan = plan_of(
        "actor.path=Qwen/Qwen3-0.6B",
        "allocation_mode=vllm:d1+archon:d4",
        "train_dataset.batch_size=10",
        "train_dataset.max_length=100",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=28",
        "actor.mb_spec.max_tokens_per_mb=300",
        "total_train_epochs=3",
        num_rows=95,
    )
    batch = plan.batch
    assert (batch.samples, batch.tokens) == (40, 40 * 128)
    assert (batch.steps_per_epoch, batch.total_steps) == (10, 30)
    # Ten sequences a rank, two of 128 tokens in a microbatch of at most 300.
    training = plan.trainers[0].training
    assert (training.num_microbatches, training.microbatch_tokens) == (5, 256)
    assert batch.flops == 40 * plan.dims.train_flops(128)
    short = plan_of("actor.path=Qwen/Qwen3-0.6B", "total_train_steps=7", num_rows=10**6)
    assert short.batch.total_steps == 7


def test_without_a_rollout_rows_are_trained_as_they_are():
    keys = ("actor.path=Qwen/Qwen3-0.6B", "allocation_mode=archon:d1")
    batch = plan_of(*keys, "train_dataset.max_length=100").batch
    assert (batch.samples, batch.sequence_tokens) == (32, 100)


def test_shared_devices_hold_the_sampler_in_every_phase():
    keys = ("actor.path=Qwen/Qwen3-0.6B", "rollout.kv_cache_gb=3")
    plan = plan_of(*keys)
    for name, phase in plan.trainers[0].phases[0].items():
        assert ("kv cache" in phase.device) == (name != "load")
    assert plan.trainers[0].phases[0]["backward"].device["kv cache"] == 3 * GIB
    asleep = plan_of(*keys, "offload_rollout=true").trainers[0].phases[0]
    assert "kv cache" not in asleep["backward"].device and "kv cache" in asleep["rollout"].device
    away = plan_of(*keys, "offload_train=true", "offload_rollout=true").trainers[0].phases[0]
    wanted = {"overhead", "sampler weights", "kv cache", "sampler pass"}
    assert set(away["rollout"].device) == wanted


def test_offloading_left_open_is_chosen_by_what_fits():
    keys = ["actor.path=Qwen/Qwen3-0.6B", "cluster.n_gpus_per_node=1", "rollout.kv_cache_gb=40"]
    keys += ["train_dataset.max_length=512", "actor.mb_spec.max_tokens_per_mb=768"]
    roomy, notes = prepare(None, keys, "plan", 80)
    assert roomy.offload_rollout is False and "offload" not in " ".join(notes)
    tight, notes = prepare(None, keys, "plan", 54)
    (note,) = [note for note in notes if "offload" in note]
    assert tight.offload_rollout is True
    assert note.startswith("offload_rollout = true: sampler and training need ")
    assert note.endswith("together, and the GPU has 54.0")
    assert build_plan(tight, choose_device(tight, 54)).fits
    told, notes = prepare(None, [*keys, "offload_rollout=false"], "plan", 54)
    assert told.offload_rollout is False and not build_plan(told, choose_device(told, 54)).fits
    apart, _ = prepare(None, [*keys, "mode=hybrid", "cluster.n_gpus_per_node=2"], "plan", 48)
    assert apart.offload_rollout is False


def test_logits_are_kept_unasked_where_a_gpu_has_ample_room():
    def chosen(*keys, memory=80.0):
        base = ["actor.path=Qwen/Qwen3-0.6B", "actor.mb_spec.max_tokens_per_mb=8192"]
        config, notes = prepare(None, [*base, *keys], "plan", memory)
        return config, [note for note in notes if "keep_logits" in note]

    alone, length = "allocation_mode=archon:d1", "train_dataset.max_length=2048"
    config, (note,) = chosen(alone, length)
    assert config.actor.archon.keep_logits is True
    largest = with_values(config, {"actor.pad_to_maximum": True})
    plan = build_plan(largest, choose_device(config, 80))
    assert plan.peak_bytes > 4 * 8192 * 151936
    start = "actor.archon.keep_logits = true: with the logits of full microbatches "
    assert note == f"{start}{plan.peak_bytes / GIB:.1f} of 80.0 GiB are planned"
    # The last GiB below 80% of a GPU, and the first above it.
    edge = plan.peak_bytes / GIB / KEEPING_SHARE
    assert chosen(alone, length, memory=edge + 0.1)[0].actor.archon.keep_logits is True
    assert chosen(alone, length, memory=edge - 0.1)[0].actor.archon.keep_logits is None
    # Rows of no given length may be as long as the context, more than a microbatch otherwise.
    assert chosen(alone, memory=edge + 0.1)[1] == []
    for key in ("true", "false"):
        told, notes = chosen(alone, length, f"actor.archon.keep_logits={key}")
        assert (str(told.actor.archon.keep_logits).lower(), notes) == (key, [])


@pytest.mark.parametrize(
    "keys",
    [
        ["allocation_mode=embedded:d1|archon:d1"],
        ["allocation_mode=archon:d1p2", "cluster.n_gpus_per_node=2"],
        ["allocation_mode=sglang:d1+archon:d1", "rollout.server.addresses=[http://127.0.0.1:1]"],
    ],
    ids=["a sampler on the GPU", "a pipeline", "servers of others"],
)
def test_logits_are_not_kept_unasked_beside_a_sampler_or_in_a_pipeline(keys):
    keys = ["actor.path=Qwen/Qwen3-0.6B", "train_dataset.max_length=512", *keys]
    config, notes = prepare(None, keys, "plan", 200)
    assert config.actor.archon.keep_logits is None and "keep_logits" not in " ".join(notes)


def test_logits_are_kept_unasked_where_the_fewest_ranks_of_an_elastic_run_have_room():
    keys = ["actor.path=Qwen/Qwen3-0.6B", "train_dataset.max_length=512"]
    keys += ["actor.mb_spec.max_tokens_per_mb=8192", "cluster.n_gpus_per_node=4"]

    def chosen(allocation, *more, memory):
        given = [*keys, f"allocation_mode={allocation}", *more]
        return prepare(None, given, "plan", memory)[0].actor.archon.keep_logits

    elastic = "elastic.enabled=true"
    # One rank holds all of the 9 GB of weights, gradients and moments that four share.
    alone = chosen("archon:d1", "cluster.n_gpus_per_node=1", memory=24)
    assert chosen("archon:d4", memory=24) is True and alone is None
    assert chosen("archon:d4", elastic, memory=24) is None
    assert chosen("archon:d4", elastic, "elastic.min_ranks=4", memory=24) is True
    assert chosen("archon:d4", elastic, memory=48) is True


def test_ranks_of_megatron_share_masters_and_moments_and_hold_whole_buffers():
    keys = ["actor.path=Qwen/Qwen3-30B-A3B", "train_dataset.max_length=512"]

    def held(layout):
        given = [*keys, f"allocation_mode={layout}", "cluster.n_gpus_per_node=4"]
        config = prepare(None, [*given, "cluster.allow_idle=true"], "plan", 1000)[0]
        plan = build_plan(config, Device("cuda", 1000 * GIB, "", False))
        return dict(plan.trainers[0].peak[1].device)

    shared, whole = ("weights", "optimizer"), ("gathered weights", "gradients")
    one, two, four = (held(f"megatron:{layout}") for layout in ("d1t1", "d2", "d4e2"))
    assert [two[name] for name in shared] == [one[name] / 2 for name in shared]
    assert all(two[name] >= one[name] > 0 for name in whole)
    assert all(four[name] > one[name] / 2 for name in whole)  # experts alone are cut
    assert held("archon:d2")["optimizer"] == two["optimizer"]


def test_the_backend_fsdp_holds_tables_and_logits_of_the_whole_vocabulary():
    """Its tp cuts layers alone."""
    keys = ["actor.path=Qwen/Qwen3-0.6B", "train_dataset.max_length=2048"]
    keys += ["cluster.n_gpus_per_node=4", "actor.mb_spec.max_tokens_per_mb=32768"]

    def planned(backend, *more):
        given = [*keys, f"allocation_mode={backend}:d1t4", *more]
        return prepare(None, given, "plan", 80)[0]

    largest = ["actor.archon.keep_logits=true", "actor.pad_to_maximum=true"]
    fsdp, archon = (
        build_plan(planned(name, *largest), Device("cuda", 80 * GIB, "", False)).trainers[0]
        for name in ("fsdp", "archon")
    )
    whole, cut = (one.peak[1].device["logits"] for one in (fsdp, archon))
    assert whole > 4 * 32768 * 151936 > 3.5 * cut
    table = 151936 * 1024
    lacking = held_params(fsdp.training, 0).total - held_params(archon.training, 0).total
    assert lacking == table - table // 4


def test_the_backend_fsdp_holds_its_part_of_the_experts():
    """Blocks that send tokens to experts are not compiled, which takes other activations."""
    keys = ["actor.path=Qwen/Qwen3-30B-A3B", "train_dataset.max_length=2048"]
    keys += ["cluster.n_gpus_per_node=8", "actor.mb_spec.max_tokens_per_mb=8192"]

    def planned(axes):
        config = prepare(None, [*keys, f"allocation_mode=fsdp:{axes}"], "plan", 2000)[0]
        return build_plan(config, Device("cuda", 2000 * GIB, "", False)).trainers[0].training

    whole, split = planned("d8"), planned("d8e8")
    assert held_params(whole, 0).experts == 8 * held_params(split, 0).experts > 0
    assert whole.model.archon.enable_compile and not split.model.archon.enable_compile


def test_passes_of_small_models_are_captured_where_a_gpu_has_ample_room():
    def chosen(*keys, memory=80.0):
        base = ["actor.path=Qwen/Qwen3-0.6B", "actor.mb_spec.max_tokens_per_mb=8192"]
        base += ["train_dataset.max_length=512", "rollout.kv_cache_gb=4"]
        config, notes = prepare(None, [*base, *keys], "plan", memory)
        plan = build_plan(config, choose_device(config, memory))
        return plan, [note for note in notes if "cuda_graphs" in note]

    plan, notes = chosen()
    without, _ = chosen("actor.archon.cuda_graphs=false")
    (mine,), (other,) = plan.trainers, without.trainers
    assert (mine.training.captures, other.training.captures, notes) == (True, False, [])
    for name in ("rollout", "backward", "optimizer"):
        phase = mine.phases[0][name].device
        assert phase["captured passes"] > 8192 * 28 * 1024
        assert phase["gradients"] == 4 * plan.dims.num_params
        assert "captured passes" not in other.phases[0][name].device
    edge = plan.peak_bytes / GIB / KEEPING_SHARE
    assert chosen(memory=edge + 0.1)[0].trainers[0].training.captures
    tight, (note,) = chosen(memory=edge - 0.1)
    assert not tight.trainers[0].training.captures
    assert note.startswith("actor.archon.cuda_graphs = false: with captured passes ")
    told, notes = chosen("actor.archon.cuda_graphs=true", memory=edge - 0.1)
    assert (told.trainers[0].training.captures, notes) == (True, [])
    offloaded, (note,) = chosen("offload_train=true")
    assert not offloaded.trainers[0].training.captures
    assert note.startswith("actor.archon.cuda_graphs = false: offload_train = true moves ")


def test_runs_choose_for_the_gpu_that_is_here():
    keys = ["actor.path=Qwen/Qwen3-0.6B", "allocation_mode=archon:d1"]
    config, _ = resolve(load_config(None, [*keys, "train_dataset.max_length=2048"]))
    there = Device("cuda", 140 * GIB, "", False)
    here = Device("cuda", 140 * GIB, "", True)
    cpu = Device("cpu", 900 * GIB, "")
    found = [choose_logits(config, device, "sft")[0] for device in (there, here, cpu)]
    assert [one.actor.archon.keep_logits for one in found] == [None, True, None]


def test_keeping_logits_is_what_a_plan_gives_up_first():
    keys = [
        "actor.path=Qwen/Qwen3-0.6B",
        "allocation_mode=archon:d1",
        "actor.archon.keep_logits=true",
        "actor.mb_spec.n_mbs=1",
    ]
    config, _ = prepare(None, [*keys, "train_dataset.max_length=2048"], "plan", 30)
    remedies = propose(build_plan(config, Device("cuda", 30 * GIB, "", False)))
    assert remedies[0].overrides == ("actor.archon.keep_logits=false",)


def test_the_embedded_cache_takes_what_the_engine_takes():
    assert EMBEDDED_CPU_BYTES == engine.EMBEDDED_CPU_BYTES
    sampler = plan_of("actor.path=Qwen/Qwen3-0.6B").samplers[0]
    load = plan_of("actor.path=Qwen/Qwen3-0.6B").trainers[0].phases[0]["load"].device_bytes
    assert sampler.kv_bytes == pytest.approx((80 * GIB - load - sampler.weights_bytes) / 2)
    each = kv_token_bytes(sampler.sampling) * sampler.sampling.sequence_tokens
    assert sampler.num_running == int(sampler.kv_bytes / each)


def test_the_pass_of_an_embedded_sampler_is_counted_where_it_is_held(capsys):
    def found(*more, memory=80.0):
        keys = ["actor.path=Qwen/Qwen3-0.6B", "offload_rollout=false", "rollout.max_running=256"]
        config, notes = prepare(None, [*keys, *more], "plan", memory)
        cli.run_plan(config, notes, gpu_memory=memory, as_json=True)
        plan = json.loads(capsys.readouterr().out)
        phases = plan["trainers"][0]["pipeline_ranks"][0]
        held = {name: x["device"].get("sampler pass", 0) for name, x in phases.items()}
        return plan["samplers"][0], {name: size for name, size in held.items() if size}

    # Five hidden states of 1024 and three of the ffn's 3072, two bytes each: 28,672 a token.
    sampler, held = found("rollout.kv_cache_gb=3")
    assert (sampler["pass_tokens"], sampler["pass_bytes"]) == (32_768, 939_524_096)
    assert held == {"rollout": 939_524_096}
    _, held = found("rollout.kv_cache_gb=3", "rollout.max_batch_tokens=1000")
    assert held == {"rollout": 28_672_000}
    # Loaded are 1.5 GiB and 12 bytes of each of 596,049,920 parameters; two more are the sampler's.
    # 11 GiB leave 1,318,977,536 bytes beside the cache: an eighth is 5750 tokens, fewer than 8192.
    sampler, held = found("rollout.kv_cache_gb=0.5", memory=11.0)
    assert held == {"rollout": 8192 * 28_672} and sampler["pass_tokens"] == 8192
    # 14 GiB leave 4,540,203,008: an eighth is 19,793 tokens.
    sampler, held = found("rollout.kv_cache_gb=0.5", memory=14.0)
    assert sampler["pass_tokens"] == 19_793 and held == {"rollout": 19_793 * 28_672}
    # A sampler that works beside training holds it always; servers count theirs in their share.
    _, held = found("mode=hybrid", "cluster.share_gpus=true", "cluster.n_gpus_per_node=1")
    assert held == dict.fromkeys(PHASES[1:], 939_524_096)
    sampler, held = found("allocation_mode=vllm:d1|archon:d1")
    assert not held and sampler["pass_bytes"] == 0


def test_the_cache_leaves_room_for_a_pass():
    keys = ("actor.path=Qwen/Qwen3-0.6B", "allocation_mode=embedded:d1+archon:d4")
    keys += ("cluster.n_gpus_per_node=5",)

    def sampler(gib):
        return plan_of(*keys, device=Device("cuda", gib * GIB, "", False)).samplers[0]

    # 1.5 GiB are the process, 1,192,099,840 bytes the weights; 8192 tokens take 234,881,024.
    assert sampler(4).kv_bytes == 746_127_360  # a half of what is left
    assert sampler(3).kv_bytes == 418_512_896 - 234_881_024
    assert sampler(4).device_bytes <= 4 * GIB and sampler(3).device_bytes == 3 * GIB
    assert "a forward pass of 8,192 tokens 0.22;" in cli.describe_sampler(sampler(3))


def test_a_critic_and_a_reference_are_counted():
    keys = ("actor.path=Qwen/Qwen3-0.6B", "allocation_mode=archon:d2")
    plain = plan_of(*keys)
    both = plan_of(*keys, "algorithm.name=ppo")
    assert [trainer.role for trainer in both.trainers] == ["actor", "critic"]
    extra = both.peak_bytes - plain.peak_bytes
    # Another model's weights and optimizer, 12 bytes a parameter over two ranks.
    assert extra == pytest.approx(12 * plain.dims.num_params / 2, rel=0.01)
    assert both.files.export_bytes == 2 * plain.files.export_bytes
    with_ref = plan_of(*keys, "algorithm.kl_coef=0.01")
    tags = with_ref.trainers[0].phases[0]["backward"].host["tags"]
    assert tags == pytest.approx(2 * 4 * plain.dims.num_params / 2)


def test_an_embedded_sampler_is_drawn_where_it_runs():
    """With + on a device of its own, unless there is none and the two may share."""
    keys = ("actor.path=Qwen/Qwen3-0.6B", "rollout.kv_cache_gb=3", "max_staleness=0")
    keys += ("allocation_mode=embedded:d1+archon:d2",)
    assert plan_of(*keys, "cluster.n_gpus_per_node=3").allocation.num_devices == 3
    apart = plan_of(*keys, "cluster.n_gpus_per_node=2", "cluster.share_gpus=true")
    assert apart.allocation.num_devices == 2 and apart.config.mode == "hybrid"
    assert list(apart.samplers[0].devices) == [0] and not apart.samplers[0].is_alone
    backward = apart.trainers[0].phases[0]["backward"]
    assert backward.device["kv cache"] == 3 * GIB
    sampler = apart.samplers[0]
    assert backward.lead_bytes == 3 * GIB + sampler.weights_bytes + sampler.pass_bytes
    one = prepare(None, [*keys[:-1], "cluster.n_gpus_per_node=1", "mode=hybrid"], "plan", 80)[0]
    assert one.allocation_mode == "embedded:d1+archon:d1"  # it runs on one device


def test_on_a_cpu_nothing_is_counted_twice():
    cpu = Device("cpu", 64 * GIB, "")
    keys = ("actor.path=Qwen/Qwen3-0.6B", "rollout.kv_cache_gb=1", "max_staleness=0")
    keys += ("train_dataset.max_length=256", "actor.mb_spec.max_tokens_per_mb=512")
    keys += ("saver.mode=sync",)

    def needed(*more):
        return plan_of(*keys, *more, device=cpu).host_bytes["optimizer"]

    size = 4 * plan_of(*keys).dims.num_params
    process, cache = 0.4 * GIB, 1 * GIB
    # Weights, two moments and gradients; the sampler's weights and cache.
    assert needed() == pytest.approx(process + 4 * size + size + cache, rel=0.01)
    # The critic is in the same process: its weights and moments, and nothing else, come on top.
    assert needed("algorithm.name=ppo") == pytest.approx(needed() + 3 * size, rel=0.01)
    # One sampler, however many ranks; what they published stays in a file of shared memory.
    four = needed("allocation_mode=embedded:d1|archon:d4")
    assert four == pytest.approx(needed() + 3 * process + size, rel=0.01)


def test_weights_of_many_gpus_meet_on_the_host():
    keys = ("actor.path=Qwen/Qwen3-8B", "allocation_mode=vllm:d2+archon:d4", "max_staleness=1")
    keys += ("cluster.n_gpus_per_node=6",)
    model = 2 * plan_of(*keys).dims.num_params
    plan = plan_of(*keys)
    assert "snapshot" not in plan.trainers[0].phases[0]["publish"].device
    # A snapshot beside the one kept for servers that are started again, and a file in shared
    # memory for each of the two.
    extra = plan.host_bytes["publish"] - plan.host_bytes["rollout"]
    assert extra == pytest.approx(model + 2 * model)
    assert plan.trainers[0].phases[0]["publish"].host["publish staging"] == model / 4
    straight = plan_of(*keys, "rollout.server.weight_transport=broadcast")
    extra = straight.host_bytes["publish"] - straight.host_bytes["rollout"]
    assert extra == pytest.approx(model)


def test_copies_in_fp8_of_a_publish_are_counted_where_the_snapshot_is():
    keys = ("actor.path=Qwen/Qwen3-8B", "cluster.n_gpus_per_node=6")

    def published(mode, dtype="fp8"):
        keys_of_it = (f"allocation_mode={mode}", f"rollout.weight_dtype={dtype}")
        plan = plan_of(*keys, "cluster.allow_idle=true", *keys_of_it)
        phase = plan.trainers[0].phases[0]["publish"]
        return plan.host_bytes["publish"] - plan.host_bytes["rollout"], phase

    model = plan_of(*keys).dims
    layer = model.hidden_size * (2 * 4096 + 2 * 1024 + 3 * model.intermediate_size)
    quantised = 36 * layer * (1 + 4 / 128**2)
    for mode, dequantised in (("vllm:d2+archon:d4", 0), ("sglang:d2+archon:d4", 2 * 36 * layer)):
        (plain, _), (extra, phase) = published(mode, dtype="auto"), published(mode)
        # The files in shared memory are smaller; both servers have a copy beside them.
        assert phase.host["fp8 copies"] == 2 * (quantised + dequantised)
        files = 2 * (2 * 36 * layer - quantised)
        assert extra - plain == pytest.approx(2 * (quantised + dequantised) - files)
    _, alone = published("vllm:d2+archon:d1")
    assert alone.device["fp8 copies"] == 2 * quantised and alone.lead_bytes == 0
    assert "fp8 copies" not in published("vllm:d2+archon:d1", dtype="auto")[1].device


@pytest.mark.parametrize("mode", ["auto", "async"])
def test_what_saves_are_staged_in_is_counted_once(mode):
    keys = ("actor.path=Qwen/Qwen3-0.6B", f"saver.mode={mode}")

    def sizes(*more, device=H100):
        """Of the model in numbers; staged in host memory: without exports, and what they add."""
        plans = [
            plan_of(*keys, *more, *x, device=device)
            for x in (("saver.mode=sync",), (), ("saver.freq_steps=9",))
        ]
        assert [plan.is_async for plan in plans] == [False, True, True]
        none, state, both = (plan.host_bytes["backward"] for plan in plans)
        return plans[0].dims.num_params, state - none, both - state

    params, state, export = sizes()
    assert state == pytest.approx(3 * 4 * params) and export == pytest.approx(2 * params)
    _, state, export = sizes("algorithm.name=ppo")  # a critic of the same size
    assert state == pytest.approx(6 * 4 * params, rel=0.01)
    assert export == pytest.approx(4 * params, rel=0.01)
    _, state, _ = sizes("algorithm.kl_coef=0.1")  # the reference is a tag
    assert state == pytest.approx(4 * 4 * params)
    eight = ("cluster.n_gpus_per_node=8", "allocation_mode=embedded:d1|archon:d8")
    _, state, export = sizes(*eight)
    assert state == pytest.approx(3 * 4 * params) and export == pytest.approx(2 * params)


@pytest.mark.parametrize("mode", ["auto", "async"])
def test_a_host_with_room_for_the_run_alone_fits_and_saves_while_training_waits(mode):
    keys = ("actor.path=Qwen/Qwen3-1.7B", "saver.freq_steps=9")

    def planned(free, mode):
        return plan_of(*keys, f"saver.mode={mode}", device=Device("cpu", int(free), ""))

    alone = max(planned(GIB, "sync").host_bytes.values())
    plan = planned(alone + 1, mode)
    assert (plan.fits, plan.is_async) == ((True, False) if mode == "auto" else (False, True))
    copies = (3 * 4 + 4) * plan.dims.num_params
    assert planned(alone + 1.26 * copies, mode).is_async
    assert planned(alone + 1.26 * copies, mode).fits


def test_models_that_are_moved_to_the_host_are_counted_there_once():
    keys = ("actor.path=Qwen/Qwen3-4B", "algorithm.name=ppo", "saver.mode=sync")
    kept, moved = (plan_of(*keys, *x).host_bytes["rollout"] for x in ((), ("offload_train=true",)))
    params = plan_of(*keys).dims.num_params
    # Actor and critic: master weights and two moments, in float32.
    assert moved - kept == pytest.approx(2 * 3 * 4 * params, rel=0.01)


def test_memory_that_caches_files_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(str(GIB))
    (tmp_path / "memory.current").write_text(str(GIB - MIB))
    monkeypatch.setattr(machine, "_meminfo", lambda: (8 * GIB, 4 * GIB))
    assert machine.host_memory() == (GIB, MIB)
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {MIB}\ninactive_file {2 * MIB}\n")
    assert machine.host_memory() == (GIB, 4 * MIB)


def test_files_count_every_export_that_is_kept():
    def files(*more):
        keys = ("actor.path=Qwen/Qwen3-0.6B", "saver.freq_steps=10", *more)
        return plan_of(*keys, num_rows=32 * 35)

    plan = files()
    params = plan.dims.num_params
    assert plan.files.num_exports == 4
    assert plan.files.export_bytes == 2 * params
    assert plan.files.checkpoint_bytes == 3 * 4 * params and plan.files.num_checkpoints == 3
    assert plan.files.needed_bytes == 4 * 2 * params + 3 * 12 * params
    assert files("saver.keep_last=1").files.num_exports == 2  # one is being written
    assert files("saver.keep_last=9").files.num_exports == 4
    best = ("saver.keep_best=1", "valid_dataset.path=/x")
    assert files(*best).files.num_exports == 3


def test_a_disk_without_room_is_a_warning(monkeypatch):
    monkeypatch.setattr("pentad.planner.host.free_disk", lambda folder: (GIB, "/x"))
    plan = plan_of("actor.path=Qwen/Qwen3-0.6B", "actor.mb_spec.n_mbs=64")
    assert plan.fits
    assert any("GiB of checkpoints, 1.0 GiB free at /x" in note for note in plan.notes)


def test_which_device_is_planned_for(monkeypatch):
    config, _ = prepare(None, ["actor.path=Qwen/Qwen3-0.6B"], "plan")
    cluster, _ = prepare(ROOT / "examples" / "archon_qwen3_8b.yaml", [], "plan")
    monkeypatch.setattr("pentad.planner.plan.find_gpus", lambda: ())
    assert choose_device(config).kind == "cpu"
    assert choose_device(config, 24.0).memory_bytes == 24 * GIB
    assumed = choose_device(cluster)
    assert assumed.memory_bytes == 80 * GIB and not assumed.is_here
    gpus = (Gpu("A", 40 * GIB, 40 * GIB, "1", "8.0"), Gpu("B", 24 * GIB, 9, "1", "8.0"))
    monkeypatch.setattr("pentad.planner.plan.find_gpus", lambda: gpus)
    assert choose_device(cluster).memory_bytes == 24 * GIB
    assert choose_device(config).source == "2 x B found"


def test_on_a_cpu_all_processes_share_the_memory():
    cpu = Device("cpu", 16 * GIB, "")
    key = "actor.path=Qwen/Qwen3-0.6B"
    one = plan_of(key, "allocation_mode=archon:d1", device=cpu)
    four = plan_of(key, "allocation_mode=archon:d4", device=cpu)
    assert one.trainers[0].training.compute_bytes == 4
    assert four.host_bytes["optimizer"] > one.host_bytes["optimizer"]
    phase = four.trainers[0].phases[0]["optimizer"]
    assert four.host_bytes["optimizer"] == 4 * (phase.device_bytes + phase.host_bytes)


def test_rows_are_counted_where_the_data_is(tmp_path):
    data = tmp_path / "x.jsonl"
    data.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    config, _ = prepare(None, ["actor.path=Qwen3-8B", f"train_dataset.path={data}"], "plan")
    assert cli.count_rows(config.train_dataset) == (2, [])
    data.unlink()
    assert cli.count_rows(config.train_dataset) == (None, [])
    _, missing = with_data_here(config)
    assert missing == [f"train_dataset.path = {data} is not on this machine"]


def test_an_unknown_critic_is_refused():
    with pytest.raises(UserError, match="critic.path = Qwen/Qwen3-9B: is incomplete in the c"):
        prepare(
            None,
            ["actor.path=Qwen3-8B", "algorithm.name=ppo", "critic.path=Qwen/Qwen3-9B"],
            "plan",
        )


@pytest.mark.parametrize(
    "text",
    [
        "archon:d2t2",
        "archon:d8p4t8",
        "archon:(attn:d8p4t8|ffn:d4p4t8e2)",
        "archon:d512",
        "archon:(attn:d64t4c4|ffn:t2e8)",
    ],
)
def test_rank_tables_stay_on_a_page(text):
    (component,) = parse_allocation(text)
    layout = component.layout()
    rows, left_out = inner_rows(layout, 64, 128)
    assert len(rows) <= MAX_ROWS
    shown = [number for row in rows for number in numbers(row.offsets.removeprefix("+"))]
    assert len(shown) == len(set(shown))
    size = layout.world // layout.pp
    assert shown == list(range(size)) if not left_out else shown[-1] == size - 1


PARTS = st.lists(st.sampled_from("dptce"), min_size=1, max_size=5, unique=True).flatmap(
    lambda letters: st.tuples(*(st.sampled_from([1, 2, 3, 4, 8, 16]) for _ in letters)).map(
        lambda sizes: "".join(f"{a}{b}" for a, b in zip(letters, sizes, strict=True))
    )
)


@settings(max_examples=60, deadline=None)
@given(
    trainer=st.tuples(st.sampled_from(["archon", "fsdp", "archon[actor]"]), PARTS),
    sampler=st.sampled_from(["", "vllm:d2t2+", "embedded:d2|", "embedded:d1+", "sglang:t8p2+"]),
    model=st.sampled_from(["Qwen3-30B-A3B", "Qwen2.5-7B", "Qwen3-0.6B"]),
    schedule=st.sampled_from(["1F1B", "I1F1B", "IZB", "ZBV"]),
    algorithm=st.sampled_from(["grpo", "ppo", "distill"]),
    gpu=st.sampled_from([8, 80, 1000]),
)
def test_any_recipe_is_refused_in_words_or_planned(
    trainer, sampler, model, schedule, algorithm, gpu
):
    words = [
        f"actor.path={model}",
        f"allocation_mode={sampler}{trainer[0]}:{trainer[1]}",
        f"actor.archon.pp_schedule={schedule}",
        f"critic.archon.pp_schedule={schedule}",
        f"algorithm.name={algorithm}",
        "teacher.path=Qwen3-4B",
    ]
    try:
        plan = plan_of(*words, device=Device("cuda", gpu * GIB, "", False))
    except UserError as error:
        assert error.problems
        return
    assert plan.peak_bytes > 0
    remedies = propose(plan)
    assert not (plan.fits and remedies)
    console = Console(file=StringIO(), width=80)
    cli.Page(plan, cli.Looked(), remedies, console).show()
    json.dumps(cli.as_dict(plan, remedies))


def numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_rank_rows_say_what_a_rank_holds():
    layout = Layout(pp=4, tp=2, cp=2, ep=4)
    rows, _ = inner_rows(layout, 32, 128)
    cells = [(row.offsets, row.cp, row.tp, row.heads, row.ep, row.experts) for row in rows]
    assert cells == [
        ("+0", "0", "0", "0-15", "0", "0-31"),
        ("+1", "0", "1", "16-31", "1", "32-63"),
        ("+2", "1", "0", "0-15", "2", "64-95"),
        ("+3", "1", "1", "16-31", "3", "96-127"),
    ]
    rows, _ = inner_rows(Layout(dp_shard=5, ep=5), 32, 8)
    assert [row.experts for row in rows] == ["0-1", "2-3", "4-5", "6", "7"]
    assert span([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize(
    ("given", "answer", "note"),
    [
        (["gconfig.max_new_tokens=300"], 300, None),
        (["gconfig.max_new_tokens=300", "gconfig.max_sampled_tokens=200"], 200, None),
        ([OWN], 32768 - 500, "model's context"),
        (
            [OWN, "gconfig.max_sampled_tokens=2000"],
            2000,
            "environments come in addition",
        ),
        ([OWN, "gconfig.max_sampled_tokens=90000"], 32768 - 500, "in addition"),
    ],
)
def test_the_longest_sample_is_what_all_its_turns_may_have(given, answer, note):
    plan = plan_of("actor.path=Qwen/Qwen3-0.6B", "train_dataset.max_length=500", *given)
    assert plan.batch.answer_tokens == answer
    (sampler,) = plan.samplers
    assert sampler.sampling.sequence_tokens == 500 + answer
    said = [text for text in plan.notes if text.startswith("rollout.workflow = ")]
    assert (note is None and said == []) or note in said[0]


def test_weights_of_parameters_on_the_host_go_through_shared_memory():
    keys = (
        *("actor.path=Qwen/Qwen3-1.7B", "allocation_mode=embedded:d1|archon:d1"),
        *("cluster.n_gpus_per_node=1", "scheduler.processes=separate"),
    )
    assert plan_of(*keys).publish_kind == "ipc"
    assert plan_of(*keys, "actor.archon.offload_params=true").publish_kind == "shm"


def test_the_newest_weights_are_counted_for_servers_that_the_run_starts_again():
    keys = (
        *("actor.path=Qwen/Qwen3-1.7B", "allocation_mode=vllm:d1+archon:d1"),
        *("cluster.n_gpus_per_node=2", "scheduler.processes=separate"),
    )
    attached = plan_of(*keys, "rollout.server.addresses=[http://a:1]").trainers[0].training
    assert plan_of(*keys).trainers[0].training.keeps_newest and not attached.keeps_newest
