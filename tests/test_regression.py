"""What earlier versions saved loads the same for ever (tests/regression/make.py)."""

import json
from pathlib import Path

import pytest
import torch

from hf_freeze import variant
from hf_freeze.registry import METHODS
from hf_freeze.variant import TASKS

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "regression").glob("*/*/config.json"))


def test_every_method_is_there():
    kept = {
        method["method"] for folder in FOLDERS for method in json.loads((folder / "config.json").read_text())["methods"]
    }
    assert kept == set(METHODS), "run python tests/regression/make.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_model_of_an_earlier_version_computes_what_it_did(folder):
    saved = json.loads((folder / "outputs.json").read_text())
    model, info = TASKS[saved["task"]].from_pretrained(folder, output_loading_info=True)
    assert type(model) is getattr(variant, saved["class"])
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sorted(name for name, p in model.named_parameters() if p.requires_grad) == saved["trainable"]
    batch = {name: torch.tensor(value) for name, value in saved["batch"].items()}
    with torch.no_grad():
        logits = model.eval()(**batch)[1 if "labels" in batch else 0]
    torch.testing.assert_close(logits.flatten(), torch.tensor(saved["logits"]), rtol=1e-4, atol=1e-4)
