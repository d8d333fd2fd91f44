"""Save small variants of this version with their outputs, for test_regression.py: every later version must load them.

    python tests/regression/make.py    # once a release; writes tests/regression/VERSION

What is there is never written again. One folder for each method on the first architecture that it supports, and one for each
architecture without methods. Values are multiples of 1/64, so that the files compress.
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # for the modules of tests/support

from support.cases import PLAIN  # noqa: E402
from support.models import build  # noqa: E402

from hf_freeze import __version__  # noqa: E402
from hf_freeze.architectures.base import canonical_parameters  # noqa: E402


def chosen() -> dict[str, object]:
    """Name of the folder -> case."""
    found: dict[str, object] = {}
    for case in sorted(PLAIN, key=lambda case: case.architecture.model_type != "marian"):
        names = [method.name for method in case.methods] or [f"none-{case.architecture.model_type}"]
        found.setdefault("-".join(names) + "-finalized" * case.finalized, case)
    return found


@torch.no_grad()
def outputs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.eval()(**batch)[1 if "labels" in batch else 0]


def main() -> None:
    for name, case in chosen().items():
        folder = HERE / __version__ / name
        if folder.exists():
            continue
        model = build(case)
        with torch.no_grad():
            for key, parameter in canonical_parameters(model):
                if key not in model.seeded_tensors and model._component(key) != "constant":
                    parameter.copy_((parameter * 64).round() / 64)
        model.save_pretrained(folder)
        saved = {
            "class": type(model).__name__,
            "task": case.task,
            "batch": {key: value.tolist() for key, value in case.batch().items()},
            "logits": [round(value, 5) for value in outputs(model, case.batch()).flatten().tolist()],
            "trainable": sorted(key for key, parameter in model.named_parameters() if parameter.requires_grad),
        }
        (folder / "outputs.json").write_text(json.dumps(saved) + "\n", encoding="utf-8")
        print(folder.relative_to(HERE))


if __name__ == "__main__":
    main()
