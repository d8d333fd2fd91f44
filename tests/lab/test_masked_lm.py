"""Masked language modelling: blocks, what is masked, the Trainer, and runs of a grid that are cut off and go on."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.recipes import LONGER, MASKED, figures, write_recipe
from torch.nn import functional
from transformers import BertConfig, DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.data import Masking, TokenBatchSampler, builtin_corpus, masked_blocks, train_tokenizer
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.training import MaskedTokenTrainer
from hf_freeze.lab.training.masked_lm import TEST_KEY
from hf_freeze.methods import FactorizedEmbedding
from hf_freeze.training import label_smoothed_loss

TEXTS = list(builtin_corpus(train=60, dev=1, test=1)["train"]["target"])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 120, "wordpiece")


# -- blocks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 16, 64])
def test_blocks_hold_every_token_once(tokenizer, size):
    blocks = masked_blocks(TEXTS, tokenizer, size)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    joined = []
    for ids in blocks["input_ids"]:
        assert (ids[0], ids[-1]) == (cls, sep)
        joined += ids[1:-1]
    assert all(len(ids) == size for ids in blocks["input_ids"][:-1])
    assert len(blocks["input_ids"][-1]) <= size
    expected = [i for text in TEXTS for i in tokenizer(text)["input_ids"][1:]]  # each ends with [SEP]
    assert joined == expected[:-1]
    assert blocks["labels"] == blocks["input_ids"]


def test_what_is_no_block_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"block_size=2: a block holds \[CLS\], \[SEP\] and at least 1 token"):
        masked_blocks(TEXTS, tokenizer, 2)
    with pytest.raises(ValueError, match="the text has no tokens"):
        masked_blocks(["", ""], tokenizer, 8)
    for needs in (lambda other: masked_blocks(TEXTS, other, 8), Masking):
        with pytest.raises(ValueError, match=r"needs? a tokenizer with \[.*such as kind 'wordpiece'"):
            needs(train_tokenizer(TEXTS, 120))


# -- masking ---------------------------------------------------------------------------------------------------------------------


def test_what_is_masked(tokenizer):
    """15 % of what is no special token; of these 80 % become [MASK], 10 % a token drawn from all, 10 % stay."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, len(tokenizer), 200_000)
    special = rng.random(len(ids)) < 0.1
    ids = np.where(special, rng.integers(0, 5, len(ids)), ids)
    made = {name: np.array(values) for name, values in Masking(tokenizer)(ids, (1, 0)).items()}
    masked = made["labels"] != -100
    assert not (masked & special).any()
    assert (made["labels"][masked] == ids[masked]).all()
    assert (made["input_ids"][~masked] == ids[~masked]).all()
    assert masked[~special].mean() == pytest.approx(0.15, abs=0.005)
    hidden = made["input_ids"][masked]
    assert (hidden == tokenizer.mask_token_id).mean() == pytest.approx(0.8, abs=0.01)
    assert (hidden == ids[masked]).mean() == pytest.approx(0.1, abs=0.01)


def test_of_a_short_block_something_is_masked(tokenizer):
    """Or a batch might have no loss."""
    masking, block = Masking(tokenizer), [tokenizer.cls_token_id, 9, tokenizer.sep_token_id]
    for epoch in range(50):
        assert masking(block, (1, epoch))["labels"] == [-100, 9, -100]
    nothing = [tokenizer.cls_token_id, tokenizer.unk_token_id, tokenizer.sep_token_id]
    assert masking(nothing, (1, 0)) == {"input_ids": nothing, "labels": [-100] * 3}


@pytest.mark.parametrize("probability", [0, 1.5])
def test_a_probability_that_masks_nothing_is_refused(tokenizer, probability):
    with pytest.raises(ValueError, match=rf"probability={probability}\): must be above 0 and at most 1"):
        Masking(tokenizer, probability)


def test_masks_are_a_function_of_the_key_and_the_block(tokenizer):
    blocks = masked_blocks(TEXTS, tokenizer, 64)["input_ids"]
    one, other = Masking(tokenizer), Masking(tokenizer)
    torch.manual_seed(0)
    expected = [one(block, (3, 1)) for block in blocks]
    torch.manual_seed(1)
    assert [other(block, (3, 1)) for block in reversed(blocks)] == expected[::-1]
    for key in ((3, 2), (4, 1), (3,)):
        assert [one(block, key) for block in blocks] != expected


# -- the Trainer -----------------------------------------------------------------------------------------------------------------


def model(tokenizer, *methods):
    config = BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    made = make_variant(config, list(methods), task="masked-lm", seed=1)
    with torch.no_grad():  # or each token is as likely as any other
        made.get_output_embeddings().weight.normal_()
    return made.eval()


def trainer(folder, tokenizer, made, *, max_tokens=100):
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", accelerator_config={"even_batches": False}, seed=3
    )
    return MaskedTokenTrainer(
        model=made,
        args=arguments,
        train_dataset=masked_blocks(TEXTS, tokenizer, 16),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        compute_loss_func=label_smoothed_loss(0.0),
        max_tokens=max_tokens,
    )


