"""What is read from NVML through a stand-in for the ``pynvml`` module, and that every failure means unknown."""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.memory import nvml
from autobatch.records import Tenant

pytestmark = pytest.mark.quick

UUID = "5d3aa3c2-5a8e-4c8a-9d7e-1f1c5a6f0b11"
GIB = 1024**3


class NVMLError(Exception):
    """What ``pynvml`` raises for everything the driver refuses."""


class NVMLError_NotSupported(NVMLError):
    """What it raises for what a card does not have."""


def refuse(*_):
    raise NVMLError("Not Supported")


class FakeNvml:
    """One card behind the functions of ``pynvml`` that are used."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

    def __init__(self, *, uuid=f"GPU-{UUID}", compute=(), graphics=(), mps=(), names=None, divided=None):
        self.uuid = uuid
        self.names = names or {}
        self.divided = divided
        self.sessions = 0
        self.nvmlDeviceGetComputeRunningProcesses = self._lister(compute)
        self.nvmlDeviceGetGraphicsRunningProcesses = self._lister(graphics)
        self.nvmlDeviceGetMPSComputeRunningProcesses = self._lister(mps)

    def _lister(self, rows):
        def running(handle):
            assert handle == "handle"
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in rows]

        return running

    def nvmlInit(self):
        self.sessions += 1

    def nvmlShutdown(self):
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetMigMode(self, handle):
        if self.divided is None:
            raise NVMLError("Not Supported")
        return [int(self.divided), 0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 * GIB, free=30 * GIB, used=50 * GIB)

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        assert index == 0
        return "handle"

    def nvmlDeviceGetUUID(self, handle):
        return self.uuid.encode()

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100 PCIe"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12080

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"

    def nvmlSystemGetProcessName(self, pid):
        if pid not in self.names:
            raise NVMLError("Not Found")
        return self.names[pid]


@pytest.fixture
def install(monkeypatch):
    """Put a module in the place of ``pynvml``, with nothing said yet in the log."""
    monkeypatch.setattr(nvml, "_logged", threading.Event())

    def put(module):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


def lines(caplog):
    """What was logged, all of it on the project's logger and none of it a warning."""
    assert {record.name for record in caplog.records} <= {"autobatch"}
    assert all(record.levelno == logging.INFO for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_card_is_read_with_the_processes_on_it(install, caplog):
    """Totals, free bytes and every other process, the largest first, our own left out; nothing is said."""
    caplog.set_level(logging.INFO)
    fake = install(
        FakeNvml(
            compute=[(7, 3 * GIB), (os.getpid(), 9 * GIB), (8, 5 * GIB)],
            graphics=[(os.getpid(), 9 * GIB)],
            names={7: "python", 8: b"caf\xc3\xa9"},
        )
    )
    reading = nvml.query(UUID)
    assert reading == nvml.CardReading(
        uuid=f"GPU-{UUID}",
        total_bytes=80 * GIB,
        free_bytes=30 * GIB,
        tenants=(
            Tenant(pid=8, used_bytes=5 * GIB, name="café"),
            Tenant(pid=7, used_bytes=3 * GIB, name="python"),
        ),
        driver="580.95.05",
        name="NVIDIA H100 PCIe",
    )
    assert fake.sessions == 0
    assert lines(caplog) == []


@pytest.mark.parametrize("asked", [UUID, f"GPU-{UUID}"])
@pytest.mark.parametrize("divided", [None, False])
def test_a_whole_card_is_found_by_its_uuid(install, asked, divided):
    """With the prefix or without it, on cards that know of MIG and on those that do not."""
    install(FakeNvml(divided=divided))
    assert nvml.query(asked).uuid == f"GPU-{UUID}"


@pytest.mark.parametrize("asked", [UUID, f"MIG-{UUID}"])
def test_a_mig_slice_is_found_by_its_uuid(install, asked):
    """A slice has a UUID of its own, which the driver writes with another prefix."""
    install(FakeNvml(uuid=f"MIG-{UUID}", compute=[(7, GIB)]))
    reading = nvml.query(asked)
    assert reading.uuid == f"MIG-{UUID}"
    assert [tenant.pid for tenant in reading.tenants] == [7]


def test_a_divided_card_is_unknown(install, caplog):
    """The totals of a card that is cut into slices say nothing about the slice that is ours."""
    caplog.set_level(logging.INFO)
    install(FakeNvml(divided=True))
    assert nvml.query(UUID) is None
    assert "MIG" in lines(caplog)[0]


PROCESS_ROWS = st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 10)), max_size=6)


