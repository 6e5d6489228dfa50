import string
from random import Random

import pytest
from config_values import sections
from hypothesis import HealthCheck, given, settings

from pentad.config.describe import fields, nearest_keys, section_of, takes
from pentad.config.load import dump_config, load_config, read_config
from pentad.config.other_systems import SPELLED
from pentad.config.resolve import resolve
from pentad.config.schema import Config
from pentad.core.errors import UserError
from pentad.core.section import leaves
from pentad.planner.prepare import prepare

LISTED = "rollout.workflows."
"""Keys of blocks in a list, which no override names (tests/invariants/test_mixed_runs.py)."""
KEYS = {key: field for key, field in fields().items() if not key.startswith(LISTED)}
LEAVES = [key for key, field in KEYS.items() if section_of(field.annotation) is None]

DENSE = """\
experiment_name: archon-gsm8k-grpo
trial_name: trial-0

cluster:
  n_nodes: 3
  n_gpus_per_node: 8

allocation_mode: sglang:d4t2+archon:d4p2t2

scheduler:
  type: ray

actor:
  path: Qwen/Qwen3-8B
  gradient_checkpointing: true
  archon:
    pp_schedule: Interleaved1F1B
    enable_compile: true
    ac_mode: selective
"""
MOE = """\
experiment_name: archon-moe-gsm8k-grpo
trial_name: trial-0

cluster:
  n_nodes: 4
  n_gpus_per_node: 8

allocation_mode: "sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)"

scheduler:
  type: ray

actor:
  path: Qwen/Qwen3-30B-A3B
  gradient_checkpointing: true
  archon:
    pp_schedule: Interleaved1F1B
    enable_compile: true
    ac_mode: selective
"""


def problems_of(path, overrides=(), command=None):
    with pytest.raises(UserError) as caught:
        prepare(path, overrides, command) if command else load_config(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "stages"), [(DENSE, 4), (MOE, 8)])
def test_the_published_examples_load_and_resolve(tmp_path, text, stages):
    config, notes = prepare(write(tmp_path, text), command="plan")
    assert config.mode == "hybrid"
    assert config.actor.archon.pp_schedule == "Interleaved1F1B"
    assert config.actor.archon.enable_compile is True
    assert config.actor.mb_spec.n_mbs == stages
    assert any("raised from 1 to the number of pipeline stages" in note for note in notes)


def test_overrides_reach_the_config(tmp_path):
    path = write(tmp_path, DENSE)
    config = load_config(path, ["+actor.archon.enable_compile=False", "gconfig.stop=[a, b]"])
    assert config.actor.archon.enable_compile is False
    assert config.gconfig.stop == ("a", "b")
    assert config.cluster.n_nodes == 3


def misspell(word: str, random: Random) -> str:
    """One slip of the finger: a letter lost, doubled, wrong, or two swapped."""
    at = random.randrange(len(word))
    letter = random.choice(string.ascii_lowercase)
    slips = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + letter + word[at + 1 :],
        word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if at else word + letter,
    ]
    return random.choice(slips)


@pytest.mark.parametrize("key", [key for key in LEAVES if not key.startswith("critic.")])
def test_every_key_misspelt_is_reported_with_the_key_that_was_meant(key):
    random = Random(key)
    block, _, name = key.rpartition(".")
    for _ in range(6):
        wrong = misspell(name, random)
        if not wrong or not wrong[0].isalpha():
            continue
        wrong = f"{block}.{wrong}" if block else wrong
        if wrong in fields() or wrong in SPELLED:
            continue
        overrides = [f"{wrong}=1"]
        if block == "resource":  # all its keys are needed
            overrides += [f"{k}=[1,1]" for k in ("resource.actor", "resource.rollout") if k != key]
        (first,) = problems_of(None, overrides)
        assert f"{wrong} = 1 (command line): there is no such key" in first
        assert key in nearest_keys(wrong), f"{wrong}: {first}"
        assert key in first


