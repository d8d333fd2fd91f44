"""Configs of earlier versions. A version that writes another config than the one before adds a function to `MIGRATIONS`, which
takes a config of any version since the last entry to its own; tests/regression keeps checkpoints of every version.

So far no version has.
"""

from collections.abc import Callable
from typing import Any

from packaging.version import Version

# Version -> the function, which changes the config in place: `methods` (a list of dicts), `init`, `digests`, `original_fields`.
# What it finds may be damaged or made up: it leaves what it does not know, and the checks that follow judge it.
MIGRATIONS: dict[str, Callable[[Any], None]] = {}


def migrate(config: Any, version: str) -> bool:
    """Take a config that `version` wrote to this version, step by step. Whether it has changed."""
    later = sorted((each for each in MIGRATIONS if Version(each) > Version(version)), key=Version)
    for each in later:
        MIGRATIONS[each](config)
    return bool(later)
