"""Values kept aside: every dtype, layout and bit, in host memory or in a file that is gone afterwards."""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workloads import differences

from autobatch.errors import DoesNotFit
from autobatch.torch_internals.storages import storages_of
from autobatch.undo.training_state import HostCopies

IN_MEMORY, IN_A_FILE = 2**40, 0

places = pytest.mark.parametrize("host_bytes", [IN_MEMORY, IN_A_FILE], ids=["in memory", "in a file"])


def nans():
    """Float NaNs that differ in sign and payload, and a negative zero."""
    bits = torch.tensor([0x7FC00000, 0xFFC00001, 0x7FA12345, 0x80000000], dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def scramble(tensor):
    """Every byte another one."""
    for storage in storages_of(tensor):
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        raw.bitwise_not_()


TENSORS = {
    "float32": lambda: torch.randn(7, 3),
    "bool": lambda: torch.tensor([True, False, True]),
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "float16": lambda: torch.randn(5).half(),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "complex64": lambda: torch.randn(5, dtype=torch.complex64),
    "int8": lambda: torch.arange(-5, 5, dtype=torch.int8),
    "int64 scalar": lambda: torch.tensor(2**62),
    "payloads of NaN": nans,
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a storage": lambda: torch.randn(10)[3:7],
    "expanded": lambda: torch.randn(3, 1).expand(3, 9),
    "conjugate view": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "sparse columns": lambda: torch.eye(4).to_sparse_csc(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@places
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:.*prototype stage")
def test_every_tensor_comes_back_bit_for_bit(name, host_bytes):
    """Dtypes, layouts, views and the bits of NaN, after every byte of the storage was changed, twice."""
    tensor = TENSORS[name]()
    expected = [list(bytes(storage)) for storage in storages_of(tensor)]
    assert expected
    with closing(HostCopies([tensor], host_bytes=host_bytes)) as copies:
        for _ in range(2):
            scramble(tensor)
            copies.restore()
            assert [list(bytes(storage)) for storage in storages_of(tensor)] == expected


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    host_bytes=st.sampled_from([IN_MEMORY, IN_A_FILE, 50]),
    seed=st.integers(0, 2**31),
)
def test_any_set_of_tensors_comes_back(sizes, host_bytes, seed):
    """Of any number and size, views among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [tensor[: tensor.numel() // 2] for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    with closing(HostCopies(tensors, host_bytes=host_bytes)) as copies:
        for tensor in tensors:
            tensor.fill_(7)
        copies.restore()
    assert not differences(dict(enumerate(tensors)), dict(enumerate(expected)))


def test_the_tensor_stays_the_same_memory():
    """Values return into the very memory they were in: whoever shares it sees them too."""
    tensor = torch.arange(6.0)
    view, address, version = tensor[2:4], tensor.data_ptr(), tensor._version
    with closing(HostCopies([tensor], host_bytes=IN_MEMORY)) as copies:
        tensor.data.zero_()
        copies.restore()
    assert (tensor.data_ptr(), tensor._version) == (address, version)
    assert view.tolist() == [2, 3]


def test_a_shared_storage_is_copied_once():
    """Two views, or a tied weight, cost one copy."""
    tensor = torch.arange(100.0)
    with closing(HostCopies([tensor, tensor[3:], tensor.view(10, 10)], host_bytes=400)) as copies:
        assert len(copies.saved) == 1
        assert copies._folder is None  # 400 bytes are 400 bytes: nothing had to go to a file


def test_a_resized_storage_gets_its_size_back():
    """What was resized, or freed as sharded training does, is as large as before and holds the old bytes."""
    tensor, freed = torch.arange(10.0), torch.arange(5.0)
    with closing(HostCopies([tensor, freed], host_bytes=IN_MEMORY)) as copies:
        tensor.resize_(1000).zero_()
        freed.untyped_storage().resize_(0)
        copies.restore()
    assert tensor[:10].tolist() == list(range(10))
    assert tensor.untyped_storage().nbytes() == 40
    assert freed.tolist() == list(range(5))


@pytest.mark.parametrize("make", [lambda: torch.ones(3, device="meta"), lambda: torch.ones(3).to_mkldnn()])
def test_what_has_no_storage_is_passed_over(make):
    """Meta tensors have no values, opaque ones do not show theirs."""
    tensor = make()
    assert list(storages_of(tensor)) == []
    with closing(HostCopies([tensor], host_bytes=IN_MEMORY)) as copies:
        copies.restore()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_file_is_gone_afterwards(folder):
    """While it is needed the copies lie in one folder, and none of it stays."""
    tensor = torch.arange(1000.0)
    with closing(HostCopies([tensor, torch.ones(3), torch.empty(0)], host_bytes=4000)) as copies:
        [inside] = folder.iterdir()
        assert inside.name.startswith("autobatch-")
        assert sum(file.stat().st_size for file in inside.iterdir()) == 4012
        tensor.zero_()
        copies.restore()
    assert list(folder.iterdir()) == []
    assert tensor[999] == 999
    copies.close()  # a second time does nothing


def test_the_file_is_gone_after_an_interrupt(folder):
    """Also when the block ends by Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), closing(HostCopies([torch.ones(9)], host_bytes=0)):
        raise KeyboardInterrupt
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_written(folder, monkeypatch):
    """A mapped file on a full disk would end the process: so it is asked first."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(DoesNotFit, match=r"1\.0 KiB, but host memory has 10 bytes for it and .* 100 bytes; .*TMPDIR"):
        HostCopies([torch.ones(256)], host_bytes=10)
    assert list(folder.iterdir()) == []


def test_nothing_stays_in_memory():
    """The copies go with the block; the tensors were never copied on their device."""
    with closing(HostCopies([torch.ones(9)], host_bytes=IN_MEMORY)) as copies:
        references = [weakref.ref(part) for pair in copies.saved.values() for part in pair]
    gc.collect()
    assert [reference() for reference in references] == [None, None]
