"""Everything derived from parameter declarations, against tables and independent counts."""

import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ppfleetx.config.mesh import EXPERTS, Mesh
from ppfleetx.config.parallel_plan import AXES, ParallelPlan, enumerate_plans
from ppfleetx.config.sections.compress import CompressConfig, QuantizationConfig, WeightsConfig
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.models.gpt.stages import gpt_classification_stages, gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.attention_spec import qkv_parts
from ppfleetx.nn.fake_quant import with_quantizers
from ppfleetx.nn.init import Constant
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.mlp_spec import GATE_AND_UP
from ppfleetx.nn.param_spec import (
    PARTIAL,
    ParamSpec,
    Shard,
    counts_in_norm,
    gradient_sums,
    groups_needed,
    kept_equal_over,
    norm_axes,
    owner_axes,
    placed,
    writes_to_checkpoint,
)
from ppfleetx.nn.quantized import with_quantized_weights
from tests.models.gpt_builders import VARIANTS, tiny_config
from tests.parity.every_plan import workload

COLUMN, ROW = r".*(qkv|fc1)", r".*(out_proj|fc2)"
FACTS = [  # name; the dimension that is cut along mp; when its gradient is a part of a sum over mp
    (r"embedding\.word_embeddings\.(weight|scale)", 0, "never"),
    (r"embedding\.position_embeddings\.weight|score\.weight", None, "never"),
    (r"head\.(weight|scale)", 1, "never"),
    (r"head\.bias", 0, "never"),
    (r".*\.[qk]_norm\.(weight|bias)", None, "always"),
    (r".*_norm\.(weight|bias)", None, "sequence"),
    (rf"{COLUMN}\.weight|{COLUMN}\.lora\.b|{COLUMN}\.scale", 1, "never"),
    (rf"{COLUMN}\.bias|{ROW}\.weight|{ROW}\.lora\.a", 0, "never"),
    (rf"{ROW}\.bias|{COLUMN}\.lora\.a|{ROW}\.lora\.b", None, "sequence"),
    (rf"{ROW}\.scale|.*\.quant\.input_scale", None, "never"),
    (rf".*\.quant\.weight_clip|{ROW}\.quant\.input_clip", None, "always"),
    (rf"{COLUMN}\.quant\.input_clip", None, "sequence"),
]
PACT = {"weight_preprocess_type": "PACT", "activation_preprocess_type": "PACT"}
LLAMA, HEAD_NORMS = VARIANTS["llama"], VARIANTS["window_normed_heads"]


def models(factory):
    """Stages of small models of every kind."""
    gpt, llama = tiny_config(num_layers=1), tiny_config(num_layers=1, **LLAMA, add_head_bias=True)
    lora = tiny_config(num_layers=1, lora={"rank": 4})
    yield gpt_stages(gpt, factory)
    yield gpt_stages(llama, factory)
    yield gpt_stages(tiny_config(num_layers=1, sandwich_norm=True, **HEAD_NORMS), factory)
    yield gpt_stages(lora, factory)
    yield gpt_classification_stages(gpt, factory, 3)
    quantization = QuantizationConfig(enable=True, **PACT)
    yield with_quantizers(gpt_stages(gpt, factory), quantization, factory, follows=True)
    for weights in ({"bits": 8}, {"bits": 8, "skip": ("head",)}):
        yield with_quantized_weights(gpt_stages(llama, factory), WeightsConfig(**weights), factory)


def built(sequence_parallel: bool) -> dict[str, list[ParamSpec]]:
    factory, specs = LocalFactory(), {}
    factory.sequence_parallel = sequence_parallel
    for stages in models(factory):
        for parameter in StagedModel(stages, None).parameters():
            assert parameter.spec.name == parameter.info.name
            specs.setdefault(parameter.spec.name, []).append(parameter.spec)
    return specs


@pytest.fixture(scope="module")
def declared():
    """Declarations by name, without and with sequence parallelism."""
    return [built(False), built(True)]


def facts_of(name: str) -> tuple[int | None, str]:
    return next(facts for pattern, *facts in FACTS if re.fullmatch(pattern, name))


