"""The ordered pairs of methods that are refused, and why: `python tests/pairs/refused.py` prints them, and `--write` keeps them
in refused.txt, which `test_refused.py` compares with. It takes two CPU minutes.

Each method has the settings of its tests: its example and its modes. Models are built on meta, which every refusal precedes:
no value is drawn, trained or saved.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cases import ARCHITECTURES, EXAMPLES, Architecture, Method, name_of, native_config, plain, supports

from hf_freeze import make_variant
from hf_freeze.methods.order import check_order

FILE = Path(__file__).with_name("refused.txt")
Pair = tuple[Method, Method]


def title(pair: Pair) -> str:
    first, second = map(name_of, pair)
    return f"{second} after {first}"


def places(pair: Pair) -> list[Architecture]:
    """The architectures that take each of the two alone."""
    return [
        architecture
        for architecture in ARCHITECTURES.values()
        if all(supports(type(method), architecture) and plain(architecture, method).accepted for method in pair)
    ]


def reason(pair: Pair, architecture: Architecture) -> str | None:
    """Why the pair is refused on the first tiny config of an architecture; None if it works."""
    try:
        check_order(pair[1], pair[:1])
        with torch.device("meta"):
            make_variant(native_config(architecture), list(pair), task=architecture.tasks[0])
    except ValueError as error:
        return str(error)
    return None


def kept() -> dict[str, list[str]]:
    """Pair -> the architectures where refused.txt says that it is refused."""
    lines = FILE.read_text().splitlines()
    return {pair: where.split(", ") for pair, _, where in (line.partition(": ") for line in lines)}


def pairs() -> Iterator[Pair]:
    return itertools.product(EXAMPLES, repeat=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    write = parser.parse_args().write
    lines = []
    for pair in pairs():
        reasons = {place.model_type: reason(pair, place) for place in places(pair)}
        refused = {model_type: text for model_type, text in reasons.items() if text is not None}
        if refused:
            lines.append(f"{title(pair)}: {', '.join(sorted(refused))}")
            print(f"{lines[-1]}: {next(iter(refused.values()))}", flush=True)
    print(f"{len(lines)} of {len(EXAMPLES) ** 2} ordered pairs are refused")
    if write:
        FILE.write_text("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
