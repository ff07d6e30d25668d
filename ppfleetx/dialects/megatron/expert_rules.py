"""The translation rule for mixture-of-experts arguments, whose names and defaults differ between Megatron-LM
and Megatron-DeepSpeed."""

from __future__ import annotations

import ast
from typing import Any

from ppfleetx.dialects.key_tables import choice, integer, number
from ppfleetx.dialects.megatron.network_rules import TENSOR
from ppfleetx.dialects.translation import Translation

_DEEPSPEED = (
    "deepspeed", "topk", "expert_interval", "moe_loss_coeff", "moe_train_capacity_factor",
    "moe_eval_capacity_factor", "moe_min_capacity", "disable_moe_token_dropping", "moe_expert_parallel_size",
    "enable_expert_tensor_parallelism",
)  # fmt: skip
"""Arguments that exist only in Megatron-DeepSpeed."""
_LOSSES = {"aux_loss": "switch", "seq_aux_loss": "sequence", "global_aux_loss": "switch", "none": "none"}


def experts(run: Translation) -> None:
    """Translate Megatron's mixture-of-experts arguments, including the parallel degrees of experts."""
    experts_of_layer = run.read("num_experts", 0, _same_number)
    if experts_of_layer < 2:
        for key in [key for key in run.native if key.startswith("Model.moe.")]:
            del run.native[key]
        if idle := [name for name in run.given if name.startswith("moe_")]:
            run.notes.append(
                f"the network is dense (no num_experts), so these have no effect: {', '.join(idle)}"
            )
        return
    run.put("Model.moe.num_experts", experts_of_layer, "num_experts")
    is_deepspeed = any(name in run for name in _DEEPSPEED)
    _layers(run, is_deepspeed)
    _widths(run)
    _choice(run, is_deepspeed)
    _losses(run, is_deepspeed)
    _capacity(run, is_deepspeed)
    _degrees(run, is_deepspeed)


def _same_number(value: Any) -> int:
    values = value if isinstance(value, list) else [value]
    if len({*values}) != 1:
        raise ValueError("must be the same number for all layers")
    return integer(values[0], least=0)


def _layers(run: Translation, is_deepspeed: bool) -> None:
    names = ("expert_interval",) if is_deepspeed else ("moe_layer_freq", "first_k_dense_replace")
    total = run.integer("num_layers", least=1)
    if is_deepspeed:
        interval = run.integer("expert_interval", 2, least=1)
        mixtures = [layer for layer in range(total) if (layer + 1) % interval == 0]
    else:
        pattern = _expert_layers(run, total)
        first = run.integer("first_k_dense_replace", 0, least=0)
        mixtures = [layer for layer in range(total) if pattern[layer] and layer >= first]
    if len(mixtures) == total:
        return
    if "noop_layers" in run:
        raise run.conflict(("noop_layers", *names), "noop_layers needs a mixture of experts in every layer")
    if mixtures == list(range(total - len(mixtures), total)):
        run.put("Model.moe.first_dense_layers", total - len(mixtures), *names)
    else:
        run.put("Model.moe.layers", mixtures, *names)


def _expert_layers(run: Translation, total: int) -> list[int]:
    """Return a list with 1 for each layer with experts and 0 for each dense layer, as ``moe_layer_freq``
    describes. If this option is a number n, every n-th layer has experts, beginning with layer 0."""
    value = run.value("moe_layer_freq", 1)
    if isinstance(value, str) and not value.strip().isdecimal():
        try:
            value = _list_of(ast.parse(value.strip(), mode="eval").body)
        except (SyntaxError, ValueError):
            rule = "must be an integer, or lists of 0 and 1 with + and *, as in ([0]*1+[1]*26)"
            raise run.error("moe_layer_freq", rule) from None
    if isinstance(value, list):
        if len(value) != total or not {*value} <= {0, 1}:
            raise run.error("moe_layer_freq", f"must have a 0 or a 1 for each of the {total} layers")
        return value
    every = int(value) if isinstance(value, str) else run.integer("moe_layer_freq", 1)
    if every < 1:
        raise run.error("moe_layer_freq", "must be at least 1")
    return [int(layer % every == 0) for layer in range(total)]


