"""`pentad pretrain` beside transformers: a mixture's losses and routes are equal, step by step."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_lab import steps_of

from pentad.data.toy import write_byte_model
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.trainer.sources.examples import run_pretrain

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pretrain_peer import Peer  # noqa: E402

STEPS = 5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Weights that both start from, and tokens that repeat themselves."""
    folder = tmp_path_factory.mktemp("inputs")
    write_byte_model(folder / "plain", num_experts=4)
    model = create_model(dims_of(folder / "plain"), seed=3)
    save_model(model, folder / "model", source_folder=folder / "plain")
    np.save(folder / "tokens.npy", np.random.default_rng(1).integers(3, 40, 2000).astype(np.uint16))
    return folder


@pytest.fixture
def both(inputs, tmp_path):
    """Losses and loads of the layers by step, ours and those of transformers."""

    def run(trial, *overrides):
        words = [
            *(f"fileroot={tmp_path}", "user=me", f"trial_name={trial}", "balance_data=false"),
            *(f"actor.path={inputs / 'model'}", "actor.mb_spec.max_tokens_per_mb=128"),
            *(f"train_dataset.path={inputs / 'tokens.npy'}", "train_dataset.max_length=64"),
            *("train_dataset.batch_size=4", "train_dataset.mask_documents=false"),
            *("actor.optimizer.lr=3e-3", "actor.optimizer.lr_scheduler_type=cosine"),
            *("actor.optimizer.warmup_steps_proportion=0.4", "actor.optimizer.weight_decay=0.1"),
            *("actor.optimizer.gradient_clipping=0.5", "allocation_mode=archon:d1"),
            *(f"total_train_steps={STEPS}", *overrides),
        ]
        config, notes = prepare(None, words, "pretrain")
        steps = steps_of(run_pretrain(config, notes, device="cpu"))
        peer = Peer(config, torch.device("cpu"))
        return steps, [peer.train(step) for step in range(STEPS)]

    return run


def test_losses_and_routes_are_those_of_transformers_with_and_without_a_balancing_loss(both):
    found = {}
    for coef in (0, 1):
        steps, theirs = both(f"coef{coef}", f"actor.archon.moe_aux_loss_coef={coef}")
        found[coef] = [step["loss"] for step in steps]
        assert found[coef] == pytest.approx([float(loss) for loss, _ in theirs], rel=2e-6)
        for step, (_, loads) in zip(steps, theirs, strict=True):
            assert step["num_microbatches"] == 2
            for layer, load in enumerate(loads.double()):
                ours = step["kernel"]["balance"][str(layer)]
                wanted = load.mean(), load.std(correction=0), load.min(), load.max()
                got = [ours[key] for key in ("mean", "std", "min", "max")]
                assert got == pytest.approx([float(x) for x in wanted])
    first, *rest = zip(found[0], found[1], strict=True)
    assert first[0] == first[1] and all(abs(a - b) > 1e-4 for a, b in rest[1:])
    assert found[0][-1] < found[0][0]
