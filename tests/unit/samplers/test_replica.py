"""A replica over the lives of its process: what is sent again, what waits, and what ends it."""

import asyncio

import pytest

from pentad.core.errors import FlawedAnswer, GivenUp, InfraFailure, RunError
from pentad.core.roles import Installed
from pentad.core.types import Generation, Request, SamplingParams
from pentad.runtime.restarts import RestartPolicy
from pentad.samplers import replica as module
from pentad.samplers.replica import Replica, State

PARAMS = SamplingParams(max_new_tokens=1)


def ask(name: str) -> Request:
    return Request(id=name, prompt_ids=(1, 2), params=PARAMS, seeds=(7,))


class Weights:
    """What is published is its version."""

    newest = None

    async def publish(self, version, weights):
        self.newest = version
        return version


class Life:
    """One process: answers when `answer` is called, and ends when `die` is."""

    capabilities = frozenset({"sleep"})

    def __init__(self, number):
        self.number = number
        self.version = -1
        self.process = self
        self.calls: list[str] = []
        self.open: dict[str, asyncio.Future] = {}
        self.lost = asyncio.get_running_loop().create_future()

    def poll(self):
        return "ended with signal 9" if self.lost.done() else None

    def stacks(self):
        self.calls.append("stacks")

    def die(self):
        self.lost.set_result("its connection ended")
        for future in self.open.values():
            if not future.done():
                future.set_exception(InfraFailure("its connection ended"))

    async def generate(self, request):
        future = self.open[request.id] = asyncio.get_running_loop().create_future()
        return await future

    def answer(self, *names):
        for name in names or list(self.open):
            self.open[name].set_result([Generation([self.number], [-1.0], [self.version], "stop")])

    async def pull(self, published):
        self.calls.append(f"pull {published}")
        self.version = published
        return Installed(published, 1, "")

    async def call(self, method, **arguments):
        self.calls.append(method)

    def stats(self):
        return {"tokens_drawn": 10.0}

    async def close(self):
        self.calls.append("close")


class Lab:
    """A replica and the lives it was given."""

    def __init__(self, retries=3, **given):
        self.lives: list[Life] = []
        self.failing = self.num_starts = 0
        self.is_held = False
        self.weights = Weights()
        policy = RestartPolicy(retries)
        self.replica = Replica("rollout-0", self.start, self.weights, policy, **given)

    async def start(self, generation):
        assert generation == self.num_starts
        self.num_starts += 1
        while self.is_held:
            await asyncio.sleep(0.001)
        if self.failing:
            self.failing -= 1
            raise InfraFailure("no room")
        self.lives.append(Life(generation))
        return self.lives[-1]

    async def until(self, num_lives):
        async with asyncio.timeout(30):
            while len(self.lives) < num_lives or self.replica.sampler is None:
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "EXIT_WAIT_S", 0.0)
    monkeypatch.setattr("pentad.samplers.process.END_PATIENCE_S", 0.05)


async def sent(life, *names):
    async with asyncio.timeout(30):
        while not set(names) <= set(life.open):
            await asyncio.sleep(0.001)


def test_a_request_of_a_lost_process_is_sent_to_the_next_with_the_newest_weights():
    async def main():
        lab = Lab()
        await lab.replica.open()
        await lab.replica.install(4, [])
        task = asyncio.create_task(lab.replica.generate(ask("a")))
        await sent(lab.lives[0], "a")
        lab.lives[0].die()
        await lab.until(2)
        await sent(lab.lives[1], "a")
        lab.lives[1].answer()
        (made,) = await task
        assert (made.ids, made.versions) == ([1], [4])
        assert lab.lives[0].calls == ["pull 4", "stacks", "close"]
        assert lab.lives[1].calls == ["pull 4"]
        assert lab.replica.stats()["tokens_drawn"] == 20.0 and not lab.replica.pending
        assert lab.replica.policy.used == 0
        await lab.replica.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_exact", [False, True])
def test_on_policy_answered_requests_of_the_wave_are_sent_again_in_their_order(is_exact):
    async def main():
        lab = Lab(is_exact=is_exact)
        await lab.replica.open()
        tasks = [asyncio.create_task(lab.replica.generate(ask(name))) for name in "abc"]
        await sent(lab.lives[0], *"abc")
        lab.lives[0].answer("b")
        assert (await tasks[1])[0].ids == [0]
        lab.lives[0].die()
        await lab.until(2)
        await sent(lab.lives[1], "a", "c")
        assert list(lab.lives[1].open) == (["a", "b", "c"] if is_exact else ["a", "c"])
        lab.lives[1].answer()
        assert [(await task)[0].ids for task in tasks] == [[1], [0], [1]]
        await lab.replica.close()

    asyncio.run(main())


