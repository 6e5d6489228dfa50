"""docs/migrating*.md agree with the schema: what it calls the same or renamed is."""

import re
from pathlib import Path

import pytest
import yaml

from pentad.cli.recipe import MODES
from pentad.config.describe import fields
from pentad.config.load import read_config
from pentad.config.other_systems import (
    NO_CHOICE,
    REMARKED,
    RLINF,
    SPELLED,
    TRL,
    VERL,
)
from pentad.core.errors import UserError
from pentad.core.layout import parse_allocation
from pentad.models.families import known_families

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join(page.read_text() for page in sorted(DOCS.glob("migrating*.md")))
ROWS = re.findall(r"^\| `([^`]+)` \| (same|-|`[^`]+`) \| (.*?)\|$", PAGE, re.MULTILINE)
KEYS = {there: here.strip("`") for there, here, _ in ROWS if not there.startswith("--")}


def test_the_same_keys_exist():
    assert [key for key, here in KEYS.items() if here == "same" and key not in fields()] == []


def test_other_keys_do_not_exist_under_their_old_name():
    assert [key for key, here in KEYS.items() if here != "same" and key in fields()] == []


def test_every_known_spelling_is_on_the_page_as_the_program_says_it():
    renamed = {key: here for key, here in KEYS.items() if here not in ("same", "-")}
    assert renamed == SPELLED


def test_remarks_are_those_of_the_program():
    said = {
        there: remark.strip().replace("\\|", "|") for there, _, remark in ROWS if there in REMARKED
    }
    assert said == {key: remark for key, (_, remark) in REMARKED.items()}


@pytest.mark.parametrize("system", [TRL, VERL, RLINF], ids=["trl", "verl", "rlinf"])
def test_a_recipe_of_another_system_is_answered_key_by_key(tmp_path, system):
    """Nested blocks, as a file of theirs has them, and all at once."""
    values = {}
    for key in system:
        *outer, last = key.split(".")
        block = values
        for name in outer:
            block = block.setdefault(name, {})
        block[last] = 1
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    problems = read_config(tmp_path / "theirs.yaml").problems
    answered = {problem.where.split(" = ")[0]: problem.remedy for problem in problems}
    assert {key: here for key, (here, _) in system.items()} == {
        key: remedy.removeprefix("its name here is ").split(" (")[0]
        for key, remedy in answered.items()
    }
    for key, (here, _) in system.items():
        assert here in fields(), f"{key} leads to {here}, which is no key"


def test_keys_of_a_foreign_block_that_nobody_knows_are_named_too():
    words = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.wings=2"]
    said = [str(problem) for problem in read_config(None, words).problems]
    assert said == [
        "actor_rollout_ref.rollout.n = 4 (command line): there is no such key; its name here is "
        "gconfig.n_samples.",
        "actor_rollout_ref.rollout.wings = 2 (command line): there is no such key; "
        "docs/configuration.md has all keys.",
    ]


def test_a_dash_is_a_key_with_nothing_to_choose():
    for key in [key for key, here in KEYS.items() if here == "-"]:
        needed = ["resource={actor: [1, 1], rollout: [1, 1]}"] if "resource" in key else []
        (problem,) = read_config(None, [*needed, f"{key}=1"]).problems
        known = NO_CHOICE.get(key)
        assert (f"{known}: leave it out" if known else "the keys of") in str(problem)


def test_switches_are_those_of_the_command_line():
    page = {there: here.strip("`") for there, here, _ in ROWS if there.startswith("--")}
    switches = {f"--{name.replace('_', '-')}": f"mode: {mode}" for name, mode in MODES.items()}
    assert page == switches


def test_allocations_parse():
    found = set(re.findall(r"`((?:\w+:)?\w+:[^` ]*\d[^` ]*)`", PAGE))
    assert len(found) == 10
    for text in found - {"archon:d1p2e2"}:
        assert str(parse_allocation(text)) == text
    with pytest.raises(UserError, match="or use archon:d2p2e2"):
        parse_allocation("archon:d1p2e2")


