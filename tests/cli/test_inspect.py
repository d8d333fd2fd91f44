"""`hf-freeze inspect`: parameters and multiply-adds by component, measured linears, and wrong folders in one line."""

import json
import re

import pytest
from support.recipes import cli, one_line_error, plain
from support.small import small_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BertConfig,
    BertForMaskedLM,
    Wav2Vec2ForCTC,
)
from typer.testing import CliRunner

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.methods import FFNPruning, Freeze, LowRank

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


@pytest.mark.parametrize("kind", ["variant", "native"])
def test_inspect(tmp_path, kind):
    config = BertConfig(**ARCHITECTURES["bert"].tiny)
    model = (
        make_variant(config, [Freeze(ffn="random", seed=5)], task="masked-lm")
        if kind == "variant"
        else BertForMaskedLM(config)
    )
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # no weight is read
    output = plain(cli("inspect", tmp_path, "--length", "16").output)
    count = count_parameters(model)
    name = type(model).__name__
    assert name in output
    row = next(line for line in output.splitlines() if re.match(r"\W*all\b", line))
    assert [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row)[:3]] == [
        count.total,
        count.trainable,
        count.stored,
    ]
    row = next(line for line in output.splitlines() if re.match(r"\W*ffn\b", line))
    trained = 0 if kind == "variant" else count.by_component["ffn"].total
    forward = 2 * 2 * 16 * 24
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row)]
    assert numbers == [
        count.by_component["ffn"].total,
        trained,
        trained,
        forward,
        forward * (1 if kind == "variant" else 2),
    ]
    assert ('ffn="random"' in output) is (kind == "variant")
    assert "at length 16" in output


def test_inspect_measures_the_linears(tmp_path):
    config = BertConfig(**ARCHITECTURES["bert"].tiny)
    model = make_variant(config, [LowRank(rank=3)], task="masked-lm")
    model.save_pretrained(tmp_path)
    table = plain(cli("inspect", tmp_path, "--latency", "--tokens", "2", "5").output).split("Linears of attention")[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [(row[2], row[3]) for row in rows if row[2]] == [("2", "dense"), ("5", "dense")] * 2 + [
        ("2", "plain"),
        ("5", "plain"),
    ]
    first = " ".join(row[0] for row in rows)
    assert "LowRankLinear 16 to 24" in first
    assert "rank=3" in first
    for row in rows:
        if row[2] and row[3] != "plain":
            ms, plain_ms, ratio = map(float, row[4:])
            assert min(ms, plain_ms, ratio) >= 0
    assert "tokens=0: must be an integer of at least 1" in one_line_error(
        "inspect", tmp_path, "--latency", "--tokens", "0", "5"
    )
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors" in one_line_error("inspect", tmp_path, "--latency")
    assert "Linears of" not in cli("inspect", tmp_path).output


def test_a_field_of_a_wrong_type_is_one_line(tmp_path):
    config = BertConfig(**ARCHITECTURES["bert"].tiny).to_dict() | {"hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "hidden_size" in one_line_error("inspect", tmp_path)


def test_a_model_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = cli("inspect", tmp_path / "nowhere", code=2)
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.output
