"""A checkpoint of any layout continues under any other: same numbers, same next step."""

import errno
from dataclasses import dataclass, field
from typing import Any

import checkpoint_cases
import pytest
import torch
from tables import table

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
CASE_S = 300.0
ZERO_BUBBLE = {"pp_schedule": "ZBVZeroBubble", "reshard_after_forward_policy": "never"}


@dataclass(frozen=True)
class Kind:
    """A way to lay a model out."""

    layout: Layout
    settings: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "alone": Kind(Layout()),
    "offload": Kind(Layout(), {"offload_params": True}),
    "fsdp": Kind(Layout(), {"backend": "fsdp"}),
    "dp2": Kind(Layout(dp_shard=2)),
    "hsdp2": Kind(Layout(dp_replicate=2)),
    "tp2": Kind(Layout(tp=2)),
    "cp2": Kind(Layout(cp=2), {"reshard_after_forward_policy": "never"}),
    "1f1b": Kind(Layout(pp=2), {"pp_schedule": "1F1B"}),
    "interleaved": Kind(Layout(pp=2)),
    "zbv": Kind(Layout(pp=2), ZERO_BUBBLE),
    "fsdp dp2": Kind(Layout(dp_shard=2), {"backend": "fsdp"}),
    "fsdp tp2": Kind(Layout(tp=2), {"backend": "fsdp"}),
    "fsdp tp2 ep2": Kind(Layout(tp=2, ep=2), {"backend": "fsdp"}),
    "fsdp ep4": Kind(Layout(dp_shard=4, ep=4), {"backend": "fsdp"}),
    "ep2": Kind(Layout(dp_shard=2, ep=2)),
    "etp2": Kind(Layout(tp=2, etp=2)),
    "ep3": Kind(Layout(dp_shard=3, ep=3)),
    "ep4": Kind(Layout(dp_shard=4, ep=4)),  # 2, 2, 1 and 1 experts of six
    "ep5": Kind(Layout(dp_shard=5, ep=5)),  # 2, and 1 on each other
    "dp4 tp2 ep4": Kind(Layout(dp_shard=4, tp=2, ep=4)),
    "dp3": Kind(Layout(dp_shard=3)),
    "tp4": Kind(Layout(tp=4)),  # each key-value head on two ranks
    "hsdp2 dp2": Kind(Layout(dp_replicate=2, dp_shard=2)),
    "dp2 tp2": Kind(Layout(dp_shard=2, tp=2)),
    "pp2 tp2 ep2": Kind(Layout(pp=2, tp=2, ep=2), {"pp_schedule": "1F1B"}),
    "ep2 etp2": Kind(Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    "dp4 ep2": Kind(Layout(dp_shard=4, ep=2)),
}
SAVES = [
    *[("tied5", k) for k in ("alone", "dp2", "tp2", "interleaved", "zbv", "fsdp dp2")],
    *[("tied5", k) for k in ("dp3", "hsdp2 dp2", "tp4")],
    *[("moe6", k) for k in ("alone", "ep3", "pp2 tp2 ep2", "ep2 etp2", "fsdp", "ep5", "fsdp ep4")],
    ("glm5", "1f1b"),
]
PAIRS = [
    ("tied5", "alone", "offload"),
    ("tied5", "alone", "fsdp tp2"),
    ("tied5", "alone", "tp4"),
    ("tied5", "dp2", "cp2"),
    ("tied5", "dp2", "zbv"),
    ("tied5", "tp2", "1f1b"),
    ("tied5", "tp2", "fsdp"),
    ("tied5", "interleaved", "interleaved"),
    ("tied5", "interleaved", "fsdp dp2"),
    ("tied5", "zbv", "alone"),
    ("tied5", "zbv", "hsdp2"),
    ("tied5", "fsdp dp2", "dp2 tp2"),
    ("tied5", "dp3", "dp2"),
    ("tied5", "hsdp2 dp2", "tp2"),
    ("tied5", "hsdp2 dp2", "hsdp2 dp2"),
    ("tied5", "tp4", "dp3"),
    ("moe6", "alone", "ep3"),
    ("moe6", "alone", "dp4 ep2"),
    ("moe6", "ep3", "etp2"),
    ("moe6", "ep3", "fsdp dp2"),
    ("moe6", "pp2 tp2 ep2", "ep2"),
    ("moe6", "pp2 tp2 ep2", "pp2 tp2 ep2"),
    ("moe6", "ep2 etp2", "alone"),
    ("moe6", "fsdp", "ep2 etp2"),
    ("moe6", "alone", "ep5"),
    ("moe6", "ep5", "alone"),
    ("moe6", "ep5", "ep2"),
    ("moe6", "ep5", "ep4"),
    ("moe6", "ep2 etp2", "ep5"),
    ("moe6", "ep5", "dp4 tp2 ep4"),
    ("moe6", "fsdp ep4", "fsdp tp2 ep2"),
    ("moe6", "fsdp ep4", "ep3"),
    ("moe6", "ep3", "fsdp ep4"),
    ("glm5", "1f1b", "ep2"),
]


