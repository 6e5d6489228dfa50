"""Training rows of a group as a tree: what they begin with is computed once, and nothing else
changes."""

from dataclasses import replace

import pytest
import torch
from engine_toys import VOCAB, PolicyLoss, SequenceLoss, ValueLoss, group_rows, make_engine

from pentad.engine import engine as engine_module
from pentad.engine.packing import RowBundle, cut_bundles, find_bundles, plan_microbatches
from pentad.parallel.blocks import KEPT_OPS

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def trained(rows, loss, **settings):
    """What one step gives: outputs and result, and its whole gradient."""
    wide = {"dtype": "float64", "param_dtype": "float64", "reduce_dtype": "float64"}
    engine = make_engine(value_head=isinstance(loss, ValueLoss), **wide, **settings)
    engine.begin_step()
    accumulated = engine.accumulate(rows, loss)
    gradient = {name: x.clone() for name, x in engine.step.whole.shards.items()}
    return gradient, accumulated, engine.end_step()


@pytest.mark.parametrize("loss", [PolicyLoss(0.1), SequenceLoss(), ValueLoss()])
@pytest.mark.parametrize(
    "settings", [{}, {"max_tokens_per_mb": 170}, {"n_mbs": 3}, {"config": MOE}]
)
def test_a_tree_trains_what_whole_rows_train(loss, settings, monkeypatch):
    rows = group_rows()
    sizes = count_tokens(monkeypatch)
    gradient, accumulated, result = trained(rows, loss, **settings)
    in_trees = sum(sizes)
    sizes.clear()
    true_gradient, wanted, wanted_result = trained(
        rows, loss, enable_tree_training=False, **settings
    )
    assert in_trees < 0.75 * sum(sizes), "prompts were computed once for several rows"
    assert result.loss == pytest.approx(wanted_result.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(wanted_result.grad_norm, rel=1e-6)
    assert result.num_tokens == wanted_result.num_tokens == sum(len(row.ids) for row in rows)
    for mine, true in zip(accumulated.outputs, wanted.outputs, strict=True):
        assert mine.keys() == true.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], true[name], rtol=1e-5, atol=1e-6)
    # Log-probs are fp32, whatever the model computes in.
    largest = max(float(x.abs().max()) for x in true_gradient.values())
    for name, wanted_grad in true_gradient.items():
        difference = float((gradient[name] - wanted_grad).abs().max())
        assert difference < 1e-6 * largest, f"{name}: {difference} of {largest}"


def count_tokens(monkeypatch) -> list[int]:
    """Of each microbatch the tokens that the model computes."""
    sizes: list[int] = []
    pack = engine_module.pack_rows

    def counting(*args, **kwargs):
        packed = pack(*args, **kwargs)
        sizes.append(len(packed.ids_U))
        return packed

    monkeypatch.setattr(engine_module, "pack_rows", counting)
    return sizes


def test_scoring_is_that_of_whole_rows(monkeypatch):
    rows = group_rows()
    sizes = count_tokens(monkeypatch)
    engine = make_engine(dtype="float64", param_dtype="float64")
    shared = engine.forward(rows)
    alone = engine.forward([replace(row, group=None) for row in rows])
    assert sizes[0] < 0.75 * sizes[1] == 0.75 * sum(len(row.ids) for row in rows)
    for mine, true in zip(shared, alone, strict=True):
        torch.testing.assert_close(mine["logprobs"], true["logprobs"], rtol=1e-10, atol=1e-11)


def test_padded_microbatches(monkeypatch):
    rows = group_rows()
    sizes = count_tokens(monkeypatch)
    settings = {"pad_to_maximum": True, "max_tokens_per_mb": 256}
    _, _, result = trained(rows, PolicyLoss(), **settings)
    assert set(sizes) == {256}
    _, _, wanted = trained(rows, PolicyLoss(), enable_tree_training=False)
    assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"strict": True}, {"enable_tree_training": False}],
)
def test_where_every_row_is_computed_whole(settings):
    assert not make_engine(**settings).makes_trees


def test_rows_that_share_little_are_left_alone():
    rows = group_rows(prompt=40)
    assert all(bundle.shared == 0 for bundle in find_bundles(rows))


def test_a_prefix_is_what_the_ids_have_in_common_and_not_what_the_group_says():
    rows = group_rows((4,))
    other = replace(rows[1], ids=rows[1].ids.clone())
    other.ids[70] = (other.ids[70] + 1) % VOCAB
    (bundle,) = find_bundles([rows[0], other, *rows[2:]])
    assert bundle.shared == 69  # the last common token stays with the rows


def test_equal_rows_keep_a_token_each():
    row = group_rows((1,))[0]
    (bundle,) = find_bundles([row, row, row])
    assert bundle.shared == len(row.ids) - 1
    engine = make_engine()
    first, second, third = engine.forward([row, row, row])
    torch.testing.assert_close(first["logprobs"], third["logprobs"])


def test_bundles_are_cut_where_they_do_not_fit():
    lengths = [10] * 6
    bundle = RowBundle(tuple(range(6)), 8)
    assert bundle.num_tokens(lengths) == 20
    pieces = cut_bundles([bundle], lengths, 14, 1)
    assert [piece.rows for piece in pieces] == [(0, 1, 2), (3, 4, 5)]
    (plan,) = plan_microbatches(lengths, float, max_tokens=14, bundles=[bundle])
    assert sorted(map(tuple, plan)) == [(0, 1, 2), (3, 4, 5)]
    ranks = plan_microbatches(lengths, float, num_ranks=2, bundles=[bundle])
    assert [len(mbs[0]) for mbs in ranks] == [3, 3], "each rank gets a share of the rows"


def test_results_of_attention_are_kept_where_blocks_are_recomputed():
    assert {"pentad.flash4.default", "pentad.tree_flash4.default"} <= KEPT_OPS
