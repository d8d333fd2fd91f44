"""Every method on a pretrained model, from a folder: what the contract tests hold tiny models to, on real weights.

    python tests/families/pretrained.py FOLDER                            # such as a folder with all-MiniLM-L6-v2
    python tests/families/pretrained.py FOLDER --task feature-extraction --methods low_rank quantize

For each method that applies, with the settings of its example: the variant is saved and opened again bit-equal, its merged
model computes the same to 1e-5 of the largest output, and an exact method computes what the backbone does. The family is also
derived, as if no file described it. A line tells how far the outputs move (1 minus the cosine). Exits with 1 if something fails.
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from hf_freeze import make_variant
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.parts import KeptTokens
from hf_freeze.methods.registry import METHODS

TEXTS = ["A man is playing a guitar.", "Someone plays an instrument!", "The stock market fell by 3 % on Tuesday."]


@torch.no_grad()
def outputs(model: Any, batch: Any) -> torch.Tensor:
    return next(
        value for value in model.eval()(**batch).values() if torch.is_tensor(value) and value.is_floating_point()
    )


def problems(folder: str, task: str, method: Any, batch: Any, expected: torch.Tensor) -> tuple[list[str], float]:
    """What is wrong with `method`, and how far its outputs are from the backbone's."""
    found = []
    variant = make_variant(folder, [method], task=task)
    actual = outputs(variant, batch)
    size = float(actual.abs().max())
    with tempfile.TemporaryDirectory() as out:
        variant.save_pretrained(out)
        if not torch.equal(outputs(AUTO_CLASSES[task].from_pretrained(out), batch), actual):
            found.append("a reloaded variant computes something else")
    try:
        merged = variant.merge()
    except ValueError as error:
        print(f"  not merged: {error}")
    else:
        if float((outputs(merged, batch) - actual).abs().max()) > 1e-5 * size:
            found.append("the merged model computes something else")
    if method.facts.exact and actual.shape == expected.shape and float((actual - expected).abs().max()) > 1e-5 * size:
        found.append("an exact method changes the outputs")
    if actual.shape != expected.shape:
        return found, float("nan")
    return found, 1 - float(torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--task", choices=AUTO_CLASSES, default="feature-extraction")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.folder)
    architecture, derived = architecture_of(config), derive(config)
    batch = AutoTokenizer.from_pretrained(options.folder)(TEXTS, return_tensors="pt", padding=True)
    expected = outputs(AUTO_CLASSES[options.task].from_pretrained(options.folder), batch)
    failed = False
    for name, parts in (
        ("stacks", [architecture.depths(config), derived.depths(config)]),
        ("FFNs", [architecture.ffns(config), derived.ffns(config)]),
        ("attentions", [sorted(architecture.attentions(config)), sorted(derived.attentions(config))]),
        ("token tables", [set(architecture.token_tables), set(derived.token_tables)]),
    ):
        failed |= parts[0] != parts[1]
        print(f"{name}: described and derived {'agree' if parts[0] == parts[1] else f'differ: {parts}'}")
    print(f"derived, but refused: {derived.refusals or 'nothing'}")
    for name in options.methods:
        method: Any = METHODS[name].example
        inputs = batch
        if (tokens := method.part(KeptTokens)) is not None:  # it keeps those of the texts, with new numbers
            kept = sorted({config.pad_token_id, *batch["input_ids"].flatten().tolist()})
            method, inputs = tokens.with_kept(kept), {**batch}
            inputs["input_ids"] = torch.searchsorted(torch.tensor(kept), batch["input_ids"])
        try:
            found, moved = problems(options.folder, options.task, method, inputs, expected)
        except ValueError as error:
            print(f"{name}: refused: {error}")
            continue
        failed |= bool(found)
        print(f"{name}: {'; '.join(found) or 'works'}; outputs move by {moved:.2g}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
