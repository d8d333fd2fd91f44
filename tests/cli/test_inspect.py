"""`hf-freeze inspect` says for what its multiply-adds are."""

import pytest
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, Wav2Vec2ForCTC
from typer.testing import CliRunner

from hf_freeze import make_variant
from hf_freeze.cli import app
from hf_freeze.methods import FFNPruning

UNITS = {
    "vit": (AutoModelForImageClassification, "per example (pixel_values 3 x 16 x 16)"),
    "wav2vec2": (Wav2Vec2ForCTC, "per example (input_values 8000)"),
    "qwen3": (AutoModelForCausalLM, "per token at length 8"),
}


@pytest.mark.parametrize("model_type", UNITS)
@pytest.mark.parametrize("pruned", [False, True], ids=["native", "variant"])
def test_operations_are_per_token_of_text_and_per_example_of_all_else(model_type, pruned, tmp_path):
    auto, unit = UNITS[model_type]
    config = small_config(model_type)
    model = auto.from_config(config) if hasattr(auto, "from_config") else auto(config)
    (make_variant(model, [FFNPruning(width=16)]) if pruned else model).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--length", "8"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert f"multiply-adds {unit}" in result.output
    assert ("per token" in result.output) == (model_type == "qwen3")
