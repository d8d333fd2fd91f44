"""Adapters on a variant in shards, by recipes/accelerate/fsdp2.yaml: two processes save what one learns."""

import json
import subprocess
import sys

import peft
import pytest
import torch
from support import ROOT, TESTS
from support.children.fsdp2_adapters import IDS, optimizer_of, train
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.methods import FFNPruning, HeadPruning, Quantize
from hf_freeze.model.loading import load_model
from hf_freeze.training.adapters import with_adapters

CUT = [HeadPruning(share=0.5), FFNPruning(width=8)]
VARIANTS = {"cut": CUT, "int8": [*CUT, Quantize(weights="int8")]}


@pytest.mark.parametrize("methods", VARIANTS.values(), ids=VARIANTS)
def test_two_processes_save_what_one_learns(methods, tmp_path):
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(small_config("llama"))
    make_variant(original, methods, calibration=[{"input_ids": IDS}]).save_pretrained(tmp_path / "variant")
    expected = with_adapters(load_model(tmp_path / "variant"), seed=0)
    losses = train(expected, optimizer_of(expected), IDS, lambda loss: loss.backward())
    config = ROOT / "recipes" / "accelerate" / "fsdp2.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    child = ["-m", "support.children.fsdp2_adapters", tmp_path / "variant", tmp_path]
    done = subprocess.run([*launch, *child], cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:9000]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert all(one["count"] == 2 and one["whole"] == [] for one in found)
    assert [sum(steps) / 2 for steps in zip(*(one["losses"] for one in found), strict=True)] == pytest.approx(losses)
    saved = peft.PeftModel.from_pretrained(load_model(tmp_path / "variant"), tmp_path / "adapter")
    wanted = {name: p for name, p in expected.named_parameters() if "lora" in name}
    assert len(wanted) == 28
    for name, p in wanted.items():
        assert p.any(), name  # the second factors begin with zeros
        torch.testing.assert_close(saved.get_parameter(name), p, rtol=1e-4, atol=1e-6)
