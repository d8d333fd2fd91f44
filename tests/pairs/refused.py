"""Prints the ordered pairs of methods that are refused, and why: `python tests/pairs/refused.py`. It takes minutes.

Each method has the setting of its tests. A pair counts as refused if it is on every architecture and tiny config that takes each
of the two methods alone; the reason is that of the first of them.
"""

import os
import sys
from pathlib import Path

os.environ["HF_FREEZE_TESTS"] = "all"
sys.path.insert(0, str(Path(__file__).parents[1]))

from collections import defaultdict

from support.cases import pairs
from support.models import build_anew


def reason(case) -> str | None:
    """Why the pair is refused; None if it works."""
    try:
        build_anew(case)
    except ValueError as error:
        return str(error)
    return None


def main() -> None:
    reasons = defaultdict(list)
    for case in pairs():
        first, second = (method.name for method in case.methods)
        reasons[first, second].append(reason(case))
    refused = {pair: found for pair, found in reasons.items() if None not in found}
    for (first, second), found in sorted(refused.items()):
        print(f"{second} after {first}: {found[0]}")
    print(f"{len(refused)} of {len(reasons)} ordered pairs are refused")


if __name__ == "__main__":
    main()