@given(compute=PROCESS_ROWS, graphics=PROCESS_ROWS, mps=PROCESS_ROWS)
def test_a_process_counts_once_however_often_it_is_listed(compute, graphics, mps):
    """A process that is in several lists is one tenant with the largest of its readings; unknown is no reading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", FakeNvml(compute=compute, graphics=graphics, mps=mps))
        reading = nvml.query(UUID)
    readings = {
        pid: [used for row, used in compute + graphics + mps if row == pid and used is not None] for pid in range(6)
    }
    assert {tenant.pid: tenant.used_bytes for tenant in reading.tenants} == {
        pid: max(used) for pid, used in readings.items() if used
    }


def test_without_permission_the_memory_is_still_read(install, caplog):
    """Where every list of processes is refused, the card's own numbers remain, and the log says what is missing."""
    caplog.set_level(logging.INFO)
    fake = install(FakeNvml())
    for name in ("Compute", "Graphics", "MPSCompute"):
        setattr(fake, f"nvmlDeviceGet{name}RunningProcesses", refuse)
    reading = nvml.query(UUID)
    assert (reading.free_bytes, reading.tenants) == (30 * GIB, ())
    assert lines(caplog) == ["who else holds memory of the GPU is not fully known: the driver lists no processes"]


def broken(name, error):
    fake = FakeNvml()

    def fail(*_):
        raise error

    setattr(fake, name, fail)
    return fake


FAILURES = {
    "not installed": None,  # what Python keeps in sys.modules for a module that must not be found
    "another module of that name": SimpleNamespace(__version__="8.0"),
    "no driver": broken("nvmlInit", NVMLError("NVML Shared Library Not Found")),
    "no library": broken("nvmlInit", OSError("libnvidia-ml.so.1: cannot open shared object file")),
    "not this card": FakeNvml(uuid="GPU-another"),
    "an old module that takes no text": broken(
        "nvmlDeviceGetHandleByUUID", TypeError("bytes or integer address expected")
    ),
    "no memory reading": broken("nvmlDeviceGetMemoryInfo", NVMLError("Insufficient Permissions")),
    "gone before the end": broken("nvmlShutdown", NVMLError("Uninitialized")),
}


@pytest.mark.parametrize("module", FAILURES.values(), ids=FAILURES.keys())
def test_every_failure_is_unknown_and_said_once(install, caplog, module):
    """Whatever is missing or refused, the answer is None, with one line in the log however often it is asked."""
    caplog.set_level(logging.INFO)
    install(module)
    assert [nvml.query(UUID) for _ in range(3)] == [None] * 3
    assert len(lines(caplog)) == 1


def test_a_card_that_shares_the_hosts_memory_is_known(install, caplog):
    """The driver does not support the question for its memory: name, driver and processes are read all the same."""
    fake = FakeNvml(compute=[(4242, 3 * GIB)], names={4242: b"python"})

    def memory(handle):
        raise NVMLError_NotSupported("Not Supported")

    fake.nvmlDeviceGetMemoryInfo = memory
    install(fake)
    for reading in (nvml.query(UUID), *nvml.query_all()):
        assert (reading.total_bytes, reading.free_bytes) == (0, 0)
        assert (reading.name, reading.driver) == ("NVIDIA H100 PCIe", "580.95.05")
        assert [tenant.pid for tenant in reading.tenants] == [4242]
    assert not lines(caplog)
    assert fake.sessions == 0


def test_the_installed_module_has_what_is_used():
    """The stand-in copies real names: the ``pynvml`` of nvidia-ml-py has each of them."""
    real = pytest.importorskip("pynvml")
    used = [name for name in dir(FakeNvml()) if name.startswith(("nvml", "NVMLError"))]
    assert len(used) == 17
    assert [name for name in used if not hasattr(real, name)] == []


@pytest.mark.parametrize("divided", [None, True])
def test_all_cards_are_read_also_divided_ones(install, divided):
    """A list for people: what is divided into slices is there too, and says so."""
    install(FakeNvml(divided=divided, compute=[(7, GIB)]))
    [card] = nvml.query_all()
    assert (card.uuid, card.name, card.total_bytes) == (f"GPU-{UUID}", "NVIDIA H100 PCIe", 80 * GIB)
    assert card.divided == bool(divided)
    assert card.tenants[0].pid == 7


def test_without_a_driver_the_list_says_why(install):
    """Somebody has asked for it, so silence would be no answer."""
    fake = install(FakeNvml())
    fake.nvmlInit = refuse
    with pytest.raises(LookupError, match="NVMLError: Not Supported"):
        nvml.query_all()
