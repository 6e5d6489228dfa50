"""Programs with one thing wrong, for the scenarios of `pentad chaos`: each is a patch that the
processes of a run are started with."""

import asyncio
import os

import torch

from pentad_tools.chaos import broken_run
from pentad_tools.chaos.workloads import STEPS

run_command = broken_run.run_command


def run_mutant(name, *given):
    """In the place of `run_command`: role processes are forks of this one, and have the patch."""
    MUTANTS[name]()
    run_command(*given)


def leave_old_weights():
    """A restarted sampler does not pull the newest weights."""
    from pentad.samplers.replica import Replica

    async def bring_up_to_date(self, sampler):
        await asyncio.sleep(0)

    Replica._bring_up_to_date = bring_up_to_date


def replace_samplers():
    """Samplers are closed and started anew with the learners."""
    from pentad.trainer.processes.supervisor import Supervisor

    note_lost = Supervisor.note_lost

    def lose_all(self, error):
        note_lost(self, error)
        self.resources.close_samplers()

    Supervisor.note_lost = lose_all


def forget_moments():
    """A restore leaves out the optimizer's moments."""
    from pentad.trainer.rank.service import EngineService

    restore_state = EngineService.restore_state

    def restore_weights(self, role, *place):
        counters = restore_state(self, role, *place)
        for name, tensor in self.engines[role].state_tensors().items():
            if name.startswith("optimizer.exp_avg"):
                tensor.zero_()
        return counters

    EngineService.restore_state = restore_weights


def keep_superseded():
    """Records of steps that are trained again stay."""
    from pentad.telemetry import recorder

    recorder.supersede = lambda *_, **__: set()


def count_no_generation():
    """Every start says that it is the first."""
    from pentad.telemetry.runfolder import RunFolder

    add_start = RunFolder.add_start
    RunFolder.add_start = lambda self, start: add_start(self, {**start, "generation": 0})


def commit_other_bytes():
    """A bit of the last checkpoint is flipped after its digest was taken."""
    from pentad.checkpoint import job

    write_file = job._write_file

    def write_wrongly(path, *given):
        entry = write_file(path, *given)
        if f"globalstep{STEPS - 1}/" in str(path) and path.suffix == ".distcp":
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        return entry

    job._write_file = write_wrongly


def sweep_nothing():
    """What a killed scheduler left in memory stays."""
    from pentad.core import scratch

    scratch.sweep = lambda *_, **__: None


def open_files():
    """The scheduler opens ten files in every step, and closes none."""
    from pentad.trainer.processes.supervisor import Supervisor

    note_step = Supervisor.note_step

    def note(self):
        for _ in range(10):
            os.open(os.devnull, os.O_RDONLY)
        note_step(self)

    Supervisor.note_step = note


def lose_a_token():
    """The last token of a rank is counted by the router and not sent to its experts."""
    from pentad.parallel.experts import ExpertDispatch

    dispatch = ExpertDispatch.__call__

    def dispatch_most(self, x_TD, weights_Tk, chosen_Tk, *given, **more):
        y_TD = dispatch(self, x_TD[:-1], weights_Tk[:-1], chosen_Tk[:-1], *given, **more)
        return torch.cat([y_TD, torch.zeros_like(x_TD[-1:])])

    ExpertDispatch.__call__ = dispatch_most


def draw_again():
    """The slot of a group that is dropped gets one that was trained already."""
    from pentad.data.ledger import Ledger

    drop, admit = Ledger.drop, Ledger.admit
    dropped = []

    def drop_and_note(self, gid, reason):
        drop(self, gid, reason)
        dropped.append(gid)

    def admit_old(self, batch):
        ended = [gid for gid in range(self.next_gid) if gid not in {*self._live, *dropped}]
        if not dropped or not ended:
            return admit(self, batch)
        following, self.next_gid = self.next_gid, ended[0]
        dropped.clear()
        gid = admit(self, batch)
        self.next_gid = following
        return gid

    Ledger.drop, Ledger.admit = drop_and_note, admit_old


MUTANTS = {
    one.__name__: one
    for one in (
        *(leave_old_weights, replace_samplers, forget_moments, keep_superseded),
        *(count_no_generation, commit_other_bytes, sweep_nothing, open_files, lose_a_token),
        draw_again,
    )
}
