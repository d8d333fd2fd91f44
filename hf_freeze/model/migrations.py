"""Configs of earlier versions. A version that changes the format adds a function to `MIGRATIONS`, which updates a config of any
version since the last entry. tests/regression keeps checkpoints of every version.

So far no version has changed the format.
"""

from collections.abc import Callable
from typing import Any

from packaging.version import Version

# Version -> the function, which changes the config in place: `methods` (a list of dicts), `init`, `digests`, `original_fields`.
# The config may be damaged or forged: leave unknown content alone; the checks that follow refuse it.
MIGRATIONS: dict[str, Callable[[Any], None]] = {}


def migrate(config: Any, version: str) -> bool:
    """Take a config that `version` wrote to this version, step by step. Whether it has changed."""
    later = sorted((known for known in MIGRATIONS if Version(known) > Version(version)), key=Version)
    for known in later:
        MIGRATIONS[known](config)
    return bool(later)
