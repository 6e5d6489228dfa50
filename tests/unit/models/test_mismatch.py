"""`benchmarks/mismatch.py`: its forward is the decoder's, and its parts explain the whole."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pentad.models.decoder import causal_attend

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from mismatch import ALL, KINDS, SMOLLM2, Rounding, build_case, dissect, logits_of, measure_real  # noqa: E402

TINY = replace(
    SMOLLM2,
    vocab_size=256,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    initializer_range=0.05,
)


@pytest.fixture(scope="module")
def case():
    return build_case(TINY, rows=4, length=48, entropy=2.0, device=torch.device("cpu"))


def plain_logits(model, ids_BL):
    positions = torch.arange(ids_BL.shape[1])
    rows = [model.logits(model(ids_L, positions, causal_attend)).float() for ids_L in ids_BL]
    return torch.cat(rows).detach()


def test_without_rounding_it_is_the_decoder_and_the_order_of_sums_is_nothing(case):
    wanted = plain_logits(case.model, case.ids_BL)
    assert case.entropy == pytest.approx(2.0, abs=0.1)
    for halves in (False, True):
        found = logits_of(case.model, case.ids_BL, Rounding(halves=halves))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_with_all_rounded_it_errs_as_much_as_the_decoder_in_bf16(case):
    truth = logits_of(case.model, case.ids_BL, Rounding())
    kinds = ALL | {"scores", "logits"}
    emulated = (logits_of(case.model, case.ids_BL, Rounding(kinds)) - truth).std()
    narrow = build_case(TINY, rows=4, length=48, entropy=2.0, device=torch.device("cpu")).model
    real = (plain_logits(narrow.bfloat16(), case.ids_BL) - truth).std()
    assert emulated == pytest.approx(float(real), rel=0.25)


def test_the_parts_explain_the_whole_and_a_pair_differs_by_no_more_than_two_roundings(case):
    found = dissect(case)
    assert 0.5 < sum(found[kind]["share"] for kind in KINDS) < 2
    assert all(found[kind]["mean"] > 0 for kind in KINDS)
    assert found["none, sums in halves"]["mean"] < 1e-5
    assert 1e-4 < found["all"]["pair"] < 2 * found["all"]["mean"]
    finer = found["all, to float16 instead of bf16"]  # three bits more
    assert 4 < found["all"]["mean"] / finer["mean"] < 16


@pytest.mark.parametrize("is_wide", [False, True])
def test_sampler_and_trainer_in_bf16_agree_to_rounding_also_with_a_float32_residual_stream(
    case, is_wide
):
    assert 0 <= measure_real(case, is_wide=is_wide, new=8)["mean"] < 0.1
