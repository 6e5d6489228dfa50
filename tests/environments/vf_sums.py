"""Sums as an environment of verifiers; is imported where verifiers is installed."""

import os

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if "die" in self.data.answer:
            os._exit(3)
        if "raise" in self.data.answer:
            raise RuntimeError("the rubric broke")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward
    async def asked(self, trace: vf.Trace) -> float:
        return 0.25 * trace.num_turns


class SumsConfig(vf.TasksetConfig):
    first: int = 1


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(5):
            total = self.config.first + number
            prompt = f"{self.config.first}+{number}="
            yield SumTask(SumData(prompt=prompt, answer=str(total)), self.config.task)


__all__ = ["Sums"]
