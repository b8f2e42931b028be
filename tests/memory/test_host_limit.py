"""The host's memory: control groups of both versions with their parents, the RAM, and nothing at all."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.memory.host_limit import HostMemory, read_host_memory

pytestmark = pytest.mark.quick

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712

V1_FILES = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cache": "total_inactive_file"}
V2_FILES = {"limit": "memory.max", "used": "memory.current", "cache": "inactive_file"}


def write_ram(root, total, available):
    """``/proc/meminfo`` with these sizes in bytes, among the lines a kernel also writes."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total // 1024} kB\nMemFree:        1 kB\nMemAvailable:   {available // 1024} kB\n"
        "HugePages_Total:       0\nOdd:\n"
    )


def write_group(root, version, path, limit, used, *, cache=None):
    """One control group's files, ``path`` below its mount."""
    names = V1_FILES if version == 1 else V2_FILES
    folder = root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup") / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["used"]).write_text(f"{used}\n")
    if cache is not None:
        (folder / "memory.stat").write_text(f"anon 7\nfile 9\n{names['cache']} {cache}\nactive_file 5\n")


def join(root, *lines):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def membership(version, path):
    """The line of ``/proc/self/cgroup``, with a controller beside memory as version 1 has it."""
    return f"0::{path}" if version == 2 else f"4:hugetlb,memory:{path}"


@pytest.fixture
def root(tmp_path):
    """A machine with 64 MiB, of which 40 are available."""
    write_ram(tmp_path, 64 * MIB, 40 * MIB)
    return tmp_path


versions = pytest.mark.parametrize("version", [1, 2])


def test_without_groups_the_ram_is_the_limit(root):
    """A process outside any container may take what the kernel calls available."""
    expected = HostMemory(total_bytes=64 * MIB, available_bytes=40 * MIB, source="RAM")
    assert read_host_memory(root) == expected
    join(root, "0::/", "1:name=systemd:/", "3:cpu,cpuacct:/x", "not a line", "")
    assert read_host_memory(root) == expected


@versions
def test_a_group_s_limit_is_the_total(root, version):
    """The container's limit and what is left of it."""
    join(root, membership(version, "/job"))
    write_group(root, version, "job", 10 * MIB, 3 * MIB)
    assert read_host_memory(root) == HostMemory(
        total_bytes=10 * MIB, available_bytes=7 * MIB, source=f"cgroup v{version}"
    )


@versions
def test_page_cache_counts_as_free(root, version):
    """The kernel drops inactive files before it kills; active ones are not counted on."""
    join(root, membership(version, "/job"))
    write_group(root, version, "job", 10 * MIB, 9 * MIB, cache=8 * MIB)
    assert read_host_memory(root).available_bytes == 9 * MIB


@versions
def test_a_parent_binds_too(root, version):
    """The tightest of the group and all above it; what is left may be decided by another than the limit."""
    join(root, membership(version, "/slice/pod/job"))
    write_group(root, version, "slice", 20 * MIB, 18 * MIB)
    write_group(root, version, "slice/pod", 8 * MIB, 3 * MIB)
    write_group(root, version, "slice/pod/job", 12 * MIB, 1 * MIB)
    found = read_host_memory(root)
    assert (found.total_bytes, found.available_bytes) == (8 * MIB, 2 * MIB)


@versions
@pytest.mark.parametrize("path", ["/docker/3f2a", "/../../docker/3f2a", "/kubepods.slice/pod1/3f2a", "/"])
def test_inside_a_container_the_mount_itself_is_the_group(root, version, path):
    """The path is often the host's and does not exist here."""
    join(root, membership(version, path))
    write_group(root, version, "", 10 * MIB, 4 * MIB)
    found = read_host_memory(root)
    assert (found.total_bytes, found.available_bytes) == (10 * MIB, 6 * MIB)


