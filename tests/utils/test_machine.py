import mmap

import numpy as np

from ppfleetx.utils import machine
from ppfleetx.utils.machine import available_bytes, available_fraction, back_by_huge_pages


def test_available_fraction(tmp_path, monkeypatch) -> None:
    assert 0 < available_fraction() <= 1
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    assert available_fraction() == 1.0
    assert available_bytes() is None
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n"
    )
    assert available_fraction() == 0.25
    assert available_bytes() == 250 << 10


def test_huge_pages_keep_what_was_written() -> None:
    with mmap.mmap(-1, 8 << 20) as block:
        array = np.frombuffer(block, dtype=np.uint32)
        array[:] = np.arange(array.size)
        back_by_huge_pages(array.ctypes.data, array.nbytes)
        back_by_huge_pages(array.ctypes.data + 4096, (4 << 20) + 100)
        assert (array == np.arange(array.size)).all()
        del array
