"""Decoder-only backbones: fused projections, language modelling by Trainer and pipeline, a real pretrained Llama."""

import math

import pytest
import torch
from support import ROOT
from support.text import TARGET
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_freeze import make_variant, methods
from hf_freeze.lab.data import text_blocks, train_tokenizer
from hf_freeze.training import label_smoothed_loss

STORIES = ROOT.parent / "shared" / "data" / "stories260k" / "hf"
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_inner=64, n_positions=40),
    "llama": LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
    ),
}
for config in CONFIGS.values():
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 1


def test_the_fused_projection_is_three_matrices():
    """Glorot bounds of d x d, for seeded and for trained weights, and three identities."""
    frozen, diagonal, trained = (
        make_variant(CONFIGS["gpt2"], made, task="causal-lm", init="marian")
        for made in ([methods.Freeze(attention="random")], [methods.Freeze(attention="diagonal")], [])
    )
    bound = math.sqrt(6 / (32 + 32))
    for model in (frozen, trained):
        for name in ("c_attn", "c_proj"):
            largest = model.transformer.h[0].attn.get_submodule(name).weight.abs().max().item()
            assert 0.98 * bound < largest < bound, name
        ffn = model.transformer.h[0].mlp.c_fc.weight.abs().max().item()
        assert 0.98 * math.sqrt(6 / 96) < ffn < math.sqrt(6 / 96)
    assert torch.equal(diagonal.transformer.h[1].attn.c_attn.weight, torch.eye(32).repeat(1, 3))
    assert not diagonal.transformer.h[1].attn.c_attn.bias.any()


def test_diagonal_attention_passes_values_through():
    """With identities everywhere, attention is the softmax average of its inputs: checked against that formula."""
    model = make_variant(CONFIGS["gpt2"], [methods.Freeze(attention="diagonal")], task="causal-lm").eval()
    attention = model.transformer.h[0].attn
    x = torch.randn(1, 6, 32)
    with torch.no_grad():
        actual = attention(x)[0]
    heads = x.view(1, 6, 4, 8).transpose(1, 2)
    scores = heads @ heads.transpose(2, 3) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ heads).transpose(1, 2).reshape(1, 6, 32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shifted_loss_is_the_models(name):
    model = make_variant(CONFIGS[name], [], task="causal-lm").eval()
    ids = torch.randint(2, 50, (3, 12))
    labels = ids.clone()
    labels[0, :5] = -100
    outputs = model(input_ids=ids, labels=labels)
    for items in (None, torch.tensor(20)):
        ours = label_smoothed_loss(0.0, shift=True)(outputs, labels, items)
        torch.testing.assert_close(ours, model(input_ids=ids, labels=labels, num_items_in_batch=items).loss)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "made", [[], [methods.AdaptiveEmbedding(cutoffs=[12, 26], factor=2)]], ids=["plain", "adaptive"]
)
def test_a_part_of_a_step_without_labels_adds_nothing(name, made):
    model = make_variant(CONFIGS[name], made, task="causal-lm").train()
    ids = torch.randint(2, 50, (3, 12))
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(20)).loss
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainers_label_smoothing_shifts(name, tmp_path):
    """It looks causal models up by the name of their class."""
    model = make_variant(CONFIGS[name], [], task="causal-lm")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments)
    ids = torch.randint(2, 50, (3, 12))
    loss = trainer.compute_loss(model.eval(), {"input_ids": ids, "labels": ids})
    expected = label_smoothed_loss(0.1, shift=True)(model(input_ids=ids), ids)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trained_variant_writes_text(name, tmp_path):
    tokenizer = train_tokenizer(TARGET * 5, 50, eos="before")
    blocks = text_blocks(TARGET * 30, tokenizer, 24)
    model = make_variant(CONFIGS[name], [methods.Freeze(ffn="random")], task="causal-lm", init="marian")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=60,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=blocks, data_collator=DataCollatorForSeq2Seq(tokenizer)
    )
    trainer.train()
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert losses[-1] < 0.7 * math.log(50)
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = ["the dog", "we go to"]
    written = pipeline("text-generation", model=str(tmp_path / "model"))(prompts, max_new_tokens=12, do_sample=False)
    merged = pipeline("text-generation", model=model.merge().eval(), tokenizer=tokenizer)
    assert written == merged(prompts, max_new_tokens=12, do_sample=False)
    texts = [result[0]["generated_text"] for result in written]
    assert all(len(text) > len(prompt) for text, prompt in zip(texts, prompts, strict=True))


@pytest.mark.skipif(not STORIES.exists(), reason=f"the pretrained Llama is not at {STORIES}")
def test_a_pretrained_llama_freezes_trains_saves_and_generates(tmp_path):
    native = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = make_variant(native, [methods.Freeze(embeddings="frozen", attention="frozen")]).eval()
    prompt = tokenizer("Once upon a time, there was a little", return_tensors="pt")
    expected = native.generate(**prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(model.generate(**prompt, max_new_tokens=30, do_sample=False), expected)
    story = tokenizer.decode(expected[0])
    assert "girl" in story or "boy" in story, story

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = tokenizer("A dog runs in the snow with a red ball.", return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for _ in range(5):
        loss = model.train()(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        frozen = "embed_tokens" in name or "self_attn" in name
        assert torch.equal(parameter, before[name]) == frozen == (not parameter.requires_grad), name

    model.eval().save_pretrained(tmp_path / "stories")
    tokenizer.save_pretrained(tmp_path / "stories")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stories")
    with torch.no_grad():
        assert torch.equal(reloaded(**prompt).logits, model(**prompt).logits)
    generated = pipeline("text-generation", model=str(tmp_path / "stories"))
    text = generated("Once upon a time", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert text.startswith("Once upon a time")
    assert len(text) > len("Once upon a time") + 20

    random_ffn = make_variant(native, [methods.Freeze(ffn="random")])
    random_ffn.save_pretrained(tmp_path / "random")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("stories", "random")]
    assert sizes[1] < 0.6 * sizes[0]
