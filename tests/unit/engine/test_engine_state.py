"""Weights by name: tags, state that a run continues from, folders."""

import random

import numpy
import pytest
import torch
from engine_toys import (
    CONFIG,
    PolicyLoss,
    bring_back,
    keep_state,
    make_engine,
    make_rows,
    train,
    weights_of,
)
from sections import engine_settings

from pentad.checkpoint.exports import export_model
from pentad.core.errors import RunError
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig


def test_tags_are_used_and_left_again():
    engine, rows = make_engine(), make_rows()
    first = engine.forward(rows)
    engine.save_tag("ref")
    train(engine, rows, steps=3)
    trained = weights_of(engine)
    now, then = engine.forward(rows), engine.forward(rows, "ref")
    for a, b, c in zip(first, then, now, strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])
        assert len(a["logprobs"]) < 3 or not torch.equal(a["logprobs"], c["logprobs"])
    with pytest.raises(ZeroDivisionError), engine.use("ref"):
        raise ZeroDivisionError
    with engine.use("ref"):
        with pytest.raises(RunError, match="those of ref are used"), engine.use("ref"):
            pass
        for call in (engine.begin_step, engine.state_tensors, lambda: engine.save_tag("x")):
            with pytest.raises(RunError, match="those of ref are used"):
                call()
    with pytest.raises(RunError, match="no weights were saved as teacher; there are actor, ref"):
        engine.forward(rows, "teacher")
    with pytest.raises(RunError, match="the tag actor names the trained weights"):
        engine.save_tag("actor")
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, trained[name]), name


def test_scoring_a_tag_between_two_accumulates_leaves_the_gradient_alone():
    rows = make_rows()
    engines = [make_engine(), make_engine()]
    for engine, interrupts in zip(engines, (False, True), strict=True):
        engine.save_tag("ref")
        train(engine, rows)
        engine.begin_step()
        engine.accumulate(rows[:5], PolicyLoss(), last=False)
        if interrupts:
            engine.forward(rows, "ref")
        engine.accumulate(rows[5:], PolicyLoss())
        engine.end_step()
    for name, weight in weights_of(engines[0]).items():
        assert torch.equal(weight, weights_of(engines[1])[name])


def test_a_tag_can_hold_other_weights_than_ever_trained(tmp_path):
    engine, rows = make_engine(), make_rows()
    before = weights_of(engine)
    teacher = build_engine(CONFIG, engine_settings(), init_from_scratch=True, seed=77)
    export_model(teacher, str(tmp_path / "teacher"))
    engine.load_tag("teacher", tmp_path / "teacher")
    for mine, theirs in zip(engine.forward(rows, "teacher"), teacher.forward(rows), strict=True):
        assert torch.equal(mine["logprobs"], theirs["logprobs"])
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])


def test_a_run_continues_from_its_state_bitwise():
    rows, loss = make_rows(), PolicyLoss()
    keys = {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.5}
    given = {"optimizer": OptimizerConfig(lr=1e-2, **keys), "total_steps": 6}
    straight = make_engine(**given)
    straight.save_tag("ref")
    train(straight, rows, loss, steps=3)
    state = keep_state(straight)
    expected = train(straight, rows, loss, steps=3)

    resumed = build_engine(CONFIG, engine_settings(**given), init_from_scratch=True, seed=99)
    resumed.save_tag("stale")
    bring_back(resumed, state)
    assert resumed.num_steps == 3 and list(resumed.tags.copies) == ["ref"]
    assert train(resumed, rows, loss, steps=3) == expected
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(resumed)[name])
    for a, b in zip(straight.forward(rows, "ref"), resumed.forward(rows, "ref"), strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])


def test_a_state_of_another_model_is_refused_before_anything_changes():
    engine = make_engine()
    engine.save_tag("ref")
    before = weights_of(engine)
    other = build_engine(
        CONFIG | {"num_hidden_layers": 2}, engine_settings(), init_from_scratch=True
    )
    with pytest.raises(RunError, match="the checkpoint is of another model"):
        engine.begin_restore(other.state_counters())
    assert list(engine.tags.copies) == ["ref"]
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])


def test_a_restore_that_broke_off_leaves_nothing_to_save(tmp_path):
    engine = make_engine()
    counters = engine.state_counters()
    engine.begin_restore(counters)
    engine.end_restore(counters)
    engine.begin_restore(counters)
    engine.restoring = None  # as after a failure
    for call in (engine.state_tensors, lambda: export_model(engine, str(tmp_path / "out"))):
        with pytest.raises(RunError, match="a restore failed half-way"):
            call()


def test_random_states_of_all_kinds_come_back():
    engine = make_engine()

    def draw() -> list[float]:
        numbers = [random.gauss(), numpy.random.randn(), random.random(), numpy.random.rand()]
        return [*numbers, float(torch.rand(()))]

    draw()  # leaves the second of a pair of normal numbers behind
    kept = keep_state(engine)
    first = draw()
    assert draw() != first
    bring_back(engine, kept)
    assert draw() == first


def test_weights_leave_under_their_hf_names_and_load_in_transformers(tmp_path):
    import transformers

    engine, rows = make_engine(), make_rows()
    train(engine, rows)
    export_model(engine, str(tmp_path / "out"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = dict(engine.iter_weights())
    assert names.keys() == {n for n, _ in theirs.named_parameters()}
    ids = rows[0].ids
    with torch.no_grad():
        logp = torch.log_softmax(theirs(ids[None]).logits[0], -1)
    expected = logp[:-1].gather(1, ids[1:, None])[:, 0]
    mine = engine.forward(rows[:1])[0]["logprobs"][1:]
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    half = make_engine(publish_dtype="bfloat16")
    assert {w.dtype for _, w in half.iter_weights()} == {torch.bfloat16}


def test_weights_are_not_handed_out_while_others_are_in_place():
    engine = make_engine()
    engine.save_tag("ref")
    weights = iter(engine.iter_weights())
    next(weights)
    with engine.use("ref"), pytest.raises(RunError, match="handing out weights needs the actor"):
        next(weights)


def test_a_bfloat16_run_goes_on_bit_for_bit_and_rounds_by_its_seed():
    settings = {"param_dtype": "bfloat16", "dtype": "bfloat16", "lr": 1e-5}
    rows = make_rows()
    engine = make_engine(**settings)
    before = weights_of(engine)
    train(engine, rows, steps=2)
    kept = keep_state(engine)
    train(engine, rows, steps=3)
    whole = weights_of(engine)
    other = make_engine(**settings)
    bring_back(other, kept)
    train(other, rows, steps=3)
    for name, weight in weights_of(other).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, whole[name]), name
    # lr is a hundredth of the last place of most weights.
    moved = [(whole[name] != start).float().mean() for name, start in before.items()]
    assert 0.01 < sum(moved) / len(moved) < 0.5
    bring_back(other, kept)
    other.num_steps += 100
    train(other, rows, steps=3)
    assert any(not torch.equal(weight, whole[n]) for n, weight in weights_of(other).items())
