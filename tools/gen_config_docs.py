"""Write docs/config.md and ppfleetx/configs/schema.json from the classes of the configuration's sections.

The description of a field is the string below it. Only this program reads these strings, from the source, so
they do not slow down the loading of a configuration.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.field_annotations import describe, field_types, item_type, section_in
from ppfleetx.config.parallel_plan import LEGAL
from ppfleetx.config.reading.parse import MAX_FILE_BYTES
from ppfleetx.config.resume_policy import Effect, keys_of
from ppfleetx.config.section import Section
from ppfleetx.config.sections.engine import CallbackConfig
from ppfleetx.config.sections.root import RunConfig
from tools.site.pages import write_files

_HEAD = """\
# Configuration

Made by `tools/gen_config_docs.py` from `ppfleetx/config`; do not edit.

A configuration is one YAML file with the sections below. `_base_: other.yaml` names a file it builds on (or a
list of files, of which the last wins), relative to itself: mappings merge key by key, other values replace.
`_inherited_: False` in a mapping drops what the bases have there. On the command line `-o Section.key=value`
replaces one value; the value is YAML, list items are named by index (`Data.Train.dataset.split.0=90`), and
`null` or `None` clears a value. Unknown keys, wrong types, values that do not fit together, and one key given
twice with different values are errors that name the place.

A file has no tags, merge keys (`<<`) or second document, and at most {max_file} bytes. Aliases
(`&name`, `*name`) are read.

Editors complete and check these files with the schema in `ppfleetx/configs/schema.json`: put
`# yaml-language-server: $schema=<path to schema.json>` into the first line.
"""

_EFFECTS_HEAD = """\
## What a resumed run may change

A run that resumes compares its configuration with the one in the checkpoint. Whether a key may change depends
on what it decides. A section stands for all keys in it that are not listed themselves.

| what the keys decide, and whether they may change | keys |
|---|---|"""


@cache
def _class_bodies(module_file: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(Path(module_file).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def field_docs(section: type[Section]) -> dict[str, str]:
    """Return the string below the declaration of each field, on one line, by field name. Inherited fields are
    included."""
    base = section.__base__
    docs = field_docs(base) if base is not None and issubclass(base, Section) and base is not Section else {}
    module_file = sys.modules[section.__module__].__file__
    assert module_file is not None
    body = _class_bodies(module_file)[section.__name__]
    for field, below in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def config_markdown() -> str:
    """Return the text of ``docs/config.md``."""
    sections = "\n".join(_section_markdown(name, kind) for name, kind in _walk(RunConfig))
    rules = "\n".join(f"- {_without_numbers(rule.sentence)}" for rule in LEGAL)
    head = _HEAD.format(max_file=f"{MAX_FILE_BYTES:,}")
    return f"{head}\n{sections}\n## Legal parallel plans\n\n{rules}\n\n{_EFFECTS_HEAD}\n{_effect_rows()}\n"


def _effect_rows() -> str:
    """Return table rows, one for each :class:`Effect`, with the keys that have it."""
    rows = []
    for effect in Effect:
        keys = ", ".join(f"`{key}`" for key in keys_of(effect))
        rows.append(f"| {effect.value} | {keys} |")
    return "\n".join(rows)


def _without_numbers(sentence: str) -> str:
    """Return a rule's sentence with each ``{name}`` shown as code."""
    return sentence.replace("{", "`").replace("}", "`")


def _walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    seen: set[type[Section]] = set()
    for name, annotation in field_types(section).items():
        kind = _section_of(annotation)
        if kind is not None and kind not in seen:
            seen.add(kind)
            alike = [other for other, hint in field_types(section).items() if _section_of(hint) is kind]
            full = f"{prefix}{name}" if len(alike) == 1 else f"{prefix}{{{','.join(alike)}}}"
            yield full, kind
            yield from _walk(kind, f"{full}.")


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the section class that a key holds, directly or as the items of a list; None if there is
    none."""
    return section_in(annotation) or section_in(item_type(annotation))


def _section_markdown(name: str, section: type[Section]) -> str:
    rows = []
    docs = field_docs(section)
    for key, annotation in field_types(section).items():
        inner = section_in(annotation)
        if inner is not None and key not in docs:
            docs[key] = f"Section: {_summary(inner)}"
        accepts = describe(annotation).replace("|", "\\|")
        rows.append(f"| `{key}` | {accepts} | {_default(section, key)} | {docs[key]} |")
    level = "##" if "." not in name else "###"
    table = "\n".join(rows)
    doc = inspect.cleandoc(section.__doc__ or "")
    return f"{level} {name}\n\n{doc}\n\n| key | accepts | default | meaning |\n|---|---|---|---|\n{table}\n"


def _summary(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "").partition("\n")[0]


def _default(section: type[Section], key: str) -> str:
    field = section.model_fields[key]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return ""
    return f"`{_as_yaml(value)}`"


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, CallbackConfig):
        return value.name
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return str(value)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with ``_base_`` and ``_inherited_``, for completion in
    editors.

    The schema requires no key, because a base file can set it.
    """
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    kinds = {kind.__name__: kind for _, kind in _walk(RunConfig)}
    for name, definition in schema["$defs"].items():
        _describe_properties(definition, kinds[name])
        definition["properties"]["_inherited_"] = {
            "type": "boolean",
            "description": "False drops what the bases have in this section.",
        }
    _describe_properties(schema, RunConfig)
    for key, kind in (("callbacks", "CallbackConfig"), ("loggers", "LoggerConfig")):
        listed = schema["$defs"]["EngineConfig"]["properties"][key]
        name = schema["$defs"][kind]["properties"]["name"]
        listed["items"] = {"anyOf": [listed["items"], {"anyOf": name["anyOf"]}]}
    sets = schema["$defs"]["EvalConfig"]["properties"]["sets"]
    sets["additionalProperties"] = {"anyOf": [sets["additionalProperties"], {"type": "string"}]}
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["_base_"] = {**names, "description": "Files this one builds on."}
    return schema


def _describe_properties(definition: dict[str, Any], section: type[Section]) -> None:
    definition.pop("required", None)
    definition.pop("title", None)
    docs = field_docs(section)
    for key, prop in definition["properties"].items():
        prop.pop("title", None)
        if key in docs:
            prop["description"] = docs[key]
        if prop.get("default", PydanticUndefined) is PydanticUndefined:
            prop.pop("default", None)


def texts() -> dict[Path, str]:
    """Return the texts of the generated files, by path."""
    return {
        _ROOT / "docs" / "config.md": config_markdown(),
        _ROOT / "ppfleetx" / "configs" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }


if __name__ == "__main__":
    write_files(texts, __doc__)