def test_the_families_are_those_that_exist():
    said = re.search(r"for the families ([\w, ]+?)\. ", PAGE)
    assert said and sorted(re.split(r", | and ", said[1])) == known_families()


def test_keys_in_the_text_exist():
    """Dotted names in running text and in tables of two columns."""
    text = re.sub(r"^\| `[^`]+` \| (same|-|`[^`]+`) \| .*$", "", PAGE, flags=re.MULTILINE)
    dotted = re.findall(r"`((?:actor|train_dataset|gconfig|algorithm)\.[\w.]+)`", text)
    assert len(dotted) >= 8
    assert [key for key in dotted if key not in fields()] == []


RLINF_RECIPE = """
runner: {output_dir: results, experiment_name: grpo, seq_length: 4096}
rollout: {model_dir: Qwen/Qwen3-0.6B, group_name: RolloutGroup}
actor:
  group_name: ActorGroup
  training_backend: megatron
  mcore_gpt: True
  spec_name: decoder_gpt
  checkpoint_load_path: null
  model:
    precision: fp16
    add_bias_linear: False
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    activation: swiglu
    sequence_parallel: True
    recompute_method: block
    recompute_granularity: full
    recompute_num_layers: 20
    seq_length: ${runner.seq_length}
    encoder_seq_length: ${runner.seq_length}
    normalization: rmsnorm
    position_embedding_type: rope
    apply_rope_fusion: True
    bias_dropout_fusion: False
    persist_layer_norm: False
    bias_activation_fusion: False
    attention_softmax_in_fp32: True
    batch_p2p_comm: False
    variable_seq_lengths: True
    gradient_accumulation_fusion: False
    moe_token_dispatcher_type: alltoall
    use_cpu_initialization: False
megatron:
  ddp_bucket_size: null
  distributed_backend: nccl
  distributed_timeout_minutes: 30
  ckpt_format: torch
  use_dist_ckpt: False
  tp_comm_bootstrap_backend: nccl
  tp_comm_overlap_cfg: null
  use_hf_ckpt: True
  ckpt_convertor:
    model: DeepSeek-R1-Distill-Qwen-1.5B
    model_type: null
    hf_model_path: ${rollout.model_dir}
    save_path: ${runner.output_dir}/${runner.experiment_name}/converted_ckpts/actor
    use_gpu_num: 0
    use_gpu_index: null
    process_num: 16
    tensor_model_parallel_size: ${actor.model.tensor_model_parallel_size}
    pipeline_model_parallel_size: ${actor.model.pipeline_model_parallel_size}
"""


def test_every_key_of_an_rlinf_recipe_is_read_or_answered(tmp_path):
    """With its interpolations; nothing is answered by a mere list of our keys."""
    (tmp_path / "theirs.yaml").write_text(RLINF_RECIPE)
    reading = read_config(tmp_path / "theirs.yaml")
    config, convertor = reading.config, reading.config.megatron.ckpt_convertor
    assert (config.actor.path, config.fileroot) == ("Qwen/Qwen3-0.6B", "results")
    assert config.experiment_name == "grpo" and config.megatron.use_hf_ckpt
    assert convertor.hf_model_path == "Qwen/Qwen3-0.6B"
    assert convertor.save_path == "results/grpo/converted_ckpts/actor"
    assert (convertor.tensor_model_parallel_size, convertor.process_num) == (2, 16)
    answers = {str(problem.where).split(" = ")[0]: problem.remedy for problem in reading.problems}
    assert not [key for key, remedy in answers.items() if "the keys of" in str(remedy)]
    written = set(leaves(yaml.safe_load(RLINF_RECIPE)))
    read = {
        *("runner.output_dir", "runner.experiment_name", "rollout.model_dir"),
        *("actor.checkpoint_load_path", "megatron.use_hf_ckpt", "actor.training_backend"),
    }
    convertors = {key for key in written if key.startswith("megatron.ckpt_convertor.")}
    assert written == set(answers) | read | convertors


def leaves(values, at=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}"