def test_where_another_replica_serves_requests_and_installs_fail_over_to_it():
    async def main():
        lab, other = Lab(), Lab()
        both = [lab.replica, other.replica]
        for replica in both:
            replica.siblings = both
            await replica.open()
        task = asyncio.create_task(lab.replica.generate(ask("a")))
        await sent(lab.lives[0], "a")
        lab.is_held = True
        lab.lives[0].die()
        with pytest.raises(InfraFailure):
            await task
        while lab.replica.state is not State.STARTING:
            await asyncio.sleep(0.001)
        with pytest.raises(InfraFailure, match="rollout-0 is restarted"):
            await lab.replica.generate(ask("b"))
        with pytest.raises(InfraFailure, match="rollout-0 is restarted"):
            await lab.replica.health()
        with pytest.raises(InfraFailure, match="rollout-0 is restarted"):
            await lab.replica.install(1, [])
        lab.is_held = False
        await lab.until(2)
        assert lab.lives[1].calls == ["pull 1"]
        for replica in both:
            await replica.close()

    asyncio.run(main())


def test_an_answer_of_no_use_is_not_sent_again_by_the_replica():
    async def main():
        lab = Lab()
        await lab.replica.open()
        task = asyncio.create_task(lab.replica.generate(ask("a")))
        await sent(lab.lives[0], "a")
        lab.lives[0].open["a"].set_exception(FlawedAnswer("a log-prob above 0"))
        with pytest.raises(FlawedAnswer):
            await task
        assert len(lab.lives) == 1 and lab.replica.state is State.RUNNING
        await lab.replica.close()

    asyncio.run(main())


def test_a_replica_that_is_lost_asleep_is_started_when_it_is_woken():
    async def main():
        lab = Lab()
        await lab.replica.open()
        await lab.replica.sleep()
        assert lab.replica.state is State.ASLEEP
        lab.lives[0].die()
        while lab.replica.state is not State.LOST:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(lab.lives) == 1
        await lab.replica.wake()
        await lab.until(2)
        assert lab.replica.state is State.RUNNING and "sleep" not in lab.lives[1].calls
        await lab.replica.close()

    asyncio.run(main())


def test_an_install_waits_for_the_next_process():
    async def main():
        lab = Lab()
        await lab.replica.open()
        pull = lab.lives[0].pull

        async def pull_and_die(published):
            lab.lives[0].die()
            await pull(published)
            raise InfraFailure("its connection ended")

        lab.lives[0].pull = pull_and_die
        receipt = await lab.replica.install(2, [])
        assert receipt.version == 2 and len(lab.lives) == 2
        await lab.replica.close()

    asyncio.run(main())


def test_restarts_without_an_answer_end_the_replica_and_its_requests():
    async def main():
        lab = Lab(retries=2)
        await lab.replica.open()
        task = asyncio.create_task(lab.replica.generate(ask("a")))
        await sent(lab.lives[0], "a")
        lab.failing = 9
        lab.lives[0].die()
        with pytest.raises(GivenUp, match="restarted 2 times .*rollout.restarts = 2.*no room"):
            await task
        assert lab.replica.state is State.CLOSED and lab.failing == 7
        for verb in (lab.replica.health, lab.replica.sleep, lab.replica.wake):
            with pytest.raises(GivenUp):
                await verb()
        with pytest.raises(GivenUp):
            lab.replica.stats()
        await lab.replica.close()

    asyncio.run(main())


def test_close_ends_what_waits_for_a_restart():
    async def main():
        lab = Lab()
        await lab.replica.open()
        await lab.replica.sleep()
        task = asyncio.create_task(lab.replica.generate(ask("a")))
        await sent(lab.lives[0], "a")
        lab.lives[0].die()
        while lab.replica.state is not State.LOST:
            await asyncio.sleep(0.001)
        installing = asyncio.create_task(lab.replica.install(1, []))
        await asyncio.sleep(0.02)
        await lab.replica.close()
        with pytest.raises(RunError, match="closed"):
            await task
        with pytest.raises(RunError, match="closed"):
            await installing

    asyncio.run(main())