def _list_of(node: ast.expr) -> list[int]:
    """Evaluate a sum of repeated lists such as ``[0]*1+[1]*26``. Raises ValueError for any other
    expression."""
    match node:
        case ast.List(elts=elements):
            return [_number_of(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list_of(left) + _list_of(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _list_of(left) * _number_of(right)
    raise ValueError("not a sum of lists")


def _number_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("not a number")


def _widths(run: Translation) -> None:
    width = run.integer("moe_ffn_hidden_size", least=1)
    shared = run.integer("moe_shared_expert_intermediate_size", least=1)
    names = ["moe_shared_expert_intermediate_size"]
    if count := run.integer("n_shared_experts", 0, least=0):
        names = ["n_shared_experts", "moe_ffn_hidden_size"]
        if width is None:
            raise run.error("n_shared_experts", "needs moe_ffn_hidden_size, the width of each")
        if shared not in (None, count * width):
            raise run.conflict((names[0], "moe_shared_expert_intermediate_size"), "widths differ")
        shared = count * width
    if shared is None:
        return
    run.put("Model.moe.shared_experts.ffn_size", shared, *names)
    if run.flag("moe_shared_expert_gate", False):
        run.put("Model.moe.shared_experts.gate", True, "moe_shared_expert_gate")


def _choice(run: Translation, is_deepspeed: bool) -> None:
    name = "topk" if is_deepspeed else "moe_router_topk"
    top_k = run.integer(name, 1 if is_deepspeed else 2, least=1)
    run.put("Model.moe.top_k", top_k, name)
    names = ("moe_router_score_function", "moe_router_pre_softmax", "norm_topk_prob")
    where_several = run.value(names[0]) == "sigmoid" or is_deepspeed
    normalize = top_k > 1 if where_several else not run.flag("moe_router_pre_softmax", False)
    normalize = normalize or run.flag("norm_topk_prob", False)
    run.put("Model.moe.router.normalize", normalize, *names)
    if run.flag("moe_router_enable_expert_bias", False):
        rate = run.number("moe_router_bias_update_rate", 1e-3, least=0)
        run.put("Model.moe.bias_update_rate", rate, "moe_router_bias_update_rate")
    _groups(run, top_k)


def _groups(run: Translation, top_k: int) -> None:
    names = ("moe_router_num_groups", "moe_router_group_topk")
    groups, top = (run.integer(name, least=1) for name in names)
    if groups in (None, 1):
        return
    if top is None:
        raise run.error(names[0], "needs moe_router_group_topk, the number of groups that are chosen")
    best = top_k // top
    if best not in (1, 2):
        raise run.conflict(
            names[::-1],
            f"Megatron adds up the best {best} experts of a group (moe_router_topk / moe_router_group_topk); "
            "here a group's score is its best expert's or the sum of its best two",
        )
    score = {1: "max", 2: "top2"}[best]
    for key, value in (("num_groups", groups), ("top_groups", top), ("group_score", score)):
        run.put(f"Model.moe.router.{key}", value, *names)


def _losses(run: Translation, is_deepspeed: bool) -> None:
    name = "moe_loss_coeff" if is_deepspeed else "moe_aux_loss_coeff"
    default = 0.1 if is_deepspeed else 0.0
    weight = run.read(name, default, lambda value: number(_only_one(value), least=0.0))
    kinds = "moe_router_load_balancing_type"
    loss = run.read(kinds, "switch", lambda value: choice(_LOSSES)(_only_one(value)))
    if is_deepspeed:
        loss = "gshard" if run.integer("topk", 1) > 1 else "switch"
    if run.flag("seq_aux", False):
        loss = "sequence"
    if not weight or loss == "none":
        run.put("Model.moe.aux_loss.kind", "none", name, kinds, why="no weight")
        return
    run.put("Model.moe.aux_loss.kind", loss, kinds, "seq_aux")
    run.put("Model.moe.aux_loss.weight", float(weight), name)
    if loss != "sequence":
        run.notes.append(
            f"the balancing loss {loss} takes the experts' shares from the step before, so that it does not "
            "depend on plan and micro batches; there they are those of a micro batch on a rank"
        )


def _only_one(value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if len(values) != 1:
        raise ValueError("must name one balancing loss; several at once are not supported")
    return values[0]


def _capacity(run: Translation, is_deepspeed: bool) -> None:
    names = ("moe_train_capacity_factor", "disable_moe_token_dropping")
    if not is_deepspeed:
        names = ("moe_expert_capacity_factor", "moe_token_drop_policy")
    factor = run.number(names[0], 1.0 if is_deepspeed else None)
    if factor is None or factor < 0 or (is_deepspeed and run.flag(names[1], False)):
        return  # nothing is dropped
    policy = "position" if is_deepspeed else run.choice(names[1], ("probs", "position"), "probs")
    run.put("Model.moe.capacity.factor", factor, *names)
    run.put("Model.moe.capacity.policy", policy, *names)
    run.notes.append(
        "the capacity of an expert is counted in each sequence, so that every plan drops the same tokens; "
        "there it is counted in a micro batch on a rank. Evaluation drops none"
    )


def _degrees(run: Translation, is_deepspeed: bool) -> None:
    name = "moe_expert_parallel_size" if is_deepspeed else "expert_model_parallel_size"
    degree, origins = run.integer(name, 1, least=1), run.origins(name)
    sliced = run.integer("expert_tensor_parallel_size", least=1)
    why = ""
    if is_deepspeed and not run.flag("enable_expert_tensor_parallelism", False):
        sliced, why = 1, "experts are whole without enable_expert_tensor_parallelism"
    if run.flag("moe_tp_extend_ep", False):
        degree, sliced = degree * run.integer(TENSOR, 1, least=1), 1
        origins, why = run.origins(name, "moe_tp_extend_ep", TENSOR), "tensor ranks hold whole experts"
    if degree > 1:
        run.put("Distributed.ep_degree", degree, *origins)
    if sliced is not None and sliced != run.integer(TENSOR, 1, least=1):
        origins = run.origins("expert_tensor_parallel_size", "moe_tp_extend_ep")
        run.put("Distributed.expert_mp_degree", sliced, *origins, why=why)
