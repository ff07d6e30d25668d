"""Parse a parallel plan (``--plan dp=4,mp=8,...``), apply it to a configuration, and write the result to a
file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import read_config
from ppfleetx.config.parallel_plan import CONFIG_KEYS, DEGREE_WORDS, PLAN_WORDS, ParallelPlan
from ppfleetx.config.resolve import resolve
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import dump_config
from ppfleetx.nn.cost import Recompute
from ppfleetx.planner.job import Job
from ppfleetx.utils.output_files import atomic_write, refuse_as_new_file

GRANULARITIES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanOption:
    """The parsed value of ``--plan``.

    Attributes:
        micro: the micro batch size; None if ``--plan`` has no ``micro``.
        recompute: the recompute granularity; None if ``--plan`` has no ``recompute``, or has
            ``recompute=mixed``, which means different granularities in different layers.
    """

    plan: ParallelPlan
    micro: int | None
    recompute: Recompute | None


def parse_plan(words: str, own: ParallelPlan, option: str = "--plan") -> PlanOption:
    """Parse a parallel plan, such as ``dp=4,mp=8``.

    Args:
        words: the plan as the user wrote it.
        own: the plan that provides all settings that ``words`` does not name. If such a setting contradicts
            ``words``, the default is used instead.
        option: the command-line option whose value is ``words``, for error messages.

    Raises:
        ConfigError: a word is unknown or appears twice, or its value is not allowed.
    """
    given = _parse(words, option)
    values: dict[str, object] = {
        name: _whole(given, word, option) for word, name in DEGREE_WORDS.items() if word in given
    }
    if values.get("sharding_stage", 1) not in (1, 2, 3):
        raise ConfigError("must be 1, 2 or 3", key=f"{option} stage", value=given["stage"])
    for word, name in (("sp", "sequence_parallel"), ("offload", "sharding_offload")):
        if word in given:
            values[name] = _truth(given, word, option)
    if "zb" in given:
        values["pp_schedule"] = "zb_h1" if _truth(given, "zb", option) else "1f1b"
    # From here on, a setting of ``own`` that contradicts the text gets its default.
    elif values.get("pp") == 1 or values.get("virtual_pp_degree", 1) != 1:
        values["pp_schedule"] = "1f1b"
    if "pp" in values or "virtual_pp_degree" in values:
        values["pp_layers"] = None
    if values.get("pp") == 1 and "vpp" not in given:
        values["virtual_pp_degree"] = 1
    if values.get("mp") == 1 and "sp" not in given:
        values["sequence_parallel"] = False
    recompute = given.get("recompute")
    if recompute not in (None, *GRANULARITIES, "mixed"):
        raise ConfigError(f"recompute is one of {', '.join(GRANULARITIES)}", key=option, value=words)
    micro = _whole(given, "micro", option) if "micro" in given else None
    return PlanOption(replace(own, **values), micro, None if recompute == "mixed" else recompute)


def plan_text(job: Job) -> str:
    plan, kinds = job.plan, set(job.recomputed)
    words = f"dp={plan.dp},mp={plan.mp},pp={plan.pp},sharding={plan.sharding},stage={plan.sharding_stage}"
    words += f",sep={plan.sep},vpp={plan.virtual_pp_degree},micro={job.micro_batch}"
    words += f",sp={int(plan.sequence_parallel)},offload={int(plan.sharding_offload)}"
    words += f",ep={plan.ep}" if plan.ep > 1 else ""
    words += f",emp={plan.emp}" if plan.emp != plan.mp else ""
    words += ",zb=1" if plan.pp_schedule == "zb_h1" else ""
    return words + f",recompute={kinds.pop() if len(kinds) == 1 else 'mixed'}"


def _parse(words: str, option: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in words.split(","))):
        word, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or word not in PLAN_WORDS:
            raise ConfigError(f"must be {', '.join(PLAN_WORDS)} as word=value", key=option, value=part)
        if word in given:
            raise ConfigError(f"names {word} twice", key=option, value=words)
        given[word] = value
    return given


def _whole(given: dict[str, str], word: str, option: str) -> int:
    text = given[word]
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0):
        raise ConfigError("must be an integer of at least 1", key=f"{option} {word}", value=text)
    return int(text)


def _truth(given: dict[str, str], word: str, option: str) -> bool:
    if given[word] not in ("0", "1"):
        raise ConfigError("must be 0 or 1", key=f"{option} {word}", value=given[word])
    return given[word] == "1"


@dataclass(frozen=True)
class UnresolvedConfig:
    """A configuration whose parallel plan has not been checked, because another plan will replace it.

    Attributes:
        origins: the place where each key was set, for error messages.
    """

    cfg: RunConfig
    origins: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def plan(self) -> ParallelPlan:
        """The configured parallel plan, with dp 1 if ``dp_degree`` is not set."""
        return self.cfg.plan

    def batch(self) -> int:
        """Return the global batch size under the configured plan.

        Raises:
            ConfigError: the configured batch sizes do not determine the global batch size, or contradict each
                other.
        """
        sizes, plan = self.cfg.Global, self.plan
        if sizes.global_batch_size is not None:
            return sizes.global_batch_size
        if sizes.local_batch_size is not None:
            return sizes.local_batch_size * plan.data_size
        return self._resolved_batch().global_batch_size

    def micro_batch(self) -> int:
        return self.cfg.Global.micro_batch_size or self._resolved_batch().micro_batch_size

    def _resolved_batch(self) -> BatchPlan:
        return resolve(self.cfg, dict(self.origins), self.warnings, None).batch

    def under(self, plan: ParallelPlan, micro: int, batch: int, recompute: Recompute | None) -> RunConfig:
        """Return the resolved configuration, with its parallel plan and batch sizes replaced.

        Options to overlap communication that do not fit ``plan`` are switched off.

        Args:
            micro, batch: micro batch size and global batch size, in sequences.
            recompute: the recompute granularity of all layers; None: as configured.

        Raises:
            ConfigError: the configuration is not valid under ``plan``.
        """
        cfg = self.cfg
        sharding = {
            "sharding_degree": plan.sharding,
            "sharding_stage": plan.sharding_stage,
            "sharding_offload": plan.sharding_offload,
        }
        degrees = {
            f"{axis}_degree": getattr(plan, axis) for axis in ("dp", "mp", "pp", "sep", "ep", "expert_mp")
        }
        layers = {} if plan.pp_layers is not None else {"pp_layers": None, "noop_layers": None}
        split, scatters = plan.sequence_parallel, cfg.Distributed.sp_async_reduce_scatter
        whole = plan.pp > 1 and plan.virtual_pp_degree == 1
        overlaps = {
            "overlap_p2p_comm": cfg.Distributed.overlap_p2p_comm and whole,
            "mp_async_allreduce": cfg.Distributed.mp_async_allreduce and plan.mp > 1 and not split,
            "sp_async_reduce_scatter": scatters and split,
            "recompute_allgather": cfg.Distributed.recompute_allgather and scatters and split,
        }
        distributed = {
            **degrees,
            **layers,
            **overlaps,
            "pp_schedule": plan.pp_schedule,
            "sharding": cfg.Distributed.sharding.model_copy(update=sharding),
        }
        model = {
            "sequence_parallel": plan.sequence_parallel,
            "virtual_pp_degree": plan.virtual_pp_degree,
            **_recompute_keys(recompute),
        }
        sizes = {"global_batch_size": batch, "local_batch_size": None, "micro_batch_size": micro}
        changed = {
            "Distributed": cfg.Distributed.model_copy(update=distributed),
            "Model": cfg.Model.model_copy(update=model),
            "Global": cfg.Global.model_copy(update=sizes),
            "Engine": cfg.Engine.model_copy(update={"accumulate_steps": None}),
        }
        said = dict.fromkeys((*CONFIG_KEYS.values(), *(f"Global.{size}" for size in sizes)), "--plan")
        return resolve(cfg.model_copy(update=changed), {**self.origins, **said}, self.warnings, None)


def _recompute_keys(recompute: Recompute | None) -> dict[str, object]:
    if recompute is None:
        return {}
    every = {"recompute_layers": None, "no_recompute_layers": None, "recompute_interval": 1}
    granularity = None if recompute == "none" else recompute
    return {"use_recompute": recompute != "none", "recompute_granularity": granularity, **every}


def read_unresolved(path: str | Path, overrides: Sequence[str]) -> UnresolvedConfig:
    """Read a configuration without checking its parallel plan, because another plan will replace it.

    Raises:
        ConfigError: the configuration has an error outside of its parallel plan.
    """
    return UnresolvedConfig(*read_config(path, overrides))


def write_config(cfg: RunConfig, job: Job, path: Path) -> None:
    """Write ``cfg`` to a new YAML file for ``ppfleetx train``, with the plan of ``job`` as a comment.

    Raises:
        ConfigError: ``path`` exists already, or its directory does not.
    """
    refuse_as_new_file(path, "--write")
    head = (
        f"# Written by ppfleetx plan: {job.plan} on {job.plan.world_size} devices. Every key is here;\n"
        f"# derived ones are comments.\n"
    )
    with atomic_write(path, "w") as file:
        file.write(head + dump_config(cfg))
