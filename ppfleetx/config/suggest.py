"""What the writer of an unknown key may have meant."""

from __future__ import annotations

import difflib
from functools import cache

from ppfleetx.config.fields import Section
from ppfleetx.config.other_toolkits.synonyms import our_key
from ppfleetx.config.words import field_types, section_in


def nearest_keys(path: list[str], section: type[Section], root: type[Section]) -> str:
    """A sentence with the keys nearest to the unknown one at ``path``.

    Args:
        path: the parts of the key; the last is not one of ``section``, the innermost section on the way.
        root: the section that the path starts from.
    """
    prefix = ".".join(path[:-1])
    everywhere = all_keys(root)
    near = [key for key in (our_key(path[-1]),) if key in everywhere]
    if not near:
        here = difflib.get_close_matches(path[-1], field_types(section), n=3, cutoff=0.6)
        near = [f"{prefix}.{name}" if prefix else name for name in here]
    near += [key for key in everywhere if key.rpartition(".")[2] == path[-1] and key not in near]
    if not near:
        elsewhere = [key for key in everywhere if key not in (path[0], prefix)]
        near = difflib.get_close_matches(".".join(path), elsewhere, n=2, cutoff=0.75)
    if near:
        return f"Did you mean {' or '.join(near[:3])}?"
    return f"Keys here: {', '.join(field_types(section))}."


@cache
def all_keys(root: type[Section], prefix: str = "") -> tuple[str, ...]:
    """Dotted names of every key below ``root``, sections included."""
    keys: list[str] = []
    for name, annotation in field_types(root).items():
        keys.append(prefix + name)
        section = section_in(annotation)
        if section is not None:
            keys += all_keys(section, f"{prefix}{name}.")
    return tuple(keys)
