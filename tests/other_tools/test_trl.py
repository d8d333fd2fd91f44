"""TRL's SFTTrainer trains a variant; its frozen parts stay as they are."""

import json

import pytest
import torch
from support.processes import printed_by
from support.small import small_config
from support.text import SOURCE, TARGET, fast_tokenizer
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant, methods

pytest.importorskip("trl", reason="TRL is installed by hand (docs/other_tools.md)")

TRAIN = """
import json, sys
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
config = SFTConfig(
    folder + "-trained", max_steps=4, learning_rate=0.01, per_device_train_batch_size=4, report_to="none", use_cpu=True,
    bf16=False, logging_steps=1, weight_decay=0.1, max_length=32, model_init_kwargs={"trust_remote_code": True},
)
trainer = SFTTrainer(folder, args=config, train_dataset=Dataset.from_dict({"text": texts}))
trainer.train()
trainer.save_model()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(json.dumps(losses))
"""


def test_it_trains_what_is_trainable(tmp_path):
    folder = tmp_path / "model"
    tokenizer = fast_tokenizer(folder)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config = small_config("llama", vocab_size=len(tokenizer), max_position_embeddings=64, **special)
    applied = [
        methods.LowRank(components=["ffn"], rank=4),
        methods.Freeze(attention="random", embeddings="frozen", seed=1),
    ]
    variant = make_variant(config, applied, task="causal-lm")
    variant.save_pretrained(folder, remote_code=True)

    losses = json.loads(printed_by(TRAIN, folder, json.dumps(SOURCE + TARGET)).splitlines()[-1])

    assert losses[-1] < losses[0]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model-trained")
    assert type(trained) is type(variant)
    assert (tmp_path / "model-trained" / "modeling_hf_freeze.py").exists()
    after = dict(trained.named_parameters())
    frozen = {name for name, parameter in variant.named_parameters() if not parameter.requires_grad}
    assert frozen
    for name, before in variant.named_parameters():
        assert torch.equal(after[name], before) == (name in frozen), name
        assert after[name].requires_grad == before.requires_grad, name
