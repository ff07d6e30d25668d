"""Plans as text, ``dp=4,mp=8,...``: what ``--plan`` takes and reports show."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.plan import ParallelPlan
from ppfleetx.planner.case import Case, Recompute

_DEGREES = {
    **{axis: axis for axis in ("dp", "mp", "pp", "sharding", "sep")},
    "stage": "sharding_stage",
    "vpp": "virtual_pp_degree",
}
_GRANULARITIES: tuple[Recompute, ...] = ("none", "core_attn", "full_attn", "full")
WORDS = (*_DEGREES, "micro", "sp", "offload", "zb", "recompute")


@dataclass(frozen=True)
class PlanWords:
    """A plan, with the micro batch and recompute that ``--plan`` names; None: not named."""

    plan: ParallelPlan
    micro: int | None
    recompute: Recompute | None


def read_words(words: str, own: ParallelPlan, option: str = "--plan") -> PlanWords:
    """The plan ``own``, changed where ``words`` say so; ``option`` is where they were given.

    Raises:
        ConfigError: an unknown word, or a value that is not allowed.
    """
    given = _parse(words, option)
    values: dict[str, object] = {
        name: _whole(given, word, option) for word, name in _DEGREES.items() if word in given
    }
    if values.get("sharding_stage", 1) not in (1, 2, 3):
        raise ConfigError("must be 1, 2 or 3", key=f"{option} stage", value=given["stage"])
    for word, name in (("sp", "sequence_parallel"), ("offload", "sharding_offload")):
        if word in given:
            values[name] = _truth(given, word, option)
    if "zb" in given:
        values["pp_schedule"] = "zb_h1" if _truth(given, "zb", option) else "1f1b"
    elif values.get("pp") == 1 or values.get("virtual_pp_degree", 1) != 1:
        values["pp_schedule"] = "1f1b"
    if "pp" in values or "virtual_pp_degree" in values:
        values["pp_layers"] = None
    if values.get("pp") == 1 and "vpp" not in given:
        values["virtual_pp_degree"] = 1
    if values.get("mp") == 1 and "sp" not in given:
        values["sequence_parallel"] = False
    recompute = given.get("recompute")
    if recompute not in (None, *_GRANULARITIES, "mixed"):
        raise ConfigError(f"recompute is one of {', '.join(_GRANULARITIES)}", key=option, value=words)
    micro = _whole(given, "micro", option) if "micro" in given else None
    return PlanWords(replace(own, **values), micro, None if recompute == "mixed" else recompute)


def plan_words(case: Case) -> str:
    """The plan as ``--plan`` takes it."""
    plan, kinds = case.plan, set(case.recomputed)
    words = f"dp={plan.dp},mp={plan.mp},pp={plan.pp},sharding={plan.sharding},stage={plan.sharding_stage}"
    words += f",sep={plan.sep},vpp={plan.virtual_pp_degree},micro={case.micro_batch}"
    words += f",sp={int(plan.sequence_parallel)},offload={int(plan.sharding_offload)}"
    words += ",zb=1" if plan.pp_schedule == "zb_h1" else ""
    return words + f",recompute={kinds.pop() if len(kinds) == 1 else 'mixed'}"


def _parse(words: str, option: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in words.split(","))):
        word, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or word not in WORDS:
            raise ConfigError(f"must be {', '.join(WORDS)} as word=value", key=option, value=part)
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
