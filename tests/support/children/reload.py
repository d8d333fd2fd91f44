"""Child of contract/test_processes.py: opens what the parent saved, under another global seed. Prints what is wrong, as JSON.

Merged models come first, before hf_freeze is imported: they must load without it.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

torch.manual_seed(987)
manifest = json.loads(Path(sys.argv[1]).read_text())
problems: list[str] = []


def read(entry, name):
    return load_file(Path(entry["folder"]) / f"{name}.safetensors")


def load(entry):
    auto_class = getattr(transformers, entry["auto_class"])
    return auto_class.from_pretrained(entry["folder"], output_loading_info=True)


for entry in manifest["merged"]:
    model, info = load(entry)
    found = [f"{kind}: {info[kind]}" for kind in ("missing_keys", "unexpected_keys") if info[kind]]
    if f"{type(model).__module__}.{type(model).__name__}" != entry["native_class"]:
        found.append(f"opened as {type(model)}")
    with torch.no_grad():
        actual = model(**read(entry, "batch"))
    for name, expected in read(entry, "expected").items():
        if not torch.allclose(actual[name], expected, rtol=1e-5, atol=1e-5):
            found.append(f"{name} is off by {(actual[name] - expected).abs().max().item()}")
    problems += [f"{entry['id']}: {problem}" for problem in found]
if "hf_freeze" in sys.modules:
    problems.append("hf_freeze was imported by opening merged models")

from support.models import reload_problems  # noqa: E402

for entry in manifest["saved"]:
    torch.manual_seed(654)
    try:
        model, info = load(entry)
        found = reload_problems(model, info, read(entry, "expected"), entry["requires_grad"], read(entry, "batch"))
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    problems += [f"{entry['id']}: {problem}" for problem in found]

print(json.dumps({"opened": len(manifest["merged"]) + len(manifest["saved"]), "problems": problems}))
