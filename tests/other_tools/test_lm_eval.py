"""lm-eval scores the folder of a variant, by its command, on a task of local files."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.processes import new_process
from support.small import small_config
from support.text import TARGET, fast_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_freeze import make_variant, methods

pytest.importorskip("lm_eval", reason="lm-eval is installed by hand (docs/other_tools.md)")

STORIES = Path(os.environ.get("HF_FREEZE_DATA", ROOT.parent / "shared" / "data")) / "stories260k" / "hf"
TASK = """
task: sentences
dataset_path: json
dataset_kwargs: {data_files: {test: sentences.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""


def tiny(folder):
    tokenizer = fast_tokenizer(folder, end_of_text=False)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config = small_config("llama", vocab_size=len(tokenizer), max_position_embeddings=64, **special)
    applied = [methods.LowRank(components=["ffn"], rank=4), methods.Freeze(attention="random", seed=1)]
    return make_variant(config, applied, task="causal-lm")


def stories(folder):
    if not STORIES.exists():
        pytest.skip(f"no checkpoint in {STORIES}; set HF_FREEZE_DATA to the folder that holds stories260k/")
    AutoTokenizer.from_pretrained(STORIES).save_pretrained(folder)
    return make_variant(STORIES, [methods.FFNPruning(width=160)], task="causal-lm")


def bits_per_byte(folder):
    """Of the sentences, each after the token that lm-eval puts before all that the tokenizer gives, computed here."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    nats = 0.0
    for sentence in TARGET:
        ids = torch.tensor([[first, *tokenizer(sentence)["input_ids"]]])
        with torch.no_grad():
            logarithms = model(ids[:, :-1]).logits.log_softmax(-1)
        nats -= logarithms.gather(-1, ids[:, 1:, None]).sum().item()
    return nats / sum(len(sentence.encode()) for sentence in TARGET) / math.log(2)


@pytest.mark.parametrize("make", [tiny, stories])
def test_its_command_scores_a_variant(make, tmp_path):
    make(tmp_path / "model").save_pretrained(tmp_path / "model", remote_code=True)
    (tmp_path / "sentences.yaml").write_text(TASK)
    (tmp_path / "sentences.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TARGET))

    command = "run --model hf --model_args pretrained=model,trust_remote_code=True --tasks sentences --include_path ."
    command += " --device cpu --batch_size 1 --output_path results.json"
    done = new_process("", *command.split(), module="lm_eval", folder=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.rglob("results*.json")
    score = json.loads(results.read_text())["results"]["sentences"]["bits_per_byte,none"]
    assert score == pytest.approx(bits_per_byte(tmp_path / "model"), rel=1e-5)
    assert score < (4 if make is stories else 100)
