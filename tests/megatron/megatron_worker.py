"""Engines of megatron and of other backends on the same rows, on CPU ranks.

    torchrun megatron_worker.py CASES OUT

CASES is a JSON list; OUT gets a pickle of what each case returned on rank 0.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parents[1]
sys.path += [str(HERE), str(HERE / "unit" / "engine")]

from engine_toys import CONFIG, PolicyLoss, ValueLoss, make_rows  # noqa: E402
from sections import engine_settings  # noqa: E402

from pentad.checkpoint.folders import find_checkpoints, info_folder, state_folder  # noqa: E402
from pentad.checkpoint.job import CommitJob, run_job  # noqa: E402
from pentad.checkpoint.restore import restore_learner  # noqa: E402
from pentad.checkpoint.shards import StateSaver  # noqa: E402
from pentad.checkpoint.writer import Writer  # noqa: E402
from pentad.core.layout import Layout  # noqa: E402
from pentad.engine.engine import build_engine  # noqa: E402
from pentad.engine.section import OptimizerConfig  # noqa: E402
from pentad.parallel.cuts import local  # noqa: E402

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, gradient_clipping=1.0)


def config_of(case):
    return {**CONFIG, "num_hidden_layers": 4, **case["model"]}


def engine_of(case, backend, **more):
    layout = Layout(**case.get("layout", {})) if backend != "alone" else Layout()
    settings = engine_settings(
        **{"optimizer": OPTIMIZER, "total_steps": 10, "pp_schedule": "1F1B"} | case.get("keys", {})
    )
    impl = case.get("transformer_impl", "auto")
    settings = replace(settings, temperature=case.get("temperature", 1.0), transformer_impl=impl)
    return build_engine(
        config_of(case),
        settings,
        layout=layout,
        init_from_scratch=True,
        seed=3,
        backend=backend,
        value_head=case.get("value_head", False),
        device=case.get("device", "cpu"),
        **more,
    )


def rows_of(case, num, seed):
    rows = make_rows(num, seed=seed)
    if shape := case.get("routes"):  # experts that the router would not choose
        layers, experts, k = shape
        gen = torch.Generator().manual_seed(seed)
        noise = [torch.rand((len(row.ids), layers, experts), generator=gen) for row in rows]
        routes = [one.argsort(-1)[..., :k].contiguous() for one in noise]
        rows = [replace(row, routes=one) for row, one in zip(rows, routes, strict=True)]
    if case.get("shared"):  # rows of a group begin alike, far enough to be computed once
        start = torch.randint(0, 37, (70,), generator=torch.Generator().manual_seed(seed))
        rows = [
            replace(
                row,
                ids=torch.cat((start, row.ids)),
                columns={n: torch.cat((torch.zeros(70), x)) for n, x in row.columns.items()},
                group=0,
            )
            for row in rows
        ]
    return rows


def step(engine, case, number, loss):
    engine.begin_step()
    rows = rows_of(case, 12, number)
    first = engine.accumulate(rows[:5], loss, last=False)
    second = engine.accumulate(rows[5:], loss, last=True)
    gradients = gradients_of(engine) if number == 0 else None
    result = engine.end_step()
    return {
        "sums": [first.loss_sum, second.loss_sum],
        "loss": result.loss,
        "norm": result.grad_norm,
        "gradients": gradients,
        "balance": [(one.layer, list(one.loads)) for one in result.balance],
    }


@torch.no_grad()
def gradients_of(engine):
    """Whole sums by the names of the files: read as weights are, in whose place they lie."""
    kept = {}
    for name, gradient in engine.step.whole.shards.items():
        place = local(engine.masters[name])
        kept[name] = place.clone()
        place.copy_(local(gradient))
    found = {name: x.to("cpu", copy=True) for name, x in engine.iter_weights()}
    for name, weight in kept.items():
        local(engine.masters[name]).copy_(weight)
    return found


def parity(case):
    """Three steps of each backend, and of transformers where it can take them."""
    loss = ValueLoss() if case.get("value_head") else PolicyLoss(0.1)
    found = {}
    for backend in ("archon", "megatron"):
        engine = engine_of(case, backend)
        first = {name: x.to("cpu", copy=True) for name, x in engine.iter_weights()}
        column = "values" if case.get("value_head") else "logprobs"
        before = [out[column] for out in engine.forward(rows_of(case, 4, 9))]
        engine.save_tag("ref")
        engine.offload()  # weights, moments and gradients leave, and come back where they are used
        steps = [step(engine, case, number, loss) for number in range(3)]
        after = [out[column] for out in engine.forward(rows_of(case, 4, 9))]
        ref = [out[column] for out in engine.forward(rows_of(case, 4, 9), "ref")]
        assert all(torch.equal(one, other) for one, other in zip(before, ref, strict=True))
        weights = {name: x.to("cpu", copy=True) for name, x in engine.iter_weights()}
        found[backend] = {
            "steps": steps,
            "before": torch.cat(before).cpu(),
            "after": torch.cat(after).cpu(),
            "weights": weights,
        }
    is_plain = not any(case.get(key) for key in ("value_head", "routes", "close"))
    if is_plain and dist.get_rank() == 0:
        found["transformers"] = steps_of_transformers(case, first, loss)
    return found


def steps_of_transformers(case, weights, loss):
    from transformers_loop import TransformersLoop  # imports transformers, on one rank only

    loop = TransformersLoop(config_of(case), weights, OPTIMIZER, case.get("temperature", 1.0))
    before = loop.logprobs(rows_of(case, 4, 9))
    rows = [rows_of(case, 12, number) for number in range(3)]
    steps = [loop.step((one[:5], one[5:]), loss) for one in rows]
    return {
        "steps": steps,
        "before": before,
        "after": loop.logprobs(rows_of(case, 4, 9)),
        "weights": loop.named(lambda weight: weight),
    }


def beside(case):
    """Whether two engines of other layouts, in turns, take the steps that each takes alone."""
    layouts = {"actor": case, "critic": {**case, **case["critic"], "value_head": True}}
    losses = {"actor": PolicyLoss(0.1), "critic": ValueLoss()}
    alone = {}
    for role, of_role in layouts.items():
        engine = engine_of(of_role, "megatron")
        alone[role] = [step(engine, of_role, number, losses[role]) for number in (1, 2)]
    engines = {role: engine_of(of_role, "megatron") for role, of_role in layouts.items()}
    turns = {role: [] for role in layouts}
    for number in (1, 2):
        for role, engine in engines.items():
            turns[role].append(step(engine, layouts[role], number, losses[role]))
    return alone == turns


def keep(engine, root):
    """A recovery checkpoint of the engine."""
    writer = Writer()
    saver = StateSaver(writer)
    tensors, counters = engine.state_tensors(), engine.state_counters()
    folder = state_folder("default", 1)
    staged = saver.save(tensors, root, folder, is_async=False, counters=counters)
    staged.result(240)
    if engine.meshes.rank == 0:
        written = {path: file for one in saver.outcomes() for path, file in one["files"].items()}
        run_job(CommitJob(root, info_folder(1), written, ()))
    dist.barrier()
    saver.close()
    writer.close()


def restored(case, backend, root):
    engine = engine_of(case, backend)
    restore_learner(engine, find_checkpoints(root)[0], state_folder("default", 1))
    return engine


def parts_of(engine):
    """This rank's memory of the state, by name."""
    state = engine.state_tensors()
    return {n: local(x).clone() for n, x in state.items() if not n.startswith("rng.")}


def moved(case):
    """archon (or fsdp) -> megatron, of another layout where the case has one, -> back, and
    megatron -> megatron: what differs, and whether a step after a restore is the step that follows
    the save."""
    mine = {**case, "layout": case.get("there", case["layout"])}
    loss, root = PolicyLoss(0.1), Path(case["root"])
    other = case.get("other", "archon")
    origin = engine_of(case, other)
    origin.save_tag("ref")
    step(origin, case, 0, loss)
    step(origin, case, 1, loss)
    keep(origin, root / "first")
    there = restored(mine, "megatron", root / "first")
    keep(there, root / "second")
    back = restored(case, other, root / "second")
    first, last = parts_of(origin), parts_of(back)
    again = restored(mine, "megatron", root / "second")
    steps = [step(engine, mine, 2, loss) for engine in (there, again)]
    same = [parts_of(there), parts_of(again)]
    return {
        "names": first.keys() == last.keys(),
        "num": len(first),
        "differ": [name for name in first if not torch.equal(first[name], last[name])],
        "resumed": steps[0] == steps[1] and all(map(torch.equal, *(x.values() for x in same))),
    }


def main():
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    torch.set_num_threads(1)
    found = {case["name"]: globals()[case["do"]](case) for case in cases}
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
