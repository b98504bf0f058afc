# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Write data/SHA256SUMS: the hash of every file under data/, in the format of `sha256sum -c` (run in data/).

python data/hashes.py
"""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
SKIPPED = {"README.md", "SHA256SUMS"}  # prose, and the list itself


def files() -> list[Path]:
    """Every file that is hashed: all but the list itself, prose, and what Python and editors leave behind."""
    found = (p for p in HERE.rglob("*") if p.is_file() and p.name not in SKIPPED)
    return sorted(p for p in found if not any(part.startswith((".", "__")) for part in p.relative_to(HERE).parts))


def sums() -> str:
    """The text of SHA256SUMS."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(HERE).as_posix()}\n" for path in files()
    )


if __name__ == "__main__":
    (HERE / "SHA256SUMS").write_text(sums(), encoding="utf-8", newline="\n")