@pytest.mark.parametrize("block", [key for key in KEYS if key not in LEAVES and key != "ref"])
def test_every_block_misspelt_is_reported(block):
    random = Random(block)
    outer, _, name = block.rpartition(".")
    for _ in range(4):
        wrong = ".".join(filter(None, [outer, misspell(name, random)]))
        if wrong in fields() or wrong in SPELLED:
            continue
        (problem,) = problems_of(None, [f"{wrong}.x=1"])
        assert "there is no such key" in problem
        assert block in problem


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_refuses_a_value_of_the_wrong_kind_and_says_what_it_takes(key):
    overrides = [f"{key}={{wrong: 1}}"]
    if key.startswith("resource."):
        overrides = ["resource.actor=[1,1]", "resource.rollout=[1,1]", *overrides]
    (problem,) = problems_of(None, overrides)
    assert problem.startswith(f"{key} = {{wrong: 1}} (command line): must be ")
    assert takes(fields()[key]) in problem


@pytest.mark.parametrize("word", ["gropo", "gpro"])
def test_words_near_a_choice_are_recognised(word):
    (problem,) = problems_of(None, [f"algorithm.name={word}"])
    assert "did you mean grpo?" in problem
    assert "reinforce_plus_plus" in problem


def test_mistakes_of_all_kinds_are_reported_in_one_go(tmp_path):
    path = write(
        tmp_path,
        """\
mod: hybrid
seed: true
actor:
  pth: models/x
  pad_to_maximum: foo
  optimizer: {lr: fast, beta1: 1.0}
recover: {mode: yes please}
group_size: 3
gconfig: {temperature: 0, n_samples: 1, stop: x}
resource: {actor: [1, 2]}
updates_per_batch: 7
ref: {path: "${nope}"}
""",
    )
    problems = problems_of(path, ["foo", "a.b=3", "gconfig.top_p=0.9"], "train")
    expected = [
        ('override "foo"', "dotted.key=value", "for example"),
        ("ref.path = ${nope} (recipe.yaml:12)", "not found", "whole path"),
        ("mod = hybrid (recipe.yaml:1)", "no such key", "did you mean mode?"),
        ("seed = true (recipe.yaml:2)", "an integer of at least 0", ""),
        ("actor.pth = models/x (recipe.yaml:4)", "no such key", "did you mean actor.path?"),
        ("actor.pad_to_maximum = foo (recipe.yaml:5)", "auto, true or false", ""),
        ("actor.optimizer.lr = fast (recipe.yaml:6)", "a number of at least 0", ""),
        ("actor.optimizer.beta1 = 1 (recipe.yaml:6)", "below 1", ""),
        ("recover.mode = yes please (recipe.yaml:7)", "on, auto, off or disabled", ""),
        ("group_size = 3 (recipe.yaml:8)", "no such key", "gconfig.n_samples"),
        ("gconfig.stop = x (recipe.yaml:9)", "a list of texts", "write [x]"),
        ("resource.rollout", "is needed wherever resource is given", "a list of 2 integers"),
        ("a = {b: 3}", "no such key", "docs/configuration.md"),
        ("gconfig.temperature = 0", "samples that differ", "use 1.0"),
        ("gconfig.top_p = 0.9", "must be 1 for training", "leave it out"),
        ("gconfig.n_samples = 1", "grpo compares", "use at least 2"),
        ("updates_per_batch = 7", "must divide", "use for instance 4"),
        ("train_dataset.path", "is not set", "JSONL"),
        ("reward.fn", "is not set", "path/to/file.py:function"),
    ]
    for where, rule, remedy in expected:
        assert any(p.startswith(where) and rule in p and remedy in p for p in problems), where
    assert len(problems) == len(expected), problems


def test_one_mistake_is_not_reported_twice(tmp_path):
    """A misspelt actor.path is not also an actor.path that is missing."""
    (problem,) = problems_of(None, ["actor.pth=models/x"], "plan")
    assert "actor.pth" in problem
    (problem,) = problems_of(None, ["actor.path=Qwen/Qwen3-8B", "allocation_mode=[a]"], "plan")
    assert "must be text or null" in problem


