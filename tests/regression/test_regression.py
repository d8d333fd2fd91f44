"""What earlier versions saved loads the same for ever (tests/regression/make.py)."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.registry import METHODS
from hf_freeze.model import classes, config, migrations

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/*/config.json"))


def test_every_method_is_there():
    kept = {
        method["method"] for folder in FOLDERS for method in json.loads((folder / "config.json").read_text())["methods"]
    }
    assert kept == set(METHODS), "run python tests/regression/make.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_model_of_an_earlier_version_computes_what_it_did(folder):
    saved = json.loads((folder / "outputs.json").read_text())
    model, info = AUTO_CLASSES[saved["task"]].from_pretrained(folder, output_loading_info=True)
    assert type(model) is getattr(classes, saved["class"])
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sorted(name for name, p in model.named_parameters() if p.requires_grad) == saved["trainable"]
    batch = {name: torch.tensor(value) for name, value in saved["batch"].items()}
    with torch.no_grad():
        logits = model.eval()(**batch)[1 if "labels" in batch else 0]
    torch.testing.assert_close(logits.flatten(), torch.tensor(saved["logits"]), rtol=1e-4, atol=1e-4)


def test_a_config_is_migrated_version_by_version(tmp_path, monkeypatch):
    """0.3 calls `ffn` of Freeze what 0.2 called `mlp` and 0.1 `feed_forward`."""

    def rename(old, new):
        def change(config):
            for method in config.methods:
                if method.get("method") == "freeze" and old in method:
                    method[new] = method.pop(old)

        return change

    made = make_variant(
        GPT2Config(**ARCHITECTURES["gpt2"].tiny), [methods.Freeze(ffn="random", seed=1)], task="causal-lm"
    )
    expected = made.state_dict()
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(config, "__version__", "0.3.0")
    monkeypatch.setattr(
        migrations, "MIGRATIONS", {"0.3.0": rename("mlp", "ffn"), "0.2.0": rename("feed_forward", "mlp")}
    )
    for version, name in (("0.1.0", "feed_forward"), ("0.2.0", "mlp"), ("0.3.0", "ffn")):
        damaged = json.loads(json.dumps(saved)) | {"hf_freeze_version": version}
        damaged["methods"][0][name] = damaged["methods"][0].pop("ffn")
        (tmp_path / "config.json").write_text(json.dumps(damaged))
        model = AUTO_CLASSES["causal-lm"].from_pretrained(tmp_path)
        assert model.config.methods == saved["methods"], version
        assert model.config.hf_freeze_version == "0.3.0"
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    (tmp_path / "config.json").write_text(json.dumps(damaged | {"hf_freeze_version": "0.2.0", "methods": [{"mlp": 1}]}))
    with pytest.raises(ValueError, match="method"):
        AUTO_CLASSES["causal-lm"].from_pretrained(tmp_path)
