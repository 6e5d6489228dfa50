"""actor.lora: what it goes with, and what a recipe without a learning rate gets."""

import pytest

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.rules.rule import RunFacts

MODEL = "actor.path=Qwen/Qwen3-0.6B"


def said(*words: str, command: str = "train") -> list[str]:
    read = read_config(None, [MODEL, "train_dataset.path=x.jsonl", *words])
    assert not read.problems
    config, _ = resolve(read.config)
    found = map(str, check(config, RunFacts(command=command)))
    return [text for text in found if "lora" in text]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["actor.lora.targets=[q,zz]"], "qwen3 has no zz; use all-linear, or some of q, k, v, o"),
        (["actor.lora.targets=[router]"], "the sampler would choose experts differently"),
        (["actor.init_from_scratch=true"], "actor.lora would freeze random weights"),
        (["actor.param_dtype=bfloat16"], "float32 under actor.lora"),
        (["actor.archon.offload_params=true"], "no gradients and no optimizer state to offload"),
        (
            ["allocation_mode=embedded:d1|fsdp:d1", "actor.path=Qwen/Qwen3-30B-A3B"],
            "qwen3_moe of transformers holds experts in shared tensors, which get no factors; "
            "name some of q, k, v, o",
        ),
        (
            ["allocation_mode=embedded:d1|fsdp:d1", "actor.lora.targets=[q,c_fc]"],
            "qwen3 of transformers has no c_fc; use all-linear, or some of q, k, v, o, gate",
        ),
        (["actor.archon.pp_schedule=ZBV", "allocation_mode=embedded:d2|archon:d1p2"], "frozen"),
        (["algorithm.name=ppo", "critic.lora.targets=[zz]"], "critic.lora.targets = ['zz']"),
        (
            ["algorithm.name=ppo", "critic.lora.init_path=x"],
            "a critic's factors cannot start from a folder",
        ),
        (
            ["algorithm.name=ppo", "critic.lora.rank=4", "critic.param_dtype=bfloat16"],
            "critic.lora",
        ),
        (["algorithm.kl_coef=0.1", "ref.path=Qwen/Qwen3-1.7B"], "holds the frozen weights of"),
        (["allocation_mode=sglang:d1t2+archon:d1"], "shards, which cannot be verified"),
        (["only=rollout"], "is not supported with actor.lora"),
    ],
)
def test_what_an_adapter_does_not_go_with_is_refused(words, answer):
    found = said("actor.lora.rank=8", *words)
    assert len(found) == 1 and answer in found[0], found


def test_an_sglang_of_one_gpu_takes_adapters():
    assert said("actor.lora.rank=8", "allocation_mode=sglang:d2+archon:d1") == []


@pytest.mark.parametrize("command", ["plan", "train", "sft"])
def test_an_adapter_to_start_from_must_be_there(tmp_path, command):
    start = ["actor.lora.rank=8", f"actor.lora.init_path={tmp_path}/a"]
    (found,) = said(*start, command=command)
    assert found.startswith(f"actor.lora.init_path = {tmp_path}/a: there is no such folder; give")
    (tmp_path / "a").mkdir()
    (found,) = said(*start, command=command)
    assert "no adapter_config.json there; give" in found
    (tmp_path / "a/adapter_config.json").write_text("{}")
    assert said(*start, command=command) == []


def test_plain_recipes_take_it():
    assert said("actor.lora.rank=8") == []
    assert said("actor.lora.rank=8", "algorithm.name=ppo", "critic.lora.rank=4") == []
    assert said("algorithm.name=ppo", "critic.lora.targets=[]") == [], "its head alone"
    assert said("actor.lora.rank=8", command="sft") == []
    assert said("actor.lora.rank=8", "allocation_mode=embedded:d1|fsdp:d2t2") == []


def test_without_a_learning_rate_it_gets_ten_times_the_default_and_says_so():
    read = read_config(None, [MODEL, "actor.lora.rank=8"])
    config, notes = resolve(read.config)
    assert config.actor.optimizer.lr == 1e-5
    assert "actor.optimizer.lr = 1e-05: 10 times the default 1e-06, for actor.lora" in notes
    assert resolve(config)[0] == config
    given = read_config(None, [MODEL, "actor.lora.rank=8", "actor.optimizer.lr=1e-6"]).config
    assert resolve(given)[0].actor.optimizer.lr == 1e-6