def test_a_misspelt_key_beside_a_wrong_one_is_no_excuse_for_it():
    problems = problems_of(None, ["actor.pth=x", "actor.path={a: 1}", "resource.actor=[1]"])
    starts = ["actor.pth = x", "actor.path = {a: 1}", "resource.actor = [1]", "resource.rollout"]
    for start in starts:
        assert sum(problem.startswith(start) for problem in problems) == 1, problems
    assert len(problems) == len(starts)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("algorithm=ppo", "did you mean algorithm.name = ppo?"),
        ("actor=models/m", "did you mean actor.path = models/m?"),
        ("reward=gsm8k", "did you mean reward.fn = gsm8k?"),
        ("actor.lora=16", "did you mean actor.lora.rank = 16?"),
        ("cluster=8", "its keys are n_nodes, n_gpus_per_node, "),
        ("telemetry.wandb=true", "its keys are project, "),
        ("rollout.workflows=x", "write [x]"),
        ("device=cpu", "CUDA_VISIBLE_DEVICES selects them"),
        ("gsm8k/recipe.yaml", "name one recipe, before the overrides"),
        ("gconfig.n_samples", "write it without spaces"),
    ],
)
def test_a_newcomers_slip_is_answered_with_what_was_meant(given, meant):
    (problem,) = problems_of(None, [given])
    assert meant in problem


def test_a_value_in_a_list_is_blamed_on_its_key():
    (problem,) = problems_of(None, ["gconfig.stop_token_ids=[1, a, b]"])
    assert problem.startswith("gconfig.stop_token_ids = [1, a, b]")


def test_text_that_looks_like_something_else_is_explained():
    (problem,) = problems_of(None, ["experiment_name=true"])
    assert 'put quotes around it if it is meant as text: "true"' in problem


def test_numbers_may_be_names():
    assert load_config(None, ["trial_name=0010", "experiment_name=7"]).trial_name == "0010"


def test_a_config_dumped_loads_back_equal_and_unchanged(tmp_path):
    config = load_config(
        None, ["actor.path=x", "gconfig.stop=['on', '1e-6', '\\${a}', '${gconfig.top_k}']"]
    )
    assert config.gconfig.stop == ("on", "1e-6", "${a}", "0")
    path = write(tmp_path, dump_config(config))
    assert load_config(path) == config
    assert dump_config(load_config(path)) == dump_config(config)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(sections())
