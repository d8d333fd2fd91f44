"""Plant ten small faults, one at a time, and show which of them the tests find.

    python tests/planted_faults.py                  # in a copy of this tree, with the tests of `make test`
    python tests/planted_faults.py --tier full      # with all tests
    python tests/planted_faults.py --tree PATH      # in a copy of another version, with the tests of that version
    python tests/planted_faults.py --only head-size digests

Each fault is an exact replacement of text; one whose text is no longer there ends the script. The tests run with `-x`, so a fault
takes as long as its first failing test; one that is not found takes a whole run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

COPIED = (
    "hf_freeze",
    "tests",
    "recipes",
    "benchmarks",
    "docs",
    "model_cards",
    "*.md",
    "*.toml",
    "*.txt",
    "*.yml",
    "*.cff",
    "notebooks",
    "Makefile",
    "LICENSE",
)


@dataclass(frozen=True)
class Fault:
    """`edits`: (file, old text, new text), of which the first that fits the tree is made: files move, and texts are reworded.

    `in_first_release`: the fault was in the code of 0.1.0 itself, where all tests passed, so there is nothing to plant.
    """

    name: str
    effect: str
    edits: tuple[tuple[str, str, str], ...]
    in_first_release: bool = False


FAULTS = (
    Fault(
        "layer-scale",
        "merge() forgets that GPT-2 may scale scores by the number of a layer",
        (("hf_freeze/surgery/attention.py", "        if ratio == 1:\n", "        if ratio:\n"),),
        in_first_release=True,
    ),
    Fault(
        "cross-attention",
        "the cross-attention of GPT-2 counts as task head",
        (
            (
                "hf_freeze/architectures/gpt2.py",
                """\
                    "cross": Attention(
                        q="crossattention.q_attn",
                        k="crossattention.c_attn",
                        v="crossattention.c_attn",
                        o="crossattention.c_proj",
                        heads="n_head",
                        switch="add_cross_attention",
                    ),
""",
                "",
            ),
        ),
        in_first_release=True,
    ),
    Fault(
        "trained-positions",
        "positions that differ from the computed sinusoid are not stored",
        (("hf_freeze/model/saving.py", "if not torch.equal(value.cpu(), computed[key].cpu()):", "if False:"),),
        in_first_release=True,
    ),
    Fault(
        "positional-labels",
        "labels given by position skip the scaling by num_items_in_batch",
        (("hf_freeze/model/loss.py", 'labels = inputs.get("labels")\n', 'labels = kwargs.get("labels")\n'),),
        in_first_release=True,
    ),
    Fault(
        "kept-slice",
        "what a method keeps of a random tensor is regenerated as its first rows",
        (
            (
                "hf_freeze/seeded/tensor.py",
                "torch.tensor(index, dtype=torch.long, device=value.device)",
                "torch.arange(len(index), device=value.device)",
            ),
        ),
        in_first_release=True,
    ),
    Fault(
        "head-size",
        "heads are taken to be hidden_size / heads wide, whatever head_dim says",
        (
            ("hf_freeze/architectures/blocks.py", 'self.size or getattr(config, "head_dim", None) or', "self.size or"),
            ("hf_freeze/architectures/base.py", 'self.size or getattr(config, "head_dim", None) or', "self.size or"),
        ),
    ),
    Fault(
        "fused-heads",
        "kept heads are looked up at the wrong place in fused keys and values",
        (
            (
                "hf_freeze/architectures/blocks.py",
                "offset += (heads if query else groups) * size",
                "offset += (len(kept) if query else len(shared)) * size",
            ),
            ("hf_freeze/surgery/attention.py", "(part * heads + head) * size", "(part * len(kept) + head) * size"),
            ("hf_freeze/surgery/heads.py", "(part * heads + head) * size", "(part * len(kept) + head) * size"),
        ),
    ),
    Fault(
        "padding",
        "fixed attention patterns count padding as tokens",
        (
            (
                "hf_freeze/layers/fixed_heads.py",
                "return mask.expand(shape)",
                "return torch.ones_like(mask.expand(shape))",
            ),
        ),
    ),
    Fault(
        "digests",
        "a regenerated tensor is not compared with its digest",
        (
            ("hf_freeze/model/weights.py", "    if actual != expected:\n", "    if False:\n"),
            ("hf_freeze/variant.py", "            if found != expected:\n", "            if False:\n"),
        ),
    ),
    Fault(
        "tied-twin",
        "the other name of a tied and frozen parameter stays trainable",
        (
            ("hf_freeze/model/build.py", "tied.get(name, name) not in self._frozen", "name not in self._frozen"),
            ("hf_freeze/variant.py", "tied.get(name, name) not in frozen", "name not in frozen"),
        ),
    ),
)


def copy_tree(source: Path, target: Path) -> None:
    target.mkdir()
    for path in (path for pattern in COPIED for path in source.glob(pattern)):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, target / path.name)


def is_first_release(tree: Path) -> bool:
    return (tree / "hf_freeze" / "variant.py").exists()


def fitting_edit(fault: Fault, tree: Path) -> tuple[str, str, str]:
    """The first edit whose text occurs once in its file. Raises ValueError if none does."""
    for name, old, new in fault.edits:
        path = tree / name
        if path.exists() and path.read_text(encoding="utf-8").count(old) == 1:
            return name, old, new
    raise ValueError(f"{fault.name}: the text to replace is not in {[name for name, *_ in fault.edits]} any more")


def plant(fault: Fault, tree: Path) -> None:
    name, old, new = fitting_edit(fault, tree)
    text = (tree / name).read_text(encoding="utf-8")
    (tree / name).write_text(text.replace(old, new), encoding="utf-8")


def first_failure(tree: Path, workers: int, tests: list[str], tier: str) -> str | None:
    """The first of the `tests` that fails in `tree`, or None. Raises SystemExit if they cannot run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(workers), "--dist", "worksteal", *tests]
    # It reads the text that a fault replaces, and would find each.
    command.append("--ignore=tests/docs/test_planted_faults.py")
    if (tree / "tests" / "tiers.py").exists():  # not in a version that has one tier
        command.append(f"--tier={tier}")
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if failed is None and done.returncode != 0:
        raise SystemExit(f"the tests could not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed and failed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the version to test; this one")
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], help="names of faults; all")
    parser.add_argument("--workers", type=int, default=2, help="processes of a run")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="of the tests, these; all")
    parser.add_argument(
        "--tier", choices=("short", "full"), default="short", help="of the tests, those of this tier; short"
    )
    arguments = parser.parse_args()
    rows = []
    for fault in FAULTS:
        if arguments.only and fault.name not in arguments.only:
            continue
        if fault.in_first_release and is_first_release(arguments.tree):
            rows.append((fault, "not found (the fault is in this version, and its tests pass)", "-"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            copy_tree(arguments.tree, tree)
            plant(fault, tree)
            began = time.monotonic()
            found = first_failure(tree, arguments.workers, arguments.tests, arguments.tier)
        rows.append((fault, found or "not found", f"{time.monotonic() - began:.0f}"))
        print(f"{fault.name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    print("| fault | effect | found by | seconds |\n|---|---|---|---:|")
    for fault, found, seconds in rows:
        print(f"| {fault.name} | {fault.effect} | {found} | {seconds} |")


if __name__ == "__main__":
    main()