def test_max_means_no_limit(root):
    """In version 2 an unlimited group says ``max``; its parent may still have one."""
    join(root, "0::/slice/job")
    write_group(root, 2, "slice/job", "max", MIB)
    assert read_host_memory(root).source == "RAM"
    write_group(root, 2, "slice", 10 * MIB, MIB)
    assert read_host_memory(root).total_bytes == 10 * MIB


def test_an_unlimited_group_of_version_1_is_not_the_limit(root):
    """It says the largest multiple of a page; neither total nor available may become that."""
    join(root, "4:memory:/job")
    write_group(root, 1, "job", UNLIMITED_V1, MIB)
    assert read_host_memory(root) == HostMemory(total_bytes=64 * MIB, available_bytes=40 * MIB, source="RAM")


@given(ram_available=st.integers(1, 64), used=st.integers(0, 10))
def test_the_total_does_not_depend_on_who_uses_how_much(tmp_path_factory, ram_available, used):
    """A container of 10 MiB stays one, also on a machine whose RAM others fill; what is left is the least of both."""
    root = tmp_path_factory.mktemp("root")
    write_ram(root, 64 * MIB, ram_available * MIB)
    join(root, "0::/job")
    write_group(root, 2, "job", 10 * MIB, used * MIB)
    assert read_host_memory(root) == HostMemory(
        total_bytes=10 * MIB, available_bytes=min(ram_available, 10 - used) * MIB, source="cgroup v2"
    )


@versions
@pytest.mark.parametrize("missing", ["limit", "used"])
def test_a_group_with_a_file_missing_is_passed_over(root, version, missing):
    """A controller that is not enabled has no files; its parent's still count."""
    join(root, membership(version, "/slice/job"))
    write_group(root, version, "slice/job", MIB, 0)
    write_group(root, version, "slice", 10 * MIB, 0)
    mount = root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    (mount / "slice/job" / (V1_FILES if version == 1 else V2_FILES)[missing]).unlink()
    assert read_host_memory(root).total_bytes == 10 * MIB


def test_both_versions_at_once(root):
    """Where memory is still version 1's and the unified hierarchy has no memory files, version 1 is read."""
    join(root, "4:memory:/job", "0::/job")
    (root / "sys/fs/cgroup/unified").mkdir(parents=True)
    write_group(root, 1, "job", 10 * MIB, 0)
    assert read_host_memory(root).source == "cgroup v1"


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 5 kB\n", "MemTotal: 5 kB\nMemAvailable: some kB\n"])
def test_without_a_readable_proc_the_installed_ram_is_told(tmp_path, meminfo):
    """Elsewhere than on Linux the standard library knows what is installed, and no more."""
    if meminfo is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text(meminfo)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert read_host_memory(tmp_path) == HostMemory(total_bytes=installed, available_bytes=installed, source="RAM")


def test_a_platform_that_tells_nothing_is_an_error_that_says_what_to_pass(tmp_path, monkeypatch):
    """Windows has no sysconf: a budget has to be given."""
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(OSError, match=r"pass budget= \(bytes, or a text such as '8GiB'\)"):
        read_host_memory(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_tells_something_plausible():
    """The real files: more than this process needs, no more than is installed."""
    found = read_host_memory()
    assert 2**26 < found.available_bytes <= found.total_bytes
    assert found.total_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_windows_is_asked_for_its_memory(tmp_path, monkeypatch):
    """By ``GlobalMemoryStatusEx``, which writes total and free bytes behind two short numbers."""

    def status(pointer):
        values = pointer._obj
        assert values[0] == 64  # the structure's size
        values[1], values[2] = 64 * 2**30, 20 * 2**30
        return 1

    monkeypatch.setattr("sys.platform", "win32")
    kernel = SimpleNamespace(GlobalMemoryStatusEx=status)
    monkeypatch.setattr("ctypes.windll", SimpleNamespace(kernel32=kernel), raising=False)
    memory = read_host_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (64 * 2**30, 20 * 2**30)
    kernel.GlobalMemoryStatusEx = lambda _: 0
    with pytest.raises(OSError, match="budget="):
        read_host_memory(tmp_path)
