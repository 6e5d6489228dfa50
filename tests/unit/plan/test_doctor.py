"""`pentad doctor` finds what is wrong, says what to do, and exits with what it means."""

import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pentad.cli.doctor import run_doctor
from pentad.core import machine
from pentad.core.machine import GIB, Gpu, GpuQueryError
from pentad.planner import doctor
from pentad.planner.doctor import examine, is_healthy

H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, "580.1", "9.0")


@pytest.fixture
def with_gpus(monkeypatch):
    def use(*gpus: Gpu, cuda: str | None = "13.0"):
        monkeypatch.setattr(doctor, "find_gpus", lambda: gpus)
        monkeypatch.setattr(doctor, "torch_cuda", lambda: cuda)

    return use


def statuses(findings) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def test_every_trouble_has_a_remedy(with_gpus):
    with_gpus(Gpu("old", 16 * GIB, 2 * GIB, "1", "7.5"), cuda=None)
    for finding in examine():
        assert finding.text
        if finding.status in ("warn", "fail"):
            assert finding.remedy, finding


def test_this_machine_can_run_the_tests_that_it_runs(with_gpus):
    with_gpus(cuda=None)
    found = examine()
    assert is_healthy(found)
    assert statuses(found)["python"] == "ok" and statuses(found)["gpu"] == "info"


def test_a_gpu_with_a_cpu_build_of_torch_is_a_failure(with_gpus):
    with_gpus(H100, cuda=None)
    found = [finding for finding in examine() if finding.name == "torch"]
    assert found[0].status == "fail" and "CUDA build" in found[0].remedy
    with_gpus(H100)
    assert is_healthy(examine())
    assert "bfloat16" in next(f.text for f in examine() if f.name == "train")


def test_gpus_are_judged_one_by_one(with_gpus):
    busy = Gpu("NVIDIA H100", 80 * GIB, 10 * GIB, "580.1", "9.0")
    old = Gpu("Tesla V100", 16 * GIB, 16 * GIB, "580.1", "7.0")
    with_gpus(H100, busy, old)
    found = {f.name: f for f in examine()}
    assert [found[f"gpu {i}"].status for i in range(3)] == ["ok", "warn", "warn"]
    assert "nvidia-smi" in found["gpu 1"].remedy and "float32" in found["gpu 2"].remedy


def test_a_broken_driver_is_told(monkeypatch):
    def broken():
        raise GpuQueryError("nvidia-smi: Driver/library version mismatch")

    monkeypatch.setattr(doctor, "find_gpus", broken)
    found = next(f for f in examine() if f.name == "gpu")
    assert found.status == "fail" and "mismatch" in found.text


def test_missing_and_old_packages_are_named(monkeypatch):
    lines = ["torch>=2.11", "nosuch>=3", "rich>=99", "pyarrow>=18; extra == 'parquet'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: lines)
    (found,) = doctor.check_requirements()
    assert found.status == "fail"
    assert found.text.startswith("nosuch >= 3 (missing), rich >= 99 (")
    assert found.remedy == "pip install 'nosuch>=3' 'rich>=99'", "also where no source is"


def test_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 4))
    (found,) = doctor.check_python()
    assert found.status == "fail" and "3.11" in found.remedy
    monkeypatch.setattr(doctor.sys, "version_info", (3, 14, 0))
    (found,) = doctor.check_python()
    assert found.status == "warn"


def test_small_shares_are_warned_about(monkeypatch):
    monkeypatch.setattr(doctor, "host_memory", lambda: (4 * GIB, 2 * GIB))
    monkeypatch.setattr(doctor, "free_disk", lambda folder: (GIB, "/"))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (256, 512))
    found = statuses(examine())
    assert (found["memory"], found["disk"], found["open files"]) == ("warn", "warn", "warn")


def test_a_host_without_an_address_is_warned_about(monkeypatch):
    def unknown(name):
        raise socket.gaierror("no address")

    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    (found,) = doctor.check_network()
    assert found.status == "warn" and "GLOO_SOCKET_IFNAME" in found.remedy


def test_an_unwritable_folder_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    (found,) = doctor.check_disk("runs")
    assert found.status == "fail" and "fileroot" in found.remedy


def test_exit_codes_and_json(monkeypatch, capsys):
    assert run_doctor(json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert {"name", "status", "text", "remedy"} == set(report["findings"][0])
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 0))
    assert run_doctor(json=False) == 1
    assert capsys.readouterr().out.endswith("Runs cannot start here: fix python.\n")


def test_doctor_loads_no_torch():
    code = "import sys; from pentad.cli.doctor import run_doctor; run_doctor(False)\n"
    code += "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_what_torch_was_built_for_is_read_from_its_files():
    import torch

    assert doctor.torch_cuda() == torch.version.cuda
    assert doctor.numbers("2.13.0+cpu") == (2, 13, 0)
    assert doctor.read_requirement("ray[serve]>=2.1; extra == 'ray'") == (
        *("ray", "2.1"),
        "",
    )
    assert doctor.read_requirement("torch<2.14,>=2.11") == ("torch", "2.11", "2.14")


def test_every_extra_has_its_line():
    """Under the name that metadata have: pip 23 finds none with an underscore, and only warns."""
    page = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = set(page["project"]["optional-dependencies"]) - {"all", "test", "site"}
    assert not [name for name in extras if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)]
    remedies = " ".join(how for _, how in doctor.OPTIONAL.values())
    assert {name for name in extras if f"'pentad[{name}]'" not in remedies} == set()


def test_a_package_later_than_tested_is_warned_about(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["rich<2,>=1"])
    late, rest = doctor.check_requirements()
    assert (late.name, late.status) == (
        "rich",
        "warn",
    ) and "later than the tested versions" in late.text
    assert late.remedy == "pip install 'rich<2,>=1'" and rest.status == "ok"


def test_gpu_lines_are_read_and_hidden_ones_left_out():
    text = "NVIDIA H100, 81559, 81000, 580.1, 9.0\nNVIDIA A10, 23028, 100, 580.1, 8.6\n\n[N/A]\n"
    gpus = machine.parse_gpus(text)
    assert [(gpu.name, gpu.memory_bytes) for gpu in gpus] == [
        ("NVIDIA H100", 81559 * 2**20),
        ("NVIDIA A10", 23028 * 2**20),
    ]
    assert machine.visible(gpus, None) == gpus
    assert machine.visible(gpus, "1") == gpus[1:]
    assert machine.visible(gpus, "1,0") == (gpus[1], gpus[0])
    assert machine.visible(gpus, "") == machine.visible(gpus, "-1") == ()
    assert machine.visible(gpus, "0,7,1") == gpus[:1]


def test_disk_is_asked_where_the_folder_will_be(tmp_path):
    free, folder = machine.free_disk(str(tmp_path / "not" / "yet"))
    assert folder == str(tmp_path) and free > 0


def test_host_memory_is_what_the_kernel_says():
    import psutil

    total, available = machine.host_memory()
    assert total <= psutil.virtual_memory().total and 0 < available <= total