PAIRS_REST = [
    ("moe6", "fsdp ep4", "ep3"),
    ("moe6", "ep3", "fsdp ep4"),
    ("moe6", "ep2 etp2", "ep5"),
    ("moe6", "ep5", "dp4 tp2 ep4"),
    ("tied5", "hsdp2 dp2", "hsdp2 dp2"),
    ("moe6", "alone", "dp4 ep2"),
    ("moe6", "ep3", "fsdp dp2"),
    ("moe6", "alone", "ep5"),
    ("moe6", "ep5", "ep2"),
    ("moe6", "ep5", "alone"),
    ("moe6", "pp2 tp2 ep2", "pp2 tp2 ep2"),
    ("tied5", "alone", "tp4"),
    ("tied5", "zbv", "alone"),
    ("tied5", "dp3", "dp2"),
]
"""Every axis and backend of `make test` is saved and loaded without them, and one layout under
itself."""
SAVES_REST = [
    save for save in SAVES if save not in [pair[:2] for pair in PAIRS if pair not in PAIRS_REST]
]


def run(pool, function: str, kind: str, **kwargs):
    layout, settings = KINDS[kind].layout, KINDS[kind].settings
    if layout.world == 1:
        return vars(checkpoint_cases)[function](layout=layout, **settings, **kwargs)
    args = {"layout": layout, **settings, **kwargs}
    return pool.run(layout.world, "checkpoint_cases", function, CASE_S, **args)


@pytest.fixture(scope="module")
def saves(pool, tmp_path_factory):
    """Saves a model under a kind of layout, once."""
    root = tmp_path_factory.mktemp("checkpoints")
    done: dict[tuple[str, str], dict[str, Any]] = {}

    def save(model: str, kind: str) -> dict[str, Any]:
        if (model, kind) not in done:
            n = SAVES.index((model, kind))
            given = {"model": model, "root": f"{root}/{n}", "is_async": n % 3 == 1}
            done[model, kind] = run(pool, "save", kind, **given) | {"root": given["root"]}
        return done[model, kind]

    return save


@pytest.mark.parametrize(
    ("model", "kind"),
    table(sorted(SAVES, key=lambda save: KINDS[save[1]].layout.world), SAVES_REST),
)
def test_training_goes_on_after_a_save(saves, model, kind):
    save = saves(model, kind)
    after = save["after"]["model."]
    assert any(not torch.equal(after[n], tensor) for n, tensor in save["then"]["model."].items())


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    table(sorted(PAIRS, key=lambda pair: KINDS[pair[2]].layout.world), PAIRS_REST),
)
def test_a_run_continues_under_another_layout(pool, saves, model, saved, loaded):
    save = saves(model, saved)
    is_other = any("backend" in KINDS[kind].settings for kind in (saved, loaded))
    given = {"root": save["root"], "routes": None if is_other else save["routes"]}
    seen = run(pool, "load", loaded, model=model, **given)
    then, now = save["then"], seen["now"]
    assert then["num_steps"] == now["num_steps"] == 2 and then["steps"] == now["steps"] == {2.0}
    for part in checkpoint_cases.PARTS:
        assert then[part].keys() == now[part].keys()
        assert ("lm_head.weight" in then[part]) == (model != "tied5"), "a tied head is no tensor"
        for name, tensor in then[part].items():
            assert torch.equal(now[part][name], tensor), f"{part} {name}"
    assert any(not torch.equal(then["model."][n], x) for n, x in then["tags.ref."].items())
    biases = [name for name in then["model."] if name.endswith("e_score_correction_bias")]
    assert len(biases) == (4 if model == "glm5" else 0)
    assert all(then["model."][name].abs().max() > 0 for name in biases), "they had moved"
    if model == "tied5" or not is_other:  # without the same routes a rounding may choose others
        for name, tensor in save["after"]["model."].items():
            step = seen["after"]["model."][name]
            if saved == loaded:
                assert torch.equal(step, tensor), name
            else:  # sums of fp32 in another order
                torch.testing.assert_close(step, tensor, rtol=1e-4, atol=1e-5)


def test_a_critic_is_restored_in_another_layout(pool, tmp_path):
    given = {"model": "tied5", "root": str(tmp_path), "loss": "value"}
    then = run(pool, "save", "1f1b", **given)
    now = run(pool, "load", "dp2", routes=None, **given)["now"]
    assert "score.weight" in then["then"]["model."]
    for part in checkpoint_cases.PARTS:
        for name, tensor in then["then"][part].items():
            assert torch.equal(now[part][name], tensor), f"{part} {name}"


def test_every_rank_learns_what_another_failed_with_at_once(pool, tmp_path):
    (tmp_path / "file").touch()
    where = "save_where_one_rank_has_no_disk"
    given = pool.run(2, "checkpoint_cases", where, 60.0, root=str(tmp_path))
    first, second = given["outcomes"]
    assert [one["error"] is None for one in first] == [True, False]
    assert "File exists" in first[1]["error"] and first[1]["system"][0] == errno.EEXIST
    assert [sorted(one["files"]) for one in second][1] == [
        "default/recover_checkpoint/globalstep1/__1_0.distcp"
    ]