@torch.no_grad()
def naive_scores(made, tokenizer, blocks):
    """Block by block, token by token, with the logits of all positions."""
    masking, found = Masking(tokenizer), []
    for block in blocks["input_ids"]:
        made_of = masking(block, TEST_KEY)
        logits = made(input_ids=torch.tensor([made_of["input_ids"]])).logits[0].double()
        nll, tokens, right = 0.0, 0, 0
        for step, wanted in zip(logits, made_of["labels"], strict=True):
            if wanted != -100:
                nll -= functional.log_softmax(step, -1)[wanted].item()
                tokens += 1
                right += int(step.argmax() == wanted)
        found.append([nll, tokens, right])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("methods", [(), (FactorizedEmbedding(rank=4),)], ids=["plain", "factorized"])
def test_score_is_a_naive_loop_whatever_the_batches(tmp_path, tokenizer, methods):
    made = model(tokenizer, *methods)
    blocks = masked_blocks(TEXTS[:20], tokenizer, 16)
    expected = naive_scores(made, tokenizer, blocks)
    assert expected[:, 1].sum() > 20
    for max_tokens in (16, 100):
        scored = trainer(tmp_path, tokenizer, made, max_tokens=max_tokens).score(blocks)
        torch.testing.assert_close(scored, expected, rtol=1e-5, atol=1e-5)
    metrics = trainer(tmp_path, tokenizer, made).evaluate(blocks)
    nll, tokens, right = expected.sum(0).tolist()
    assert metrics["eval_loss"] == pytest.approx(nll / tokens, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(np.exp(nll / tokens), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(right / tokens)


def test_the_loss_and_its_gradient_are_those_of_the_native_class(tmp_path, tokenizer):
    """Which computes the logits of all positions."""
    made = model(tokenizer)
    running = trainer(tmp_path, tokenizer, made)
    batch = next(iter(running.get_train_dataloader()))
    assert (batch["labels"] != -100).sum() > 3

    def gradients(loss):
        made.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}

    native = made(**batch).loss
    wanted = gradients(native)
    loss = running.compute_loss(made, dict(batch))
    torch.testing.assert_close(loss, native)
    found = gradients(loss)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-7)
    assert made(**batch).logits.shape == (*batch["input_ids"].shape, len(tokenizer)), "the output is itself again"


def test_training_masks_anew_in_each_epoch_and_testing_does_not(tmp_path, tokenizer):
    running = trainer(tmp_path, tokenizer, model(tokenizer))
    examples = [running.train_dataset[i] for i in range(8)]
    lengths = [len(example["input_ids"]) for example in examples]

    def masked(epoch, shuffle, seed=3):
        sampler = TokenBatchSampler(lengths, lengths, 100, seed=seed, shuffle=shuffle)
        sampler.set_epoch(epoch)
        return running._collator(sampler)(examples)["input_ids"]

    assert torch.equal(masked(0, shuffle=True), masked(0, shuffle=True))
    assert not torch.equal(masked(0, shuffle=True), masked(1, shuffle=True))
    assert not torch.equal(masked(0, shuffle=True), masked(0, shuffle=True, seed=4))
    assert torch.equal(masked(0, shuffle=False), masked(1, shuffle=False, seed=4))


# -- runs ------------------------------------------------------------------------------------------------------------------------


def recipe_of(folder, **changes):
    return load_recipe(write_recipe(folder / "r.yaml", **MASKED | LONGER | {"only": ["0"]} | changes))


class Cut(Exception):
    """The run is cut off."""


def test_a_run_cut_off_within_an_epoch_ends_as_an_undisturbed_one(tmp_path):
    (run,) = expand(recipe_of(tmp_path))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = execute(run, whole)

    def stop(message):
        if list((cut / "checkpoints").glob("checkpoint-*")) and message.get("epoch", 0) % 1:
            raise Cut

    with pytest.raises(Cut):
        execute(run, cut, stop)
    resumed = execute(run, cut)
    assert resumed["resumed"]
    assert figures(resumed) == figures(undisturbed)
    assert set(resumed["metrics"]) == {
        "test_loss", "test_perplexity", "test_accuracy", "dev_loss", "dev_perplexity", "dev_accuracy"
    }  # fmt: skip
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    items = np.load(cut / "items.npy")
    assert items.shape[1] == 2
    assert items[:, 0].sum() / items[:, 1].sum() == pytest.approx(resumed["metrics"]["test_loss"])
    assert json.loads((cut / "model" / "config.json").read_text())["model_type"].endswith("bert")


def test_rows_and_seeds_are_tested_on_the_same_masked_tokens(tmp_path):
    recipe = recipe_of(tmp_path, only=["0", "2.1"], seeds=[1, 2], **{"presets/small/training/epochs": 0})
    tokens = []
    for number, run in enumerate(expand(recipe)):
        execute(run, tmp_path / str(number))
        tokens.append(np.load(tmp_path / str(number) / "items.npy")[:, 1])
    assert len(tokens) == 4
    assert all(np.array_equal(found, tokens[0]) for found in tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"presets/small/tokenizer/kind": "bpe"},
            r"tokenizer\.kind='bpe' does not fit task 'masked-lm'; choose from \['wo",
        ),
        (
            {"rows/0/tokenizer": {"vocab_size": 90}},
            "row '0': perplexity is per token, so all rows of task",
        ),
        ({"decoding": {"num_beams": 2}}, r"decoding is for the tasks .*, not for 'masked-lm'"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path, **changes)


def test_blocks_longer_than_the_backbone_are_refused(tmp_path):
    (run,) = expand(recipe_of(tmp_path, **{"presets/small/training/block_size": 33}))
    with pytest.raises(ValueError, match=r"training\.block_size=33: the backbone has 32 positions"):
        execute(run, tmp_path / "run")
