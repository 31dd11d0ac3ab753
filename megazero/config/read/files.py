"""Reads files: that of --config, YAML whose keys are flag names, flat or by section; and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megazero import bounded
from megazero.config.errors import WRONG_PATH
from megazero.config.read.sources import Layer, Unknown, all_switches
from megazero.config.run import section_types


def read_yaml(path: str) -> Layer:
    """Read a YAML file as a layer.

    Keys are written with - or _. A section's name may hold a mapping of its keys. null leaves a key unset; so does
    [] a list.
    """
    layer = Layer(path)
    content = _load(layer, path)
    if content is None:
        return layer
    if not isinstance(content, dict):
        layer.errors.append(f"{path}: holds {type(content).__name__}, not a mapping of flag names to values")
        return layer
    for key, value in content.items():
        if key in section_types() and isinstance(value, dict):
            for inner, inner_value in value.items():
                put(layer, f"{path}: ", str(inner), inner_value, section=key)
        else:
            put(layer, f"{path}: ", str(key), value)
    return layer


def _load(layer: Layer, path: str) -> Any:
    try:
        content, twice = bounded.read_yaml(path)
    except WRONG_PATH as error:
        layer.errors.append(f"--config {path} cannot be read: {error.strerror or error}")
        layer.unread = True
    except ValueError as error:
        layer.errors.append(f"--config {path} is not YAML: {error}")
        layer.unread = True
    else:
        layer.errors.extend(f"{path}: {key} stands there twice" for key in twice)
        return content
    return None


def put(layer: Layer, where: str, name: str, value: Any, section: str = "") -> None:
    """Put the value of a key into a layer. ``where`` precedes the name in notes and errors."""
    key, where = name.replace("_", "-"), f"{where}{section + '.' if section else ''}"
    switch = all_switches().get(key)
    if switch is None:
        words = [] if value is True else value if isinstance(value, list) else [value]
        said = value if value is False else None if value in (None, []) else [str(word) for word in words]
        layer.unknown.append(Unknown(key, where, said, () if section else tuple(section_types())))
    elif section and switch.option.section != section:
        layer.errors.append(f"{where}{name} belongs to section {switch.option.section}")
    elif value is None:
        return
    elif switch.option.kind == "bool":
        layer.put(switch.option, value == switch.sets if isinstance(value, bool) else value, where + name)
    elif switch.sets is not None:
        if value is True:
            layer.put(switch.option, switch.sets, where + name)
        else:
            layer.errors.append(f"{where}{name} takes only true, got {value!r}; or set {switch.option.key}")
    elif switch.option.kind == "strs" and isinstance(value, str) and switch.option.entry is None:
        layer.put(switch.option, value.split(), where + name)
    else:
        layer.put(switch.option, value, where + name)


def read_json(file: Path, why: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError, which says why the file is needed."""
    try:
        value = bounded.read_json(file)
    except FileNotFoundError:
        raise ValueError(f"'{file}' is missing: {why}") from None
    except ValueError as error:
        raise ValueError(f"'{file}' is damaged ({error}): get it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"'{file}' holds no JSON object: {why}")
    return value
