"""Out of memory: one message with what holds the memory and the cheapest cures."""

import re

import pytest

from ppfleetx.config.errors import DeviceError, OutOfMemoryError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.core.engine import device_errors
from ppfleetx.core.engine.callbacks.device_usage import offload_notes
from ppfleetx.core.engine.device_errors import explained_device_errors
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.planner.alternatives import memory_savings
from ppfleetx.planner.prediction import run_prediction

PADDLE = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::memory::allocation::CUDAAllocator::AllocateImpl(unsigned long)

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError:

Out of memory error on GPU 0. Cannot allocate 2.000000GB memory on GPU 0, 30.1GB memory has been allocated.

Please check whether there is any other process using GPU 0.
"""
CONFIG = "gpt/pretrain_gpt_345M_single_card"


def config(*overrides: str):
    return load_config(CONFIG, ["Data.Train.dataset.input_dir=x", *overrides], world_size=1)


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, OSError])
def test_one_message_says_what_holds_the_memory_and_what_would_not(kind):
    cfg = config("Global.micro_batch_size=8", "Global.local_batch_size=8", "Global.global_batch_size=8")
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explained_device_errors(cfg, ParallelContext.single("gpu")),
    ):
        raise kind(PADDLE)
    first, holds, cheapest, *cures = str(caught.value).splitlines()
    assert first.startswith("out of memory (")
    assert first.endswith("Cannot allocate 2.000000GB memory on GPU 0, 30.1GB memory has been allocated.")
    assert re.fullmatch(
        r"Predicted memory at the peak: (\w+ [\d.]+ [GM]iB, )+\w+ [\d.]+ [GM]iB; in total .*",
        holds,
    )
    assert "activations" in holds and "optimizer" in holds
    assert cheapest == "What needs less, the cheapest first:"
    assert len(cures) == 3
    assert all(re.fullmatch(r"  (-o \S+ ?)+  saves [\d.]+ [GM]iB, .*", cure) for cure in cures), cures


@pytest.mark.parametrize(
    "text",
    [
        "(External) CUBLAS error(3). \n  [Hint: Please search for the error code(3) on website]",
        "(External) CUDNN error(2), CUDNN_STATUS_ALLOC_FAILED.",
        "(External) CUDA error(2), out of memory.",
    ],
)
def test_a_library_that_finds_no_memory_is_out_of_memory_too(text):
    assert device_errors.is_out_of_memory(OSError(text))
    assert not device_errors.is_out_of_memory(OSError("(External) CUBLAS error(7)."))


_TRACE = """
--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
6   paddle::memory::allocation::Allocator::Allocate(unsigned long)
7   {place}
15  common::enforce::EnforceNotMet::EnforceNotMet(common::ErrorSummary const&, char const*, int)

----------------------
Error Message Summary:
----------------------
ExternalError:  CustomDevice error, the error code is : {code}.  (at custom_device.cc:387)
"""


@pytest.mark.parametrize("code", [2, 207001])
def test_an_allocator_of_a_plugin_that_fails_is_out_of_memory(code):
    """It gives a number and no word of memory; another error of the device, with the same number, is none."""
    allocator = "paddle::memory::allocation::CustomAllocator::AllocateImpl(unsigned long)"
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explained_device_errors(None, ParallelContext.single(), "Less."),
    ):
        raise OSError(_TRACE.format(code=code, place=allocator))
    assert f"code is : {code}" in str(caught.value).splitlines()[0]
    of_stream = _TRACE.format(code=code, place="phi::CustomDevice::SynchronizeStream(unsigned long, void*)")
    of_cuda = _TRACE.format(code=code, place=allocator).replace("CustomDevice error", "CUDA error")
    assert not any(device_errors.is_out_of_memory(OSError(text)) for text in (of_stream, of_cuda))


def test_the_card_is_that_of_the_run(monkeypatch):
    """On a V100 flash attention cannot run: its activations are larger than an A100's."""
    held = {}
    for name in ("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"):
        monkeypatch.setattr(device_errors, "device_name", lambda device, name=name: name)
        cfg = config("Global.card=null")
        told = device_errors.message(MemoryError("x"), cfg, ParallelContext.single("gpu"))
        held[name] = re.search(r"activations ([\d.]+ \w+)", told).group(1)
    assert len(set(held.values())) == 2, held


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match=r"^something else$"), explained_device_errors(None, None):
        raise RuntimeError("something else")


def test_each_cure_can_be_pasted_and_keeps_its_promise():
    sizes = ["Global.micro_batch_size=8", "Global.local_batch_size=8", "Global.global_batch_size=8"]
    before = run_prediction(config(*sizes), "gpu")
    found = memory_savings(before)
    assert len(found) >= 3
    assert [round(cure.costs, 2) for cure in found] == sorted(round(cure.costs, 2) for cure in found)
    for cure in found:
        options = [word for word in cure.options.split() if word != "-o"]
        kept = [one for one in sizes if one.split("=")[0] not in cure.options]
        after = run_prediction(config(*kept, *options), "gpu")
        assert before.fullest - after.fullest == pytest.approx(cure.saves, rel=1e-6), cure


@pytest.mark.parametrize(
    "error",
    [
        OSError(_TRACE.format(code=2, place="phi::CustomDevice::SynchronizeStream(unsigned long, void*)")),
        OSError("(External) CUDA error(700), an illegal memory access was encountered. (at enforce.h:327)"),
    ],
    ids=["plugin", "cuda"],
)
def test_an_error_of_the_card_is_one_message(error):
    with pytest.raises(DeviceError) as caught, explained_device_errors(None, ParallelContext.single("npu")):
        raise error
    first, noticed, *_ = str(caught.value).splitlines()
    assert first.startswith("npu has failed") and ("code is : 2" in first or "illegal memory" in first)
    assert "test_device_errors.py" in noticed and "FLAGS_npu_blocking_run" in noticed


def test_offload_on_a_cpu_is_said_to_save_nothing():
    plan = Plan(sharding=2, sharding_stage=2, sharding_offload=True)
    (line,) = offload_notes(ParallelContext(plan, device="cpu"))
    assert "saves nothing on a CPU" in line
    assert offload_notes(ParallelContext(plan, device="gpu")) == []
    assert offload_notes(ParallelContext(Plan(sharding=2, sharding_stage=2), device="cpu")) == []
