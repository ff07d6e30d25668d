"""Plans that are run on the CPU for comparison with the planner, with the options that change memory."""

from __future__ import annotations

from typing import Any

KEYS = {
    "dp": "Distributed.dp_degree",
    "mp": "Distributed.mp_degree",
    "pp": "Distributed.pp_degree",
    "sep": "Distributed.sep_degree",
    "sharding": "Distributed.sharding.sharding_degree",
    "stage": "Distributed.sharding.sharding_stage",
    "sp": "Model.sequence_parallel",
    "vpp": "Model.virtual_pp_degree",
    "micro": "Global.micro_batch_size",
    "batch": "Global.global_batch_size",
    "recompute": "Model.recompute_granularity",
    "chunks": "Model.loss_chunks",
    "schedule": "Distributed.pp_schedule",
    "p2p": "Distributed.overlap_p2p_comm",
}
MEMORY_PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "full_attn"},
    {"recompute": "core_attn"},
    {"micro": 8},
    {"micro": 4, "recompute": "full"},
    {"dp": 2},
    {"dp": 2, "micro": 4, "recompute": "core_attn"},
    {"mp": 2},
    {"mp": 2, "sp": 1},
    {"mp": 2, "sp": 1, "recompute": "full"},
    {"mp": 2, "micro": 4, "recompute": "full_attn"},
    {"pp": 2},
    {"pp": 2, "recompute": "full", "batch": 16},
    {"pp": 4, "batch": 16, "p2p": 1},
    {"pp": 4, "batch": 16, "schedule": "zb_h1"},
    {"pp": 2, "batch": 16, "schedule": "zb_h1", "p2p": 1},
    {"pp": 2, "vpp": 2},
    {"sharding": 2, "stage": 1},
    {"sharding": 2, "stage": 2},
    {"sharding": 2, "stage": 3},
    {"sharding": 2, "stage": 3, "recompute": "full"},
    {"sep": 2},
    {"sep": 2, "recompute": "core_attn"},
    {"mp": 4},
    {"pp": 4, "batch": 16},
    {"dp": 2, "mp": 2, "sp": 1},
    {"mp": 2, "pp": 2},
    {"pp": 2, "sharding": 2, "stage": 2},
    {"chunks": 8, "recompute": "full"},
    {"mp": 2, "chunks": 8, "recompute": "full"},
)
TRAFFIC_PLANS: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"dp": 4},
    {"mp": 2},
    {"mp": 4},
    {"mp": 2, "sp": 1},
    {"mp": 4, "sp": 1},
    {"mp": 2, "recompute": "full"},
    {"mp": 2, "sp": 1, "recompute": "full_attn"},
    {"pp": 2},
    {"pp": 4},
    {"pp": 2, "vpp": 2},
    {"sharding": 2, "stage": 1},
    {"sharding": 2, "stage": 2},
    {"sharding": 2, "stage": 3},
    {"sharding": 4, "stage": 3},
    {"sep": 2},
    {"sep": 4},
    {"sep": 2, "recompute": "full"},
    {"dp": 2, "mp": 2},
    {"dp": 2, "pp": 2},
    {"dp": 2, "sep": 2},
    {"mp": 2, "pp": 2},
    {"mp": 2, "pp": 2, "sp": 1},
    {"mp": 2, "pp": 2, "p2p": 1},
    {"mp": 2, "pp": 2, "schedule": "zb_h1"},
    {"mp": 2, "pp": 2, "schedule": "zb_h1", "p2p": 1},
    {"mp": 2, "sharding": 2, "stage": 2},
    {"mp": 2, "sep": 2},
    {"pp": 2, "sharding": 2, "stage": 2},
    {"dp": 2, "sharding": 2, "stage": 1},
    {"pp": 2, "sep": 2},
)

O2 = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "bfloat16"}
O2["Engine.mix_precision.level"] = "O2"
OFFLOAD = {"Distributed.sharding.sharding_offload": True}
WIDE = {"Model.vocab_size": 8192, "Model.num_layers": 2}
SHORT_DEVICE_PLANS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("gpt", {"sharding": 2, "stage": 3}, O2 | OFFLOAD),
    ("gpt", {"mp": 2}, WIDE),
)
DEVICE_PLANS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    *((family, {}, more) for family in ("gpt", "llama") for more in ({}, O2)),
    *(("gpt", {"sharding": 2, "stage": stage}, more) for stage in (1, 2, 3) for more in ({}, O2)),
    *(("llama", {"sharding": 2, "stage": stage}, OFFLOAD) for stage in (2, 3)),
    *(("llama", {"sharding": 2, "stage": stage}, O2 | OFFLOAD) for stage in (2, 3)),
    ("gpt", {"sharding": 2, "stage": 2}, O2 | OFFLOAD),
    ("llama", {"sharding": 4, "stage": 3}, O2),
    ("gpt", {"dp": 2, "sharding": 2, "stage": 2}, {}),
    ("gpt", {"pp": 2}, {}),
    ("llama", {"pp": 2}, O2),
    ("llama", {"pp": 2, "vpp": 2}, {}),
    ("gpt", {"pp": 4, "batch": 16}, {}),
    ("gpt", {"pp": 2, "batch": 16, "schedule": "zb_h1"}, {}),
    ("gpt", {"pp": 2, "batch": 16, "recompute": "full"}, {}),
    ("gpt", {"pp": 2, "sharding": 2, "stage": 2}, O2),
    ("llama", {"mp": 2, "sp": 1}, {}),
    ("llama", {"mp": 2, "chunks": 8}, WIDE),
    ("gpt", {"mp": 2, "pp": 2}, WIDE),
    ("gpt", {"sep": 2}, {}),
    ("gpt", {"recompute": "core_attn"}, {}),
)
"""Of a card: model family, plan, and other keys. The short ones are in the suite."""


def overrides(plan: dict[str, Any]) -> dict[str, Any]:
    """Configuration keys of a plan."""
    values = {KEYS[word]: bool(value) if word in ("sp", "p2p") else value for word, value in plan.items()}
    return values | ({"Model.use_recompute": "true"} if "recompute" in plan else {})


def device_plan_name(family: str, plan: dict[str, Any], more: dict[str, Any]) -> str:
    """For people."""
    words = [f"{key} {value}" for key, value in plan.items()] or ["one card"]
    kinds = {"O2": O2, "offload": OFFLOAD, "wide": WIDE}
    words += [word for word, keys in kinds.items() if keys.items() <= more.items()]
    return f"{family}: {', '.join(words)}"


def world_size(plan: dict[str, Any]) -> int:
    """Its number of ranks."""
    world = 1
    for axis in ("dp", "mp", "pp", "sep", "sharding"):
        world *= plan.get(axis, 1)
    return world
