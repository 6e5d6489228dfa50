"""The blocks of moe-engine's configs: read where the meaning is the same, answered where not."""

import pytest

from pentad.config.load import read_config
from pentad.core.errors import UserError
from pentad.planner.prepare import prepare


def said(*words):
    return [str(problem) for problem in read_config(None, words).problems]


def test_model_and_training_set_the_keys_here():
    reading = read_config(
        None,
        [
            "training.lr=3e-4",
            "training.global_batch_size=64",
            "training.seq_len=512",
            "training.total_steps=10",
            "model.path=models/m",
        ],
    )
    config = reading.config
    assert not reading.problems
    assert (config.actor.optimizer.lr, config.train_dataset.batch_size) == (3e-4, 64)
    assert (config.train_dataset.max_length, config.total_train_steps) == (512, 10)
    assert config.actor.path == "models/m"
    assert "training.seq_len = 512: read as train_dataset.max_length" in reading.notes


def test_a_value_that_is_given_twice_or_is_wrong_is_named():
    (text,) = said("training.lr=3e-4", "actor.optimizer.lr=1e-3")
    assert text == (
        "training.lr = 0.0003 (command line): sets actor.optimizer.lr, which is 0.001; keep one "
        "of the two."
    )
    (text,) = said("training.lr=1e-4", "training.learning_rate=2e-4")
    assert "training.learning_rate = 0.0002" in text and "which is 0.0001" in text
    (text,) = said("training.global_batch_size=none")
    assert text.startswith("train_dataset.batch_size = none (command line): must be an integer")


@pytest.mark.parametrize("word", ["actor.optimizer.lr=1e-3", "actor.optimizer={lr: 1e-3}"])
def test_an_override_wins_over_the_block_of_a_recipe(tmp_path, word):
    recipe = tmp_path / "a.yaml"
    recipe.write_text("training:\n  lr: 3.0e-4\n  total_steps: 200\n")
    reading = read_config(recipe, [word])
    assert not reading.problems
    assert (reading.config.actor.optimizer.lr, reading.config.total_train_steps) == (1e-3, 200)
    (note,) = [note for note in reading.notes if "not read" in note]
    assert note.startswith("training.lr = 0.0003 (") and note.endswith(
        "a.yaml:2): not read, actor.optimizer.lr is 0.001 on the command line"
    )
    recipe.write_text("training: {lr: 3.0e-4}\nactor: {optimizer: {lr: 1.0e-3}}\n")
    (problem,) = read_config(recipe, ["actor.optimizer.beta1=0.8"]).problems
    assert "keep one of the two" in str(problem)


def test_what_means_something_else_is_answered():
    (text,) = said("model.num_experts=64")
    assert "its name here is actor.path (defined by the config.json of that folder)" in text
    (text,) = said("training.warmup_steps=100")
    assert "actor.optimizer.warmup_steps_proportion (a share of all steps)" in text
    (text,) = said("elastic.min_nodes=2")
    assert "its name here is elastic.min_ranks (counts ranks; torchrun has --nnodes" in text
    (text,) = said("elastic.drop_grace=30")
    assert "its name here is elastic.drop_grace_s" in text


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (dict(data_parallel=2), "archon:d2p1t1"),
        (dict(data_parallel=1, expert_parallel=2), "archon:(attn:d2p1t1|ffn:d1p1t1e2)"),
        (
            dict(tensor_parallel=8, pipeline_parallel=4, data_parallel=4, expert_parallel=2),
            "archon:(attn:d8p4t8|ffn:d4p4t8e2)",
        ),
    ],
)
def test_parallelism_is_a_layout(sizes, layout):
    words = [f"parallelism.{name}={size}" for name, size in sizes.items()]
    reading = read_config(None, words)
    assert reading.config.allocation_mode == layout
    assert f"allocation_mode = {layout}: from parallelism" in reading.notes


def test_parallelism_and_allocation_must_agree():
    with pytest.raises(UserError) as caught:
        prepare(None, ["parallelism.data_parallel=4", "allocation_mode=archon:d2"], "plan")
    text = str(caught.value)
    assert "is archon:d4p1t1 (4 devices), but allocation_mode has archon:d2; leave" in text
