"""Rules of MindSpeed-Core-MS where it differs from Megatron."""

from __future__ import annotations

import os

from ppfleetx.dialects.megatron.network_rules import TENSOR
from ppfleetx.dialects.mindspeed.keys import LLM, PRECISION
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translation import Translation

_FUSED = (
    "flash_attention",
    "rope",
    "rmsnorm",
    "swiglu",
    "masked_softmax",
    "gradient_accumulation",
    "layernorm",
)
_FLOAT32 = ("float32", "fp32")
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def network(reading: Reading, result: Translation) -> None:
    """The blocks of ``model_config.llm``, and initial weights."""
    _attention(reading, result)
    unit, padded = f"{LLM}.tokenizer.divided_by", "padded_vocab_size"
    if unit in reading and padded in reading:
        size, divisor = reading.integer(padded, least=1), reading.integer(unit, least=1)
        tensor = reading.integer(TENSOR, 1, least=1)
        if size % divisor or size % tensor:
            raise reading.conflict((padded, unit, TENSOR), f"must divide by {divisor} and by {tensor} ranks")
    result.put("Model.scale_output_init", False, why="initial weights there do not depend on the depth")


def _attention(reading: Reading, result: Translation) -> None:
    kind, groups = f"{LLM}.blocks.attention.attention_type", f"{LLM}.blocks.attention.kv_group_size"
    which = reading.choice(kind, ("MHA", "GQA", "MQA"))
    number = reading.integer(groups, least=1)
    if which == "MQA" and number not in (None, 1):
        raise reading.conflict((groups, kind), "multi-query attention has one key/value head")
    if which == "GQA" and number is None:
        raise reading.error(kind, "needs kv_group_size, the number of key/value heads")
    if which == "MQA" or (which == "GQA" and number is not None):
        result.put("Model.num_query_groups", number or 1, *reading.origins(kind, groups))


def precision(reading: Reading, result: Translation) -> None:
    """What ``accelerate_config.precision`` says beside the two types."""
    softmax, residual, fused = (
        f"{PRECISION}.{name}" for name in ("softmax_compute_dtype", "residual-connection", "fused_operators")
    )
    if softmax in reading:
        result.put("Model.softmax_in_fp32", reading.text(softmax) in _FLOAT32, *reading.origins(softmax))
    dtype = result.native.get("Engine.mix_precision.dtype")
    if residual in reading and dtype is not None:
        written = reading.text(residual)
        if _WORDS.get(written, written) != dtype.value:
            raise reading.error(
                residual, f"must be {dtype.value}, the type of compute_dtype: branches are added in it"
            )
    if fused in reading:
        words = [word.strip() for word in reading.text(fused).split(",")]
        if strange := [word for word in words if word not in _FUSED]:
            raise reading.error(fused, f"{strange[0]!r} is not one of {', '.join(_FUSED)}")
        if "flash_attention" in words:
            result.put("Model.use_flash_attn", True, *reading.origins(fused))


def checkpoints(reading: Reading, result: Translation) -> None:
    """``load_checkpoint`` gives weights to a new run; with ``resume_training`` the run goes on."""
    prefix, save, load = "Engine.save_load", reading.text("save", "./output"), reading.text("load")
    result.put(
        f"{prefix}.output_dir", save, *reading.origins("save"), why="" if "save" in reading else "its default"
    )
    interval = reading.integer("save_interval", 0, least=0)
    why = "" if "save_interval" in reading else "save_interval is not given: only at the end"
    result.put(f"{prefix}.save_steps", interval, *reading.origins("save_interval"), why=why)
    origins = reading.origins("resume_training", "load", "save")
    if not reading.flag("resume_training", False):
        if load is not None:
            result.put(
                f"{prefix}.init_from", load, *origins, why="without resume_training: its weights alone"
            )
    elif load is None or os.path.normpath(load) == os.path.normpath(save):
        result.put(f"{prefix}.resume", True, *origins)
    else:
        result.put(f"{prefix}.ckpt_dir", load, *origins)
