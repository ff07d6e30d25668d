"""What a section of ``Data`` stands for: one dataset, or, of ``Data.Eval``, several with names."""

from __future__ import annotations

from ppfleetx.config.sections.root import EvalConfig, RunConfig


def data_sets(cfg: RunConfig, mode: str = "Eval") -> dict[str | None, RunConfig]:
    """{name: configuration whose ``Data.<mode>`` is that set alone}, in the order of the file.

    A dataset that is no named set has the name None; without ``Data.<mode>`` there is nothing.
    """
    section = getattr(cfg.Data, mode)
    if section is None:
        return {}
    if not isinstance(section, EvalConfig) or not section.sets:
        return {None: cfg}
    return {name: _with(cfg, section.of_set(name)) for name in section.sets}


def _with(cfg: RunConfig, section: EvalConfig) -> RunConfig:
    return cfg.model_copy(update={"Data": cfg.Data.model_copy(update={"Eval": section})})
