"""The smoothed loss against torch and the Trainer's own, the token-batch Trainer against plain loops."""

import math

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional
from transformers import DataCollatorForSeq2Seq, MarianConfig, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.methods import Freeze
from hf_freeze.training import label_smoothed_loss


def example(vocabulary=11):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(4, 6, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (4, 6), generator=generator)
    labels[0, 3:] = -100
    labels[2, 1:] = -100
    return logits, labels


def by_definition(logits, labels, smoothing):
    """Summed over the tokens that count: (1 - s) · nll + s · mean over the vocabulary of -log p."""
    total = torch.zeros(())
    for row, wanted in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True):
        if wanted != -100:
            log_p = row - row.exp().sum().log()
            total = total - (1 - smoothing) * log_p[wanted] - smoothing * log_p.mean()
    return total


@pytest.mark.parametrize("smoothing", [0, 0.1, 0.5, 1])
def test_the_smoothed_loss_is_its_definition(smoothing):
    logits, labels = example()
    tokens = int((labels != -100).sum())
    expected = by_definition(logits, labels, smoothing)
    loss = label_smoothed_loss(smoothing)
    torch.testing.assert_close(loss({"logits": logits}, labels), expected / tokens)
    for items in (100, torch.tensor(100)):
        torch.testing.assert_close(loss({"logits": logits}, labels, items), expected / 100)
        torch.testing.assert_close(loss({"logits": logits}, labels, num_items_in_batch=items), expected / 100)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_the_smoothed_loss_is_that_of_the_trainer(smoothing):
    logits, labels = example()
    native = LabelSmoother(epsilon=smoothing)({"logits": logits}, labels.clone())
    torch.testing.assert_close(label_smoothed_loss(smoothing)({"logits": logits}, labels), native)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    label_smoothed_loss(smoothing)({"logits": ours}, labels).backward()
    LabelSmoother(epsilon=smoothing)({"logits": theirs}, labels.clone()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_smoothed_loss_takes_model_outputs_and_half_precision():
    logits, labels = example()
    loss = label_smoothed_loss(0.1)
    found = loss({"logits": logits.bfloat16()}, labels)
    assert found.dtype == torch.float32  # summed in full precision
    torch.testing.assert_close(found, loss({"logits": logits.bfloat16().float()}, labels))
    outputs = model().eval()(**ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm"))
    labels = ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm")["labels"]
    torch.testing.assert_close(label_smoothed_loss(0.0)(outputs, labels), outputs.loss)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan])
def test_a_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match=rf"label smoothing {smoothing} is outside 0\.\.1"):
        label_smoothed_loss(smoothing)


@pytest.mark.parametrize("shift", [False, True])
def test_an_auxiliary_loss_counts_once_in_a_step(shift):
    logits, labels = example()
    loss = label_smoothed_loss(0.1, shift=shift)
    plain = loss({"logits": logits}, labels)
    torch.testing.assert_close(loss({"logits": logits, "auxiliary_loss": torch.tensor(3.0)}, labels), plain + 3)
    # Four batches of unequally many labels, over accumulation or processes: 3 times the share of labels of each.
    items = int((labels[:, 1:] if shift else labels).ne(-100).sum())
    parts = [(logits[i : i + 1], labels[i : i + 1]) for i in range(4)]
    weight = torch.tensor(3.0, requires_grad=True)
    total = sum(loss({"logits": x, "auxiliary_loss": weight}, y, items) for x, y in parts)
    torch.testing.assert_close(total, plain + 3)
    total.backward()
    assert weight.grad == pytest.approx(1)
    shares = [(y[:, 1:] if shift else y).ne(-100).sum() / items for _, y in parts]
    total = sum(
        loss({"logits": x, "auxiliary_loss": torch.tensor(float(i))}, y, items) for i, (x, y) in enumerate(parts)
    )
    torch.testing.assert_close(total, plain + sum(i * share for i, share in enumerate(shares)))
    with torch.no_grad():  # in evaluation
        torch.testing.assert_close(loss({"logits": logits, "auxiliary_loss": weight}, labels), plain)


