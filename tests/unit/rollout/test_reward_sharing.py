"""Groups that wait for the reward pool share a message, and nobody's verdict shows it."""

import asyncio

import numpy as np
import pytest

from pentad.core.roles import Scored
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards import sharing
from pentad.rewards.sandbox import JobFailed
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig


def group_of(texts, gid=0) -> Group:
    versions, zeros = np.array([-1, 0]), np.zeros(2, np.float32)
    made = [Sample(np.array([1, 2]), versions == 0, zeros, versions, "stop", t) for t in texts]
    return Group(Prompt(gid, (1,), {"answer": str(gid)}, "what?"), made)


def scoring(tmp_path, source, use, num_workers=1, timeout_s=60.0):
    """What `use(scorer)` returns, of a scorer that knows its reward to be quick."""
    (tmp_path / "own.py").write_text(f"import os, time\nfrom pathlib import Path\n{source}")
    limits = {"num_workers": num_workers, "timeout_s": timeout_s, "memory_mb": 256}
    reward = RewardConfig(fn=f"{tmp_path / 'own.py'}:reward", **limits)

    async def run():
        scorer = RewardScorer(reward)
        await scorer.start()
        try:
            await scorer.score(group_of("a"))
            while scorer.pools[0].idle.qsize() < num_workers:  # on a busy machine one starts later
                await asyncio.sleep(0.01)
            scorer.functions[0].call_s = 1e-6
            return await use(scorer)
        finally:
            await scorer.close()

    return asyncio.run(run())


async def all_at_once(scorer, groups):
    return await asyncio.gather(*(scorer.judge(g.prompt, g.samples, repeats=False) for g in groups))


PID = "def reward(completion): return os.getpid()"
PIDS = "def reward(completions): return [os.getpid()] * len(completions)"


@pytest.mark.parametrize("source", [PID, PIDS])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_waits_is_cut_into_a_message_for_each_free_worker(tmp_path, source, num_workers):
    async def use(scorer):
        verdicts = await all_at_once(scorer, [group_of("ab", i) for i in range(6)])
        return [[scored.value for scored in group] for group in verdicts]

    pids = scoring(tmp_path, source, use, num_workers)
    assert len(set(sum(pids, []))) == num_workers
    assert all(first == second for first, second in pids)
    assert max(map(pids.count, pids)) == 6 // num_workers


def test_a_lone_group_is_sent_at_once_and_those_that_come_meanwhile_go_together(tmp_path):
    source = f"""
HERE = Path({str(tmp_path)!r})
def reward(completion):
    (HERE / completion).touch()
    while completion == "held" and not (HERE / "go").exists(): time.sleep(0.01)
    return os.getpid()
"""

    async def use(scorer):
        alone = asyncio.create_task(all_at_once(scorer, [group_of(["held"])]))
        while not (tmp_path / "held").exists():
            await asyncio.sleep(0.01)
        later = asyncio.create_task(all_at_once(scorer, [group_of("xy", i) for i in range(5)]))
        while not scorer.functions[0].jobs.waiting:
            await asyncio.sleep(0.01)
        assert not (tmp_path / "x").exists()
        (tmp_path / "go").touch()
        return [{s.value for group in await task for s in group} for task in (alone, later)]

    alone, later = scoring(tmp_path, source, use)
    assert len(alone) == len(later) == 1 and alone != later


BAD = {
    "timeout": "time.sleep(600)",
    "crash": "os._exit(1)",
    "memory": "bytearray(1 << 30)",
    "error": "raise KeyError('x')",
    "output": "return {2_000_000 * 'x': 1.0}",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_fails_alone_with_the_sentence_it_has_one_by_one(tmp_path, kind):
    source = (
        "def reward(completion, answer):\n"
        f"  if completion == 'bad':\n    {BAD[kind]}\n"
        "  return {'length': len(completion), 'group': float(answer)}"
    )
    groups = [group_of(texts, i) for i, texts in enumerate([["a", "bb"], ["ccc", "bad"], ["d"]])]

    async def use(scorer):
        sent, run_on = [], scorer.pools[0].run_on

        async def counted(worker, spec, *rest, **options):
            sent.append(spec)
            return await run_on(worker, spec, *rest, **options)

        scorer.pools[0].run_on = counted
        together = await all_at_once(scorer, groups)
        assert sent[0] == sharing.SEVERAL and sent.count(sharing.SEVERAL) == 1
        return together, [(await all_at_once(scorer, [g]))[0] for g in groups]

    limit_s = 3.0 if kind == "timeout" else 60.0
    together, one_by_one = scoring(tmp_path, source, use, timeout_s=limit_s)
    assert together == one_by_one
    bad = together[1].pop()
    assert isinstance(bad, JobFailed) and bad.kind == kind
    parts = [{"length": float(n), "group": float(g)} for n, g in [(1, 0), (2, 0), (3, 1), (1, 2)]]
    assert sum(together, []) == [Scored(sum(own.values()), own) for own in parts]


def test_a_message_that_nobody_waits_for_any_more_frees_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "SHARED_JOB_TIMEOUT_S", 600.0)
    source = f"""
def reward(completion):
    while completion == "held": Path({str(tmp_path / "began")!r}).touch(); time.sleep(0.01)
    return 1.0
"""

    async def use(scorer):
        tasks = [
            asyncio.create_task(all_at_once(scorer, [group_of([text])])) for text in ("held", "b")
        ]
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(60):
            return await all_at_once(scorer, [group_of("c")])

    assert scoring(tmp_path, source, use, timeout_s=600.0) == [[Scored(1.0)]]
