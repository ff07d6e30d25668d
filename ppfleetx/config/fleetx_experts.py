"""Rewrite FleetX's keys for mixtures of experts, in both of its layouts, as ``Model.moe``.

FleetX's gates weight experts by raw logits, count some choices twice and scale their loss by the number of
experts on a rank. Here only the names are kept: the formulas are this program's own, and a warning says so.
"""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import Node, node_of, plain_value

_LOSSES = {"gshard": "gshard", "switch": "switch", "naive": "none"}
_OF_SECTION = ("expert_mode", "gate", "top_k", "num_experts")
# Keys of the later layout (examples/transformer), besides num_experts.
_FLAT = (
    "expert_interval", "topk", "moe_use_residual", "moe_train_capacity_factor", "moe_eval_capacity_factor",
    "moe_min_capacity", "moe_token_dropping", "enable_expert_tensor_parallelism", "balance_loss_weight",
)  # fmt: skip

_UNREAD = ("moe_eval_capacity_factor", "moe_min_capacity")


def rewrite_experts(tree: Node) -> list[str]:
    """Rewrite a configuration's expert keys in place, and return warnings."""
    model, engine = _section(tree, "Model"), _section(tree, "Engine")
    given, flat = model.pop("moe_configs", None), {key: model.pop(key) for key in _FLAT if key in model}
    number = model.pop("num_experts", None) if flat else None
    weight = engine.pop("balance_loss_weight", None) or flat.get("balance_loss_weight")
    for key, dense in (("module", "GPTModule"), ("name", "GPT")):
        if key in model and model[key].value in ("MoEModule", "MoE"):
            model[key] = Node(dense, model[key].place)
    mode = given.value.get("expert_mode") if given is not None and isinstance(given.value, dict) else None
    if mode is not None and mode.value is False:
        return [f"Model.moe_configs ({given.place}) is not used: expert_mode is False"]
    unread: list[str] = []
    if given is not None and given.value is not None:
        place, unread = given.place, [*flat]
        moe, degree = _of_section(_checked(given), _section(tree, "Distributed"))
    elif number is not None and _count("Model.num_experts", number) > 1:
        place, degree = number.place, 1
        moe = _of_flat(number, flat, model)
        unread = [key for key in _UNREAD if key in flat and flat[key].value is not None]
        slices = flat.get("enable_expert_tensor_parallelism")
        if slices is not None and slices.value is False:
            _section(tree, "Distributed")["expert_mp_degree"] = Node(1, slices.place)
    else:
        return [
            f"Model.{key} ({node.place}) is not used: the model has no experts" for key, node in flat.items()
        ]
    if moe["aux_loss"]["kind"] != "none" and weight is not None:
        moe["aux_loss"]["weight"] = weight.value
    model["moe"] = node_of(moe, place)
    if degree > 1:
        _section(tree, "Distributed")["ep_degree"] = Node(degree, place)
    made = ", ".join(f"{key} {value}" for key, value in moe.items() if not isinstance(value, dict | list))
    notes = [f"Model.{key} ({flat[key].place}) is not used: Model.moe has no such setting" for key in unread]
    return [
        *notes,
        f"FleetX's experts ({place}) are read as Model.moe ({made}), by formulas that do not depend on "
        "the plan: experts are weighted by probabilities, and the balancing loss is E sum(f P)",
    ]


def _checked(section: Node) -> dict[str, Node]:
    """The keys of ``moe_configs``, checked."""
    keys = section.value
    if not isinstance(keys, dict):
        value = plain_value(section)
        raise ConfigError("must be a section", key="Model.moe_configs", value=value, place=section.place)
    if unknown := [key for key in keys if key not in _OF_SECTION]:
        key, place = unknown[0], keys[unknown[0]].place
        raise ConfigError(
            f"there is no such key; those that are: {', '.join(_OF_SECTION)}",
            key=f"Model.moe_configs.{key}",
            place=place,
        )
    return keys


def _of_section(keys: dict[str, Node], distributed: dict[str, Node]) -> tuple[dict[str, Any], int]:
    """Convert ``moe_configs``: every layer is a mixture, and the number of experts is per rank."""
    gate = plain_value(keys["gate"]) if "gate" in keys else "gshard"
    if gate not in _LOSSES:
        raise ConfigError(
            f"must be one of {', '.join(_LOSSES)}",
            key="Model.moe_configs.gate",
            value=gate,
            place=keys["gate"].place,
        )
    degree = 1
    for key in ("dp_degree", "mp_degree"):
        node = distributed.get(key)
        if node is None or node.value is None:
            continue
        degree *= _count(f"Distributed.{key}", node)
    each = _count("Model.moe_configs.num_experts", keys["num_experts"]) if "num_experts" in keys else 1
    top_k = _count("Model.moe_configs.top_k", keys["top_k"]) if "top_k" in keys else 2
    moe = {
        "num_experts": each * degree,
        "top_k": 1 if gate == "switch" else top_k,
        "router": {"normalize": gate != "switch"},
        "aux_loss": {"kind": _LOSSES[gate]},
    }
    return moe, degree


def _of_flat(number: Node, flat: dict[str, Node], model: dict[str, Node]) -> dict[str, Any]:
    """Convert the keys that lie beside the sizes of the network and have DeepSpeed's names."""
    residual = flat.get("moe_use_residual")
    if residual is not None and residual.value is True:
        raise ConfigError(
            "a dense block beside the experts, weighted, is not built; Model.moe.shared_experts is",
            key="Model.moe_use_residual",
            value=True,
            place=residual.place,
        )

    def count(key: str, default: int) -> int:
        return _count(f"Model.{key}", flat[key]) if flat.get(key) else default

    interval, top_k = count("expert_interval", 2), count("topk", 1)
    layers = _count("Model.num_layers", model["num_layers"]) if "num_layers" in model else 0
    drops = flat.get("moe_token_dropping")
    factor = flat.get("moe_train_capacity_factor")
    moe: dict[str, Any] = {
        "num_experts": _count("Model.num_experts", number),
        "top_k": top_k,
        "layers": list(range(interval - 1, layers, interval)),
        "router": {"normalize": top_k > 1},
        "aux_loss": {"kind": "switch" if top_k == 1 else "gshard"},
    }
    if drops is None or drops.value is not False:
        whole = 1.0 if factor is None or factor.value is None else factor.value
        moe["capacity"] = {"factor": whole, "policy": "position"}
    return moe


def _section(tree: Node, name: str) -> dict[str, Node]:
    """The keys of a section; for an absent one, an empty mapping that is discarded."""
    node = tree.value.get(name)
    return node.value if node is not None and isinstance(node.value, dict) else {}


def _count(key: str, node: Node) -> int:
    """Parse a number of at least 1. A file of FleetX itself has a comma after the number."""
    text = str(node.value).rstrip(",")
    if isinstance(node.value, bool) or not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "must be an integer of at least 1", key=key, value=plain_value(node), place=node.place
        )
    return int(text)