# -- the Trainer -----------------------------------------------------------------------------------------------------------------


def model(**changes):
    config = MarianConfig(**(ARCHITECTURES["marian"].tiny | {"dropout": 0.0} | changes))
    return make_variant(config, [Freeze(ffn="random", seed=2)], task="seq2seq-lm", init="marian", seed=1)


def sentences(number):
    """Ids 2..39 of uneven lengths, closed by 1; never 0, which pads."""
    columns = {"input_ids": [], "labels": []}
    for i in range(number):
        for side, column in enumerate(columns.values()):
            column.append([2 + (i * 17 + j * (5 + side)) % 38 for j in range(1 + (i * (3 + side)) % 9)] + [1])
    return Dataset.from_dict(columns)


def trainer(folder, made, train, *, dev=None, max_tokens=40, **arguments):
    settings = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=3,
        accelerator_config={"even_batches": False},
        **arguments,
    )
    return TokenBatchTrainer(
        model=made,
        args=settings,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=DataCollatorForSeq2Seq(_Padder(), model=made, padding=True),
        compute_loss_func=label_smoothed_loss(0.1),
        max_tokens=max_tokens,
    )


class _Padder:
    """The part of a tokenizer that the collator uses."""

    padding_side = "right"
    deprecation_warnings: dict = {}  # noqa: RUF012

    def pad(self, features, **kwargs):
        longest = max(len(f["input_ids"]) for f in features)
        fill = [longest - len(f["input_ids"]) for f in features]
        padded = {
            "input_ids": [list(f["input_ids"]) + n * [0] for f, n in zip(features, fill, strict=True)],
            "attention_mask": [len(f["input_ids"]) * [1] + n * [0] for f, n in zip(features, fill, strict=True)],
        }
        if "labels" in features[0]:
            padded["labels"] = [list(f["labels"]) for f in features]
        return {name: torch.tensor(value) for name, value in padded.items()}


@torch.no_grad()
def naive_nll(made, data):
    """Sentence by sentence, token by token: (sum of nats, tokens)."""
    made.eval()
    total, tokens = 0.0, 0
    for row in data:
        logits = made(
            input_ids=torch.tensor([row["input_ids"]]),
            decoder_input_ids=torch.tensor([[made.config.decoder_start_token_id, *row["labels"][:-1]]]),
        ).logits[0]
        for step, wanted in zip(logits.double(), row["labels"], strict=True):
            total -= functional.log_softmax(step, -1)[wanted].item()
            tokens += 1
    return total, tokens