def ranks_alike(plan: ParallelPlan, rank: int, *but: str) -> list[int]:
    """The ranks that have the coordinates of ``rank`` on all axes except ``but``."""
    at = plan.coordinates(rank)
    same = [axis for axis in AXES if axis not in but]
    return [r for r in range(plan.world_size) if all(plan.coordinates(r)[a] == at[a] for a in same)]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_follows_is_what_each_parameter_needs(declared, size):
    degrees = {(p.dp, p.mp, p.pp, p.sharding, p.sep, p.sequence_parallel): p
               for p in enumerate_plans(size, workload("llama"))}  # fmt: skip
    for plan, rank in product(degrees.values(), {0, size // 2, size - 1}):
        mesh, at = Mesh(plan), plan.coordinates(rank)
        for name, specs in declared[plan.sequence_parallel].items():
            dim, partial = facts_of(name)
            for spec in specs:
                if any(size % plan.mp for d, size in enumerate(spec.shape) if d == dim):
                    continue
                cut = [plan.mp if d == dim else 1 for d in range(len(spec.shape))]
                info = placed(spec, mesh, rank)
                assert info.local_shape == tuple(s // n for s, n in zip(spec.shape, cut, strict=True))
                assert info.offset == tuple(n * at["mp"] * (d == dim) for d, n in enumerate(info.local_shape))
                is_partial = partial == "always" or (partial == "sequence" and plan.sequence_parallel)
                wanted = [ranks_alike(plan, rank, "mp")] if is_partial else []
                wanted.append(ranks_alike(plan, rank, "dp", "sep"))
                wanted += [ranks_alike(plan, rank, "pp")] if spec.tie else []
                sums = [list(mesh.ranks_over(rank, axes)) for axes in gradient_sums(spec, mesh)]
                assert sums == [ranks for ranks in wanted if len(ranks) > 1], name
                owners = owner_axes(spec, mesh)
                assert owners == (("sharding",) if plan.sharding > 1 else ())
                assert kept_equal_over(spec, mesh) == (("mp",) if dim is None and plan.mp > 1 else ())
                one = dim is not None or at["mp"] == 0
                assert counts_in_norm(spec, mesh, rank) == one
                assert writes_to_checkpoint(spec, mesh, rank) == (one and at["dp"] == at["sep"] == 0)


def test_what_trains_and_what_is_tied(declared):
    several = declared[0]
    frozen = {name for name, specs in several.items() if any(not spec.trains for spec in specs)}
    assert {name for name in several if ".lora." in name} & frozen == set()
    assert "decoder.layers.0.input_norm.weight" in frozen and "score.weight" not in frozen
    word = several["embedding.word_embeddings.weight"]
    assert {spec.tie for spec in word} == {None, "embedding.word_embeddings"}
    assert not any(spec.tie for specs in several.values() if specs is not word for spec in specs)


QLORA = {"lora": {"rank": 4, "targets": ("decoder.layers.1.mlp.*",)}}
SMALL = {"bits": 4, "group_size": 16, "skip": ("head",)}


@pytest.mark.parametrize(
    ("keys", "compress"),
    [
        *((keys, {}) for keys in ({}, LLAMA, HEAD_NORMS, {"lora": {"rank": 4}})),
        *(
            ({}, {"Quantization": {"enable": True, **more}})
            for more in ({}, PACT, {"freeze_embedding": True})
        ),
        (QLORA, {"Quantization": {"enable": True, **PACT}}),
        *((keys, {"Weights": weights}) for keys in (LLAMA, QLORA) for weights in (SMALL, {"bits": 8})),
    ],
    ids=str,
)
def test_the_arithmetic_declares_what_layers_do(keys, compress):
    cfg, factory, compress = tiny_config(**keys), LocalFactory(), CompressConfig(**compress)
    factory.sequence_parallel, stages = True, gpt_stages(cfg, factory)
    if compress.quantization is not None:
        stages = with_quantizers(stages, compress.quantization, factory, follows=cfg.lora is None)
    stages = with_quantized_weights(stages, compress.Weights, factory)
    built = {p.spec.name: p.spec for p in StagedModel(stages, None, empty=True).parameters()}
    counted = parameter_specs(cfg, compress)
    assert counted.keys() == built.keys()
    for name, spec in counted.items():
        is_summed = {axis: what for axis, what in built[name].grad.items() if axis != "pp"}  # copies of a tie
        assert replace(built[name], tie=None, grad=is_summed) == spec


def test_parts_are_the_columns_that_layers_take():
    groups, queries, width = 3, 2, 4
    columns = np.arange(groups * (queries + 2) * width)
    heads = columns.reshape(groups, queries + 2, width)
    wanted = {"q": heads[:, :queries], "k": heads[:, queries], "v": heads[:, queries + 1]}

    def indices(part, size):
        return [at for at in range(size) if part.offset <= at % part.period < part.offset + part.width]

    parts = {part.name: indices(part, columns.size) for part in qkv_parts(queries, width)}
    assert parts == {name: part.flatten().tolist() for name, part in wanted.items()}
    assert [indices(part, 6) for part in GATE_AND_UP] == [[0, 2, 4], [1, 3, 5]]


EXPERT = ParamSpec((8, 6), Constant(), "matrix", {"ep": Shard(0)}, {"edp": PARTIAL})
CUT_EXPERT = ParamSpec((8, 6, 4), Constant(), "matrix", {"ep": Shard(0), "emp": Shard(2)}, {"edp": PARTIAL})
SHARED = ParamSpec((6,), Constant(), "bias", {}, {"edp": PARTIAL, "ep": PARTIAL, "emp": PARTIAL})


@pytest.mark.parametrize(
    ("plan", "ep", "emp"),
    [
        (ParallelPlan(dp=2), 2, 1),
        (ParallelPlan(dp=4), 2, 1),
        (ParallelPlan(dp=2, mp=2), 2, 2),
        (ParallelPlan(mp=4), 2, 1),
        (ParallelPlan(dp=2, pp=2), 2, 1),
        (ParallelPlan(sharding=4), 2, 1),
        (ParallelPlan(dp=2, sharding=2, sep=2, pp=2), 4, 1),
        (ParallelPlan(dp=2, sharding=2, mp=2), 2, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", [EXPERT, CUT_EXPERT, SHARED], ids=["whole", "cut", "shared"])
def test_of_experts_each_element_is_written_and_counted_once(plan, ep, emp, spec):
    mesh = Mesh(replace(plan, ep=ep, expert_mp=emp))
    ranks = [rank for rank in range(plan.world_size) if plan.coordinates(rank)["pp"] == 0]
    assert mesh.size_of("edp") * ep * emp == len(ranks)
    axes = owner_axes(spec, mesh)
    owner = {rank: not axes or mesh.ranks_over(rank, axes)[-1] == rank for rank in ranks}
    written = np.zeros(spec.shape, int)
    for rank in ranks:
        if owner[rank] and writes_to_checkpoint(spec, mesh, rank):
            info = placed(spec, mesh, rank)
            written[tuple(slice(o, o + n) for o, n in zip(info.offset, info.local_shape, strict=True))] += 1
    assert (written == 1).all()
    normed = norm_axes(EXPERTS, mesh)
    for rank in ranks:
        group = mesh.ranks_over(rank, normed) if normed else (rank,)
        counted = [r for r in group if owner.get(r) and counts_in_norm(spec, mesh, r)]
        sizes = [math.prod(placed(spec, mesh, r).local_shape) for r in counted]
        assert sum(sizes) == math.prod(spec.shape), "squares that are summed are those of the whole"
    summed = [axis for axes in gradient_sums(spec, mesh) for axis in axes] + list(axes)
    assert sorted(summed) == sorted(a for a in spec.grad if mesh.size_of(a) > 1)
    needed = groups_needed([spec], mesh)
    assert set(gradient_sums(spec, mesh)) <= set(needed) and {(axis,) for axis in normed} <= set(needed)


def test_the_views_are_the_same_ranks():
    mesh = Mesh(ParallelPlan(dp=2, pp=2, sharding=2, mp=2, ep=2))
    dense = [mesh.ranks_over(5, (axis,)) for axis in ("mp", "sharding")]
    assert [mesh.ranks_over(5, (axis,)) for axis in ("emp", "ep")] == dense
    assert mesh.ranks_over(5, ("edp",)) == mesh.ranks_over(5, ("dp",)) == (5, 13)
    assert Mesh(ParallelPlan(dp=2, mp=2, ep=2, expert_mp=1)).ranks_over(0, ("ep",)) == (0, 1)
    with pytest.raises(ValueError, match="do not divide by ep 3"):
        Mesh(ParallelPlan(dp=4, ep=3))
    with pytest.raises(ValueError, match="no view"):
        mesh.ranks_over(0, ("ep", "mp"))
    odd = ParamSpec((7, 6), Constant(), "matrix", {"ep": Shard(0)}, name="experts")
    with pytest.raises(ValueError, match="experts of shape"):
        placed(odd, mesh, 0)
