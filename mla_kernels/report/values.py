# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Python, numpy and torch values as plain JSON values, and numbers as text for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["library_of", "number_text", "plain", "plain_scalar", "truth"]

# A recorded array is there to be read and compared leaf by leaf; more than this belongs into a table.
MAX_ELEMENTS = 10_000


def library_of(value: object) -> str:
    """The top-level package that a value's type comes from: "numpy", "torch", "pandas", "builtins", ..."""
    return type(value).__module__.partition(".")[0]


def plain_scalar(value: Any) -> Any:
    """numpy and torch scalars as Python scalars, dtypes as their names, paths as text; anything else as it is."""
    library = library_of(value)
    if library == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if library == "numpy" and hasattr(value, "fields") and hasattr(value, "itemsize"):  # numpy.dtype
        return value.name
    if library == "ml_dtypes" or (library in ("numpy", "torch") and getattr(value, "ndim", None) == 0):
        return value.item()
    if isinstance(value, type) and value.__module__ == "numpy":  # numpy.float32, the class
        return value.__name__
    return str(value) if isinstance(value, Path) else value


def plain(value: Any, where: str) -> Any:
    """`value` as JSON holds it: None, bool, int, float, str, list, dict with text keys.

    Non-finite floats become the strings "nan", "inf" and "-inf". numpy and torch scalars become numbers, small arrays
    become lists.

    Raises:
        TypeError: for anything else, naming `where` it stands.
    """
    value = plain_scalar(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(plain_scalar(key), (str, int, float))]
        if bad:
            raise TypeError(f"{where}: expected keys that are text or numbers, got {bad[0]!r}")
        return {str(plain_scalar(key)): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if library_of(value) in ("numpy", "torch") and hasattr(value, "tolist"):
        size = math.prod(value.shape)
        if size > MAX_ELEMENTS:
            raise TypeError(f"{where}: an array of {size} elements is too much to record: record its statistics")
        return plain(value.tolist(), where)
    raise TypeError(
        f"{where}: expected a number, a string, or a list or dict of those, got {type(value).__module__}."
        f"{type(value).__qualname__}: convert it, or save it with page.table"
    )


def truth(value: Any, where: str) -> bool:
    """A Python bool from a Python, numpy or torch bool; TypeError for anything else (a NaN would count as true)."""
    value = plain_scalar(value)
    if isinstance(value, bool):
        return value
    shown = f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str)) else type(value).__name__
    raise TypeError(
        f"{where}: expected True or False, got {shown}: write the comparison out, for instance error < 1e-3"
    )


def number_text(value: Any, digits: int = 4) -> str:
    """A recorded value for people: `digits` significant digits, true minus signs, powers of ten written out.

    1152 -> "1152", 0.026789 -> "0.02679", 1.25e-16 -> "1.25 × 10⁻¹⁶".
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return (
            f"{value:,}".replace(",", "\u202f").replace("-", "−")
            if abs(value) >= 100_000
            else str(value).replace("-", "−")
        )
    if isinstance(value, float):
        text = f"{value:.{digits - 1}e}" if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"
        found = re.fullmatch(r"(-?[\d.]+)e([+-])0*(\d+)", text)
        if not found:
            return text.replace("-", "−").replace("inf", "∞")
        mantissa, sign, power = found.groups()
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        raised = power.translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{mantissa}\u00a0×\u00a010{'⁻' if sign == '-' else ''}{raised}".replace("-", "−")
    return str(value)
