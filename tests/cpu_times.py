"""`--cpu-times`: the CPU seconds of each file and each test, with those of the processes they
started. On a busy machine they say more than the time that passed."""

import os
import resource
from collections import defaultdict
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
OWN = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
NUM_SHOWN = 60


def pytest_addoption(parser):
    parser.addoption("--cpu-times", action="store_true", help="CPU seconds by file and by test")


def pytest_configure(config):
    if config.option.cpu_times:
        config.pluginmanager.register(Measured())


class Measured:
    def __init__(self):
        self.before = tree_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        """A test costs what was used since the one before it ended, its fixtures included."""
        report = yield
        if call.when == "teardown":
            now = tree_seconds()
            report.user_properties.append(("cpu_s", now - self.before))
            self.before = now
        return report

    def pytest_terminal_summary(self, terminalreporter):
        by_file, by_test = defaultdict(float), {}
        for reports in terminalreporter.stats.values():
            for report in reports:
                seconds = dict(getattr(report, "user_properties", ())).get("cpu_s")
                if seconds is not None and report.when == "teardown":
                    by_file[report.nodeid.partition("::")[0]] += seconds
                    by_test[report.nodeid] = seconds
        for name, times in (("file", by_file), ("test", by_test)):
            terminalreporter.section(f"CPU seconds by {name}: {sum(times.values()):.1f} in all")
            for key in sorted(times, key=times.get, reverse=True)[:NUM_SHOWN]:
                terminalreporter.write_line(f"{times[key]:8.2f} {key}")


def tree_seconds():
    """What this process and its descendants have used; those that have ended count in their
    parents."""
    ended = sum(sum(resource.getrusage(who)[:2]) for who in OWN)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ended
    parents, seconds = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    return ended + sum(seconds[pid] for pid in seconds if is_below(os.getpid(), pid, parents))


def is_below(root, pid, parents):
    while (pid := parents.get(pid, 0)) != root:
        if pid == 0:
            return False
    return True