@pytest.mark.parametrize("max_tokens", [12, 40, 1000])
def test_evaluate_is_a_naive_loop(tmp_path, max_tokens):
    made = model(dropout=0.5)
    with torch.no_grad():
        made.final_logits_bias.normal_()
    dev = sentences(23)
    evaluating = trainer(tmp_path, made, dev, dev=dev, max_tokens=max_tokens)
    made.train()
    metrics = evaluating.evaluate()
    assert made.training, "the mode is restored"
    total, tokens = naive_nll(made, dev)
    assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)  # no smoothing, no dropout
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    half = evaluating.evaluate(dev.select(range(7)), metric_key_prefix="half")
    total, tokens = naive_nll(made, dev.select(range(7)))
    assert half["half_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert evaluating.state.log_history[-1]["half_loss"] == half["half_loss"]


def test_accumulated_batches_make_the_step_of_one_big_batch(tmp_path):
    data = sentences(24)
    longest = max(map(len, data["labels"]))

    def trained(max_tokens, accumulation):
        made = model()
        running = trainer(
            tmp_path,
            made,
            data,
            max_tokens=max_tokens,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=3,
            learning_rate=0.5,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
        )
        batches = len(running.get_train_dataloader())
        running.train()
        return made, batches, running.state.global_step

    big, batches, steps = trained(10_000, 1)
    assert (batches, steps) == (1, 3)
    number = len(trainer(tmp_path, model(), data, max_tokens=2 * longest).get_train_dataloader())
    assert number > 4, "batches of unequal numbers of tokens"
    small, batches, steps = trained(2 * longest, number)
    assert (batches, steps) == (number, 3)
    fresh = model()
    moved = 0.0
    for name, parameter in small.named_parameters():
        other = big.get_parameter(name)
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        change = (other - fresh.get_parameter(name)).abs().max().item()
        moved = max(moved, change)
        assert (change > 0) == parameter.requires_grad or "k_proj.bias" in name, (
            name
        )  # softmax does not see a key's bias
    assert moved > 0.05


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_auxiliary_loss_has_its_gradient_once(tmp_path, accumulation):
    made, plain = model(), model()
    aside = nn.Parameter(torch.zeros(2))  # of the auxiliary loss alone
    made.register_parameter("aside", aside)

    def add(module, arguments, outputs):
        if module.training:
            outputs["auxiliary_loss"] = aside[0] - 2 * aside[1]
        return outputs

    made.register_forward_hook(add)
    data = sentences(24)
    settings = {"learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"max_steps": 2, "gradient_accumulation_steps": accumulation}
    for each in (made, plain):
        running = trainer(tmp_path, each, data, dev=data, **settings)
        assert len(running.get_train_dataloader()) == 5, "with accumulation the second step has fewer"
        running.train()
        assert math.isfinite(running.evaluate()["eval_loss"])
    torch.testing.assert_close(aside.data, torch.tensor([-1.0, 2.0]))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(made.get_parameter(name), parameter, msg=name)


def test_a_step_is_the_gradient_of_the_smoothed_mean(tmp_path):
    data = sentences(9)
    made, start = model(), model()
    settings = {"learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    running = trainer(tmp_path, made, data, max_tokens=10_000, max_steps=1, **settings)
    running.train()
    total, tokens = torch.zeros(()), 0
    for row in data:
        logits = start.train()(
            input_ids=torch.tensor([row["input_ids"]]), decoder_input_ids=torch.tensor([[0, *row["labels"][:-1]]])
        ).logits
        total = total + by_definition(logits, torch.tensor([row["labels"]]), 0.1)
        tokens += len(row["labels"])
    (total / tokens).backward()
    for name, parameter in start.named_parameters():
        step = parameter.grad if parameter.grad is not None else 0
        torch.testing.assert_close(made.get_parameter(name), parameter - step, rtol=1e-4, atol=1e-6)


def test_training_lowers_the_perplexity_and_every_epoch_sees_every_sentence(tmp_path):
    data = sentences(40)
    made = model()
    running = trainer(tmp_path, made, data, dev=data, max_tokens=60, num_train_epochs=6, learning_rate=0.02)
    seen = []
    native_collate = running.data_collator

    def collate(rows):
        seen.extend(str(row["labels"]) for row in rows)
        return native_collate(rows)

    running.data_collator = collate
    before = running.evaluate()["eval_perplexity"]
    seen.clear()
    running.train()
    assert sorted(seen) == sorted(6 * [str(labels) for labels in data["labels"]])
    assert running.evaluate()["eval_perplexity"] < 0.6 * before


def test_ids_the_model_has_no_row_for_are_refused(tmp_path):
    data = sentences(5).add_item({"input_ids": [3, 40, 1], "labels": [3, 1]})
    with pytest.raises(ValueError, match=r"sentence 5 holds token id 40, outside the model's vocabulary 0\.\.39"):
        trainer(tmp_path, model(), data, max_steps=1).train()


def test_a_budget_below_the_longest_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_tokens=5 is below the longest target"):
        trainer(tmp_path, model(), sentences(20), max_tokens=5, max_steps=1).train()