def test_any_config_survives_dump_resolve_and_load(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    config = Config.model_validate(values)
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config
    resolved, notes = resolve(config)
    path.write_text(dump_config(resolved), encoding="utf-8")
    again, notes_again = resolve(load_config(path))
    assert again == resolved
    assert set(notes_again) <= set(notes)


@pytest.mark.parametrize(
    ("word", "value"), [("on", True), ("off", False), ("yes", True), (0, False)]
)
def test_words_of_yes_and_no_are_booleans_where_a_boolean_is_wanted(word, value):
    assert load_config(None, [f"balance_data={word}"]).balance_data is value
    assert load_config(None, [f"experiment_name={word}"]).experiment_name == str(word)


@pytest.mark.parametrize("key", ["actor.dtype", "actor.param_dtype", "critic.reduce_dtype"])
def test_fp16_is_refused_with_its_reason(key):
    (problem,) = read_config(None, [f"{key}=fp16"]).problems
    assert f"{key} = fp16" in problem.where
    assert problem.rule == "fp16 overflows without loss scaling, which is not supported"
    assert problem.remedy.startswith("use bfloat16; it must be ")


@pytest.mark.parametrize("text", ["1.10", "007", "1_000", "1e3", "-0.50"])
def test_a_number_where_text_is_wanted_is_the_text_that_was_written(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"trial_name: {text}\nexperiment_name: ${{trial_name}}-x\n"
        f"gconfig: {{stop: [{text}, a]}}\nactor: {{path: {text}, optimizer: {{lr: 0.10}}}}\n"
    )
    config = load_config(path)
    assert config.trial_name == config.actor.path == text
    assert config.experiment_name == f"{text}-x"
    assert config.gconfig.stop == (text, "a")
    assert config.actor.optimizer.lr == 0.1
    given = load_config(None, [f"trial_name={text}", f"actor={{path: {text}}}", f"user={text}"])
    assert given.trial_name == given.actor.path == given.user == text


@pytest.mark.parametrize("text", ["#1", "1.10 #a", "a b # c", "*.x", "a: b", "&c", "- d", "on"])
def test_a_bare_override_of_a_text_is_that_text(text):
    assert load_config(None, [f"trial_name={text}"]).trial_name == text


def test_half_a_character_is_refused_and_can_be_printed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text('trial_name: "a\\ud800"\nactor: {path: x}\n')
    (problem,) = read_config(path).problems
    assert str(problem) == (
        "trial_name = a\\ud800 (recipe.yaml:1): has half of a surrogate pair, which no file can "
        "store; write it in UTF-8."
    )
    (problem,) = read_config(None, ["user=b\udcff"]).problems
    assert str(problem).startswith("user = b\\udcff (command line): has half of a surrogate pair")
    (problem,) = read_config(None, ["seed=b\udcff"]).problems
    assert 'override "seed=b\\udcff": the value is not YAML' in str(problem)
    assert "\n" not in str(problem) and str(problem).encode()


@pytest.mark.parametrize("value", ["1e39", "1e308", "-1e39"])
def test_no_key_takes_a_number_beyond_float32(value):
    """torch refuses such a number in the middle of a step, or makes it infinite."""
    plain = {key: set(leaves(field.annotation)) for key, field in fields().items()}
    keys = [key for key, types in plain.items() if float in types and str not in types]
    keys = [key for key in keys if not key.startswith("rollout.workflows.")]  # named blocks
    assert len(keys) > 50
    found = {
        str(problem).partition(" = ")[0]
        for problem in read_config(None, [f"{key}={value}" for key in keys]).problems
        if "must be" in str(problem)
    }
    assert found == set(keys)
    assert read_config(None, ["reward.fn=[math, code]", f"reward.weights=[1, {value}]"]).problems
    (problem,) = read_config(None, ["algorithm.eps_clip=1e308"]).problems
    assert "numbers are at most 3.4e+38, as in float32" in str(problem)


def test_numbers_that_fit_nowhere_are_refused():
    (problem,) = read_config(None, [f"seed={2**63}"]).problems
    assert "must be an integer of at least 0; numbers have at most 63 bits" in str(problem)
    assert load_config(None, [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    (problem,) = read_config(None, ["rollout.kv_cache_gb=1e300"]).problems
    assert "above 0 and at most 1e+06" in str(problem)


def test_of_a_recipe_that_cannot_be_read_nothing_else_is_said(tmp_path):
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "none.yaml", [], "train")
    (problem,) = error.value.problems
    assert "no such file" in str(problem)
    (tmp_path / "number.yaml").write_text(f"seed: {'9' * 5000}\n")
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "number.yaml", [], "train")
    assert str(error.value) == (
        f"recipe = {tmp_path}/number.yaml: cannot be read: exceeds the limit (4300 digits) for "
        "integer string conversion."
    )


def test_relative_paths_start_where_the_command_is_typed(tmp_path, monkeypatch):
    """Not at the recipe: data and reward lie in the folder above it."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text("def score(completion): return 1.0\n")
    recipe = tmp_path / "recipes" / "r.yaml"
    recipe.write_text("train_dataset: {path: data.jsonl}\nreward: {fn: reward.py:score}\n")

    def missing():
        with pytest.raises(UserError) as caught:
            prepare(recipe, [], "train")
        keys = [problem.where.split(" = ")[0] for problem in caught.value.problems]
        return [key for key in keys if key != "actor.path"]

    monkeypatch.chdir(tmp_path)
    assert missing() == []
    monkeypatch.chdir(tmp_path / "recipes")
    assert missing() == ["train_dataset.path", "reward.fn"]


def test_a_number_in_the_place_of_several_is_not_offered_as_a_list_of_one():
    words = ["resource.actor=[1,2]", "resource.rollout=[1,2]", "resource.reference=1"]
    (problem,) = read_config(None, words).problems
    assert str(problem) == (
        "resource.reference = 1 (command line): must be a list of 2 integers of at least 1 or null."
    )
