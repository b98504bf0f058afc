# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Notebook parameters: where they are declared, what they may be, and how text becomes a value.

Names and defaults stand in the notebook's cell tagged `parameters` (literals only). Type, range and description stand
in `params/<notebook>.schema.json` beside the notebook, a JSON Schema object. The schema decides what a text means, not
the look of the text: `4.0` is the integer 4 where an integer is wanted, `007` stays text where text is wanted.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import file_hash
from mla_kernels.report.values import library_of, plain_scalar

__all__ = [
    "Notebook",
    "check_profile",
    "choose",
    "convert",
    "describe",
    "load_profile",
    "load_yaml",
    "nearest",
    "notebooks_in",
    "settle",
]

# Set by the runner, not by people.
RUNNER_PARAMETERS = ("report_dir",)
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
PLURALS = {
    "an integer": "integers",
    "a finite number": "finite numbers",
    "text": "texts",
    "true or false": "true or false",
}


@dataclass(frozen=True)
class Notebook:
    """A notebook file with its declared parameters."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def sha256(self) -> str:
        return file_hash(self.path)

    @functools.cached_property
    def cells(self) -> list[dict[str, Any]]:
        try:
            cells = json.loads(self.path.read_text(encoding="utf-8"))["cells"]
            return [{**cell, "cell_type": cell["cell_type"], "source": _source(cell)} for cell in cells]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ReportError(
                f"{self.path}: expected a Jupyter notebook (format 4), but: {type(error).__name__}: {error}"
            ) from error

    @functools.cached_property
    def title(self) -> str:
        """The first heading, without its mark."""
        found = re.search(r"^# +(.+)$", "\n".join(_source(c) for c in self.cells if c["cell_type"] == "markdown"), re.M)
        return found.group(1).strip() if found else self.name

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The parameters cell as a dict, `report_dir` included. Empty without such a cell."""
        tagged = [c for c in self.cells if "parameters" in c.get("metadata", {}).get("tags", [])]
        if len(tagged) > 1:
            raise ReportError(f"{self.path}: expected one cell tagged 'parameters', found {len(tagged)}")
        values: dict[str, Any] = {}
        for node in ast.parse(_source(tagged[0])).body if tagged else []:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if (
                not isinstance(node, (ast.Assign, ast.AnnAssign))
                or not isinstance(target, ast.Name)
                or node.value is None
            ):
                raise ReportError(
                    f"{self.path}: the parameters cell holds more than `name = literal` in line {node.lineno}"
                )
            try:
                values[target.id] = ast.literal_eval(node.value)
            except ValueError:
                raise ReportError(f"{self.path}: the default of {target.id!r} is not a literal") from None
        return values

    @functools.cached_property
    def schema(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> JSON Schema, without those that the runner sets."""
        path = self.path.parent / "params" / f"{self.name}.schema.json"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if set(self.defaults) <= set(RUNNER_PARAMETERS):
                return {}
            raise ReportError(f"{self.name}: its parameters are not described: expected the file {path}") from None
        except ValueError as error:
            raise ReportError(f"{path}: expected JSON, but: {error}") from error
        properties = loaded.get("properties") if isinstance(loaded, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(entry, dict) for entry in properties.values()):
            raise ReportError(f"{path}: expected a JSON Schema object with `properties`, got {str(loaded)[:200]}")
        return {key: value for key, value in properties.items() if key not in RUNNER_PARAMETERS}


def _source(cell: Mapping[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def nearest(name: str, names: Iterable[str]) -> str:
    """The part of a message that names the nearest known name, or all of them when none is near."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if known else "there are none"


def notebooks_in(folder: Path) -> list[Notebook]:
    """The numbered notebooks of a folder, in order."""
    return [Notebook(path) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]


def choose(asked: Sequence[str], folder: Path) -> list[Notebook]:
    """Notebooks by name ("02_error_distribution"), number ("02" or "2") or path, in the order asked for."""
    there = notebooks_in(folder)
    chosen: list[Notebook] = []
    for text in asked:
        if text.endswith(".ipynb"):
            found = [Notebook(Path(text).resolve())] if Path(text).is_file() else []
        elif text.isdigit():
            found = [n for n in there if int(n.name[:2]) == int(text)]
        else:
            found = [n for n in there if n.name == text]
        if not found:
            raise ReportError(f"NOTEBOOK: {text!r} is not there; {nearest(text, [n.name for n in there])}")
        if found[0].name in [n.name for n in chosen]:
            raise ReportError(
                f"NOTEBOOK: {found[0].name} is asked for twice: every notebook of a report needs its own name"
            )
        chosen.append(found[0])
    return chosen


@functools.cache
def _text_loader() -> Any:
    """YAML's loader that leaves every scalar text, but refuses a key that is given twice (YAML takes the last)."""
    import yaml

    class TextLoader(yaml.BaseLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
                line = key_node.start_mark.line + 1
                if key is not None and key in lines:
                    raise yaml.YAMLError(f"the key {key!r} is given twice, in line {lines[key]} and in line {line}")
                lines[key] = line
            return dict(super().construct_mapping(node, deep))

    return TextLoader


def load_yaml(path: Path) -> Any:
    """What a YAML file holds, every scalar as text: the schema decides what it means (YAML would read `007` as 7)."""
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_text_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: expected YAML, but: {' '.join(str(error).split())}") from error


def load_profile(profile: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Notebook name -> parameters, from `params/<profile>.yaml` in `folder` or from the path of a YAML file."""
    path = Path(profile) if profile.endswith((".yaml", ".yml")) else folder / "params" / f"{profile}.yaml"
    try:
        loaded = load_yaml(path) or {}
    except FileNotFoundError:
        known = [file.stem for file in sorted((folder / "params").glob("*.yaml"))]
        raise ReportError(f"profile: {profile!r} is not there ({path}); {nearest(profile, known)}") from None
    if not isinstance(loaded, dict) or not all(isinstance(entry or {}, dict) for entry in loaded.values()):
        raise ReportError(f"{path}: expected a mapping `notebook: {{parameter: value}}`, got {str(loaded)[:200]}")
    return {notebook: entry or {} for notebook, entry in loaded.items()}


def check_profile(profile: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a profile with entries for notebooks that are not there."""
    for name in profile:
        if name not in known:
            raise ReportError(
                f"profile: it has an entry for {name!r}, which is no notebook here; {nearest(name, known)}"
            )


def settle(
    notebooks: Sequence[Notebook],
    profile: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any] | Sequence[str],
    folder: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The parameters of every notebook: its defaults, then the profile, then what was given for this run.

    Args:
        notebooks: the ones that will run.
        profile: notebook name -> parameters. Of notebooks in `folder` that do not run, only the name is checked.
        given: `name=value` or `notebook.name=value` texts, or a mapping with the same keys and Python values. A name
            without a notebook goes to every notebook that has it.

    Raises:
        ReportError: for an unknown name (with the nearest one) or a value that the schema does not allow.
    """
    names = [n.name for n in notebooks]
    known = list(dict.fromkeys([*names, *(n.name for n in (notebooks_in(folder) if folder else []))]))
    check_profile(profile, known)
    layers: dict[str, list[tuple[str, Mapping[str, Any]]]] = {
        n.name: [("default", n.defaults), ("profile", profile.get(n.name, {}))] for n in notebooks
    }
    for key, value in _pairs(given):
        notebook, _, name = key.rpartition(".")
        if notebook and notebook not in names:
            raise ReportError(
                f"-p {key}: {notebook!r} is not among the notebooks of this run; {nearest(notebook, names)}"
            )
        owners = [n for n in notebooks if name in n.schema and notebook in ("", n.name)]
        if name in RUNNER_PARAMETERS:
            raise ReportError(f"-p {key}: {name} is set by the runner; use --name and --reports-dir")
        if not owners:
            among = dict.fromkeys(p for n in notebooks if notebook in ("", n.name) for p in n.schema)
            raise ReportError(f"-p {key}: no notebook of this run has a parameter {name!r}; {nearest(name, among)}")
        for owner in owners:
            layers[owner.name].append(("-p", {name: value}))
    return {n.name: _merge(n, layers[n.name]) for n in notebooks}


def _pairs(given: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    for text in given:
        if "=" not in text:
            raise ReportError(f"-p {text}: expected name=value, for instance -p seed=1")
    return [(key.strip(), value) for key, _, value in (text.partition("=") for text in given)]


def _merge(notebook: Notebook, layers: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    settled: dict[str, Any] = {}
    for origin, layer in layers:
        for name, value in layer.items():
            if name in RUNNER_PARAMETERS:
                continue
            where = f"{notebook.name}: {name} ({origin})"
            if name not in notebook.schema:
                raise ReportError(f"{where}: unknown parameter; {nearest(name, notebook.schema)}")
            settled[name] = convert(value, notebook.schema[name], where)
    return settled


def describe(schema: Mapping[str, Any]) -> str:
    """What a parameter may be, in words: "an integer from 1 to 128"."""
    nullable = "null" in _types(schema)
    text = _describe_type(schema)
    return f"{text}, or none" if nullable else text


def _describe_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"] if value is not None)
    kind = _kind(schema)
    if kind == "array":
        low, high = schema.get("minItems"), schema.get("maxItems")
        count = "" if not low else "one or more " if low == 1 else f"at least {low} "
        count = f"{low} to {high} " if low is not None and high is not None else count
        count += "different " if schema.get("uniqueItems") else ""
        inner = _describe_type(schema["items"])
        head = next((word for word in PLURALS if inner.startswith(word)), "")
        needed = f", with {schema['contains']['const']} among them" if "contains" in schema else ""
        items = PLURALS[head] + inner.removeprefix(head) if head else f"values, each {inner}"
        return f"a list of {count}{items}{needed}"
    words = {
        "integer": "an integer",
        "number": "a finite number",
        "string": "text",
        "boolean": "true or false",
        "object": "a mapping",
    }
    return words.get(kind, f"a {kind}") + _describe_range(schema)


def _describe_range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = f", divisible by {schema['multipleOf']}" if "multipleOf" in schema else ""
    if low is not None and high is not None:
        return f" from {low} to {high}{step}"
    ends = (
        ("of at least", low),
        ("above", above),
        ("of at most" if low is None and above is None else "up to", high),
        ("below", below),
    )
    text = " and".join(f" {word} {end}" for word, end in ends if end is not None)
    return text + step + (f" matching {schema['pattern']}" if "pattern" in schema else "")


def convert(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    """A value given as text, Python, numpy or torch object as the plain value that the schema wants.

    Raises:
        ReportError: naming `where`, what is allowed and what came.
    """
    import jsonschema

    result = _convert(value, schema, schema, where)
    error = next(iter(jsonschema.Draft202012Validator(dict(schema)).iter_errors(result)), None)
    if error is not None:
        place = "".join(f"[{step!r}]" for step in error.absolute_path)
        part = f": {error.instance!r}{f' at {place}' if place else ''} is not allowed" if place else ""
        raise ReportError(f"{where}: expected {describe(schema)}, got {_shown(value)}{part}")
    return result


def _convert(value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any], where: str) -> Any:
    if library_of(value) in ("numpy", "torch", "pandas") and getattr(value, "ndim", None) and hasattr(value, "shape"):
        raise ReportError(
            f"{where}: expected {describe(whole)}, got a {type(value).__module__}.{type(value).__name__} of shape "
            f"{tuple(value.shape)}: pass value.tolist(), or save the array and pass the path of its file"
        )
    given, value = value, plain_scalar(value)
    kind = _kind(schema)
    if "null" in _types(schema) and (
        value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "~"))
    ):
        return None
    if kind in ("array", "object"):
        return _convert_collection(value, kind, schema, whole, where)
    converted = {"integer": _integer, "number": _number, "boolean": _boolean, "string": _text}[kind](value)
    if converted is None:
        raise ReportError(f"{where}: expected {describe(whole)}, got {_shown(given)}")
    return converted


def _convert_collection(value: Any, kind: str, schema: Mapping[str, Any], whole: Mapping[str, Any], where: str) -> Any:
    given = value
    if isinstance(value, str):
        value = _parse_collection(value, kind)
    if kind == "array" and isinstance(value, (list, tuple)):
        return [_convert(item, schema["items"], whole, f"{where}[{index}]") for index, item in enumerate(value)]
    if kind == "object" and isinstance(value, Mapping):
        inner = schema.get("properties", {})
        other = schema.get("additionalProperties", {"type": "string"})
        if other is False:
            for key in set(value) - set(inner):
                raise ReportError(f"{where}: unknown key {key!r}; {nearest(key, inner)}")
        return {key: _convert(item, inner.get(key, other), whole, f"{where}[{key!r}]") for key, item in value.items()}
    example = "[1, 2, 3]" if kind == "array" else "{name: value}"
    raise ReportError(f"{where}: expected {describe(whole)}, got {_shown(given)}: write it as {example}")


def _parse_collection(text: str, kind: str) -> Any:
    """`[128, 4096]`, `(128, 4096)`, `128,4096` or `128` as a list of texts; `{a: 1}` as a dict of texts."""
    import yaml

    text = text.strip()
    if kind == "array" and text[:1] not in ("[", "("):
        text = f"[{text}]"
    if text[:1] == "(" and text[-1:] == ")":
        text = f"[{text[1:-1]}]"
    try:
        return yaml.load(text, Loader=_text_loader())
    except yaml.YAMLError:
        return None


def _integer(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _boolean(value: Any) -> bool | None:
    return WORDS.get(value.strip().lower()) if isinstance(value, str) else value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", "string")
    return [types] if isinstance(types, str) else list(types)


def _kind(schema: Mapping[str, Any]) -> str:
    return next(kind for kind in _types(schema) if kind != "null")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"{plain_scalar(value)!r} ({type(value).__name__})"
