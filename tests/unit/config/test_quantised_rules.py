"""A quantised folder is read where its block says so, and by what can dequantise it."""

import json

import pytest

from pentad.core.errors import UserError
from pentad.models.catalog import known_config
from pentad.planner.figures import Device
from pentad.planner.plan import build_plan
from pentad.planner.prepare import prepare

WORDS = ["train_dataset.path=x.jsonl", "reward.fn=exact_match", "gconfig.max_new_tokens=8"]
SERVER = ["actor.dequantize=true", "allocation_mode=vllm:d1+archon:d1"]


@pytest.fixture
def folders(tmp_path):
    plain = known_config("Qwen/Qwen3-0.6B") or {}
    more = {"quantised": {"quantization_config": {"quant_method": "fp8"}}, "plain": {}}
    for name, keys in more.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(plain | keys))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        ([], "actor.path = {root}/quantised", "set actor.dequantize: true to read them as 16-bit"),
        (
            ["algorithm.name=ppo", "actor.path={root}/plain", "critic.path={root}/quantised"],
            "critic.path = {root}/quantised",
            "set critic.dequantize: true",
        ),
        (
            [
                *("algorithm.kl_coef=0.1", "actor.path={root}/plain"),
                "ref.path={root}/quantised",
            ],
            "ref.path = {root}/quantised",
            "set actor.dequantize: true",
        ),
        (SERVER, f"allocation_mode = {SERVER[1].partition('=')[2]}", "vllm would load the quant"),
    ],
)
def test_quantised_weights_are_refused(folders, words, where, said):
    given = [f"actor.path={folders}/quantised", *(word.format(root=folders) for word in words)]
    with pytest.raises(UserError) as caught:
        prepare(None, [*WORDS, *given], "plan")
    (problem,) = caught.value.problems
    assert problem.where == where.format(root=folders)
    assert said in str(problem)


@pytest.mark.parametrize("more", [["actor.init_from_scratch=true"], ["actor.dequantize=true"]])
def test_a_plan_counts_the_weights_as_they_are_trained(folders, more):
    plans = []
    for name in ("quantised", "plain"):
        words = [*WORDS, f"actor.path={folders}/{name}", *more]
        config, _ = prepare(None, words, "plan")
        plans.append(build_plan(config, Device("cpu", 1 << 34, "a test's")))
    first, second = plans
    assert first.dims == second.dims
    assert first.host_bytes == second.host_bytes
    assert first.files.export_bytes == second.files.export_bytes
