"""Keys and values that people know from elsewhere get an answer that says what to type here."""

import pytest

from pentad.config.describe import fields
from pentad.config.load import read_config
from pentad.config.other_systems import TOO_COMMON, WORDS
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.rules.rule import RunFacts
from pentad.core.errors import UserError
from pentad.models.families import planned_dims


def said(*words):
    return [str(problem) for problem in read_config(None, words).problems]


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("actor.learning_rate=1e-5", "actor.optimizer.lr"),
        ("critic.learning_rate=1e-5", "critic.optimizer.lr"),
        ("trainer.optim.learning_rate=1e-5", "actor.optimizer.lr"),
        ("optimizer.learning_rate=1e-5", "actor.optimizer.lr"),
        ("actor.max_grad_norm=1", "actor.optimizer.gradient_clipping"),
        ("actor.clip_grad=1", "actor.optimizer.gradient_clipping"),
        ("actor.optim.warmup=5", "actor.optimizer.warmup_steps_proportion"),
        ("algorithm.clip_ratio=0.2", "algorithm.eps_clip"),
        ("algorithm.beta=0.1", "algorithm.kl_coef"),
        ("algorithm.epsilon=0.1", "algorithm.eps_clip"),
        ("max_tokens=3", "gconfig.max_new_tokens"),
        ("rollout.num_generations=3", "gconfig.n_samples"),
        ("trainer.epochs=3", "total_train_epochs"),
        ("data.train_batch_size=8", "train_dataset.batch_size"),
        ("telemetry.log_dir=x", "fileroot"),
        ("resource.ref=[1, 1]", "resource.reference"),
    ],
)
def test_a_key_is_known_by_its_last_word_in_any_block(given, here):
    answers = [text for text in said(given) if text.startswith(given.split("=")[0])]
    assert len(answers) == 1 and here in answers[0].split("no such key")[1]


def test_every_last_word_leads_to_a_key():
    words = {word: here for word, here in WORDS.items() if word not in TOO_COMMON}
    assert {word: here for word, here in words.items() if here not in fields()} == {}


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        *((key, "actor.lora.rank") for key in ("use_peft=true", "peft_config.r=8", "lora_r=8")),
        *((key, "actor.lora.rank") for key in ("lora_rank=8", "actor.lora_rank=8")),
        ("actor_rollout_ref.model.lora_rank=8", "actor.lora.rank"),
        ("lora_alpha=16", "actor.lora.alpha"),
        ("actor.peft.lora_alpha=1", "its name here is actor.lora.alpha"),
        ("target_modules=all-linear", "actor.lora.targets"),
        ("actor.lora.lora_dropout=0.1", "trainer and sampler would compute with different factors"),
        ("actor.lora.use_dora=true", "it scales by norms of merged weights"),
        ("actor.lora.use_rslora=true", "set actor.lora.alpha to alpha * sqrt(rank) instead"),
        ("use_qlora=1", "not quantised"),
        ("actor.lora.rnk=8", "did you mean actor.lora.rank?"),
    ],
)
def test_names_of_lora_elsewhere_lead_to_its_block_or_say_why_not(given, answer):
    (text,) = said(given)
    assert answer in text


def test_a_name_that_only_contains_the_letters_is_another_key():
    assert "LoRA" not in said("exploration=1")[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dpo", "learns from recorded preferences"),
        ("KTO", "learns from recorded preferences"),
        ("simpo", "learns from recorded preferences"),
        ("sft", "has its own command, pentad sft"),
    ],
)
def test_a_method_that_is_no_online_algorithm_is_not_taken_for_a_slip(name, why):
    (text,) = said(f"algorithm.name={name}")
    assert why in text and "did you mean" not in text and "grpo, dr_grpo" in text


@pytest.mark.parametrize(
    ("role", "answer"),
    [
        ("actor_fwd", "the actor computes the log-probs of its samples on its own devices"),
        ("advantages", "the trainer computes advantages, on no extra device"),
        ("critic", "the critic is trained on the actor's devices"),
    ],
)
def test_roles_without_devices_of_their_own_say_where_they_run(role, answer):
    resource = f"resource={{actor: [1, 2], rollout: [1, 2], {role}: [1, 1]}}"
    (text,) = said(resource)
    assert text.startswith(f"resource.{role} = [1, 1]") and f"{answer}: leave it out" in text


@pytest.mark.parametrize(
    ("words", "allocation", "mode"),
    [
        (
            ["algorithm.kl_coef=0.1"],
            "embedded[rollout]:d4+archon[actor]:d2+archon[ref]:d1",
            "async",
        ),
        (
            ["algorithm.kl_coef=0.1", "mode=async"],
            "embedded[rollout]:d4+archon[actor]:d2+archon[ref]:d1",
            "async",
        ),
        (
            ["algorithm.kl_coef=0.1", "resource.reference=[2, 1]"],
            "embedded[rollout]:d4+archon[actor]:d2+archon[ref]:d2",
            "async",
        ),
    ],
)
def test_the_reference_gets_the_devices_that_resource_gives_it(words, allocation, mode):
    resource = "resource={actor: [1, 2], rollout: [1, 4], reference: [1, 1]}"
    reading = read_config(None, [resource, *words])
    config, _ = resolve(reading.config)
    assert not reading.problems
    assert (config.allocation_mode, config.mode) == (allocation, mode)


def test_the_reference_of_resource_and_of_the_allocation_must_agree():
    words = [
        "resource={actor: [1, 1], rollout: [1, 1], reference: [1, 2]}",
        "allocation_mode=embedded[rollout]:d1+archon[actor]:d1+archon[ref]:d1",
        "algorithm.kl_coef=0.1",
    ]
    texts = [str(problem) for problem in read_config(None, words).problems]
    assert (
        "resource.reference = [1, 2]: is 2 devices, but archon[ref]:d1 has 1; leave resource out, "
        "or make the two agree." in texts
    )


@pytest.mark.parametrize(
    ("key", "name", "command"),
    [
        ("actor.path", "Qwen3-8B", "give its name on the hub, Qwen/Qwen3-8B."),
        ("actor.path", "./gone", "give a model's folder, or its name on the hub, OWNER/NAME"),
        ("actor.path", "there/gone", "give a model's folder, or its name on the hub, OWNER/NAME"),
        ("train_dataset.path", "gone.jsonl", "check the path, or give a name of the hub, OWNER"),
    ],
)
def test_a_path_that_is_not_there_gets_a_name_to_give(tmp_path, monkeypatch, key, name, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    config, _ = resolve(read_config(None, [f"{key}={name}"]).config)
    (text,) = [
        text for text in map(str, check(config, RunFacts(command="train"))) if text.startswith(key)
    ]
    assert f"; {command}" in text


def test_a_config_that_is_not_supported_is_named_and_not_printed_whole():
    hf = {"model_type": "llama4", "text_config": {f"key{i}": list(range(50)) for i in range(40)}}
    with pytest.raises(UserError, match="text_config = {40 keys}: it describes a model with seve"):
        planned_dims(hf)
