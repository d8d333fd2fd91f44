"""Healing: what a student learns, what is stored, and that a killed call ends as an uninterrupted one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small import small_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_freeze import make_variant
from hf_freeze.methods.ffn_pruning import FFNPruning
from hf_freeze.methods.freeze import Freeze
from hf_freeze.model.samples import samples_of
from hf_freeze.seeded.tensor import fingerprint
from hf_freeze.training import healing
from hf_freeze.training import healing_targets as targets
from hf_freeze.training.healing import Healed, heal, parse_limit
from hf_freeze.training.healing_targets import Objective, texts_of

CASES = {
    "sentences": ("bert", AutoModel),
    "classes": ("bert", AutoModelForSequenceClassification),
    "token classes": ("bert", AutoModelForTokenClassification),
    "answers": ("bert", AutoModelForQuestionAnswering),
    "choices": ("bert", AutoModelForMultipleChoice),
    "next tokens": ("llama", AutoModelForCausalLM),
    "translations": ("marian", AutoModelForSeq2SeqLM),
}


def original_of(case: str) -> Any:
    model_type, auto_class = CASES[case]
    torch.manual_seed(0)
    model = auto_class.from_config(small_config(model_type)).eval()
    with torch.no_grad():
        for p in model.parameters():  # outputs that differ by text
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def samples_for(model: Any, case: str, count: int = 24, batch: int = 3) -> Any:
    """Texts of 3..10 tokens; the first and last real token are anything."""
    draw, vocabulary, batches = torch.Generator().manual_seed(1), model.config.vocab_size, []
    for _ in range(count // batch):
        shape = (batch, 2, 10) if case == "choices" else (batch, 10)
        ids = torch.randint(3, vocabulary, shape, generator=draw)
        mask = torch.arange(10).expand(shape) < torch.randint(3, 11, (*shape[:-1], 1), generator=draw)
        batches.append({"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()})
        if case == "translations":
            batches[-1]["labels"] = torch.randint(3, vocabulary, (batch, 6), generator=draw)
            batches[-1]["labels"][0, 4:] = -100
    return samples_of(model, batches)


def student_of(original: Any) -> Any:
    return make_variant(original, [FFNPruning(width=8)])


def healed(student: Any, original: Any, case: str, folder: Any, **options: Any) -> Any:
    return heal(student, original, samples_for(original, case), folder, **({"limit": "2epochs"} | options))


every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_the_loss_falls(case, tmp_path):
    original = original_of(case)
    result = healed(student_of(original), original, case, tmp_path, limit="8epochs", learning_rate=3e-3)
    assert result.better
    assert result.loss_after < 0.9 * result.loss_before
    assert (result.epochs, result.steps) == (8, 8)


# -- what is stored ----------------------------------------------------------------------------------------------------


@every_case
def test_stored_outputs_are_those_of_each_text_alone(case, tmp_path, monkeypatch):
    original, objective = original_of(case), Objective("mean")
    monkeypatch.setattr(targets, "_TOP", 3)
    monkeypatch.setattr(targets, "_FILE", 40)  # several files, of several forwards
    monkeypatch.setattr(targets, "_FORWARD", 20)
    texts, _ = texts_of(original, samples_for(original, case), seed=0)
    texts.compute_targets(tmp_path, original, objective, lambda message: None)
    assert len(list(tmp_path.iterdir())) > 1
    for index in range(len(texts)):
        row, stored = texts[index]
        fresh, ends = objective.targets(original, {name: value[None] for name, value in row.items()})
        assert ends == [len(next(iter(stored.values())))]
        for name in fresh:
            torch.testing.assert_close(stored[name], fresh[name][0], atol=2e-3, rtol=2e-3)


@every_case
def test_the_original_has_learnt_everything(case, tmp_path):
    original, objective = original_of(case), Objective("mean")
    texts, _ = texts_of(original, samples_for(original, case), seed=0)
    texts.compute_targets(tmp_path, original, objective, lambda message: None)
    assert abs(texts.loss(original, objective)) < 1e-4
    assert texts.loss(student_of(original), objective) > 1e-3


def test_the_loss_of_next_tokens_is_the_divergence_of_the_most_probable_and_the_rest(tmp_path, monkeypatch):
    original, objective = original_of("next tokens"), Objective("mean")
    student = student_of(original)
    monkeypatch.setattr(targets, "_TOP", 3)
    texts, _ = texts_of(original, samples_for(original, "next tokens"), seed=0)
    texts.compute_targets(tmp_path, original, objective, lambda message: None)
    expected = []
    with torch.no_grad():
        for row in texts.rows:
            p, q = ((model(row["input_ids"][None]).logits[0] / 2).softmax(-1) for model in (original, student))
            top, ids = p.topk(3)
            p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (top, q.gather(-1, ids)))
            expected.append(4 * (p * (p / q).log()).sum(-1))  # the square of the temperature, 2
    assert texts.loss(student, objective) == pytest.approx(float(torch.cat(expected).mean()), rel=2e-3)


def test_the_gradient_of_the_most_probable_and_the_rest():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(2, 3, 9).topk(4).indices
    expected = torch.randn(2, 3, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: targets._TopDivergence.apply(x, ids, expected), (logits,))


def test_texts_of_labels_are_compared_where_none_are_held_out():
    original = original_of("classes")
    samples = samples_for(original, "classes", count=16, batch=4)
    assert not samples.held_out
    train, held_out = texts_of(original, samples, seed=0)
    assert (len(train), len(held_out)) == (14, 2)


@pytest.mark.parametrize("case", ["next tokens", "translations"])
def test_without_an_original_the_tokens_of_the_texts_are_learnt(case, tmp_path):
    student = original_of(case)
    samples = samples_for(student, case)
    texts, _ = texts_of(student, samples, seed=0, labels=True)
    texts.compute_targets(tmp_path, None, Objective("mean"), lambda message: None)
    nats, count = 0.0, 0
    with torch.no_grad():
        for batch in samples.batches:  # the loss of transformers, a mean over the known tokens of a batch
            labels = batch.get("labels", batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
            known = int((labels[:, 0 if case == "translations" else 1 :] != -100).sum())
            nats += float(student(**(batch | {"labels": labels})).loss) * known
            count += known
    assert texts.loss(student, Objective("mean")) == pytest.approx(nats / count, rel=1e-4)
    known = replace(samples, held_out=samples.batches)  # of random tokens, others cannot be predicted
    result = heal(student, None, known, tmp_path / "healed", limit="30epochs", learning_rate=3e-3)
    assert result.loss_after < 0.9 * result.loss_before
    assert result.bytes_per_token == 0


# -- what is trained ---------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize("lora", [False, True])
def test_a_killed_call_ends_as_an_uninterrupted_one(lora, tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "_SAVED", 0.0)  # a checkpoint at each step
    original, results = original_of("sentences"), []
    options = {"limit": "6epochs", "learning_rate": 1e-3, "lora": lora}

    def kill(message):
        if message["stage"] == "healing" and message["step"] == 4:
            raise Killed

    for name, killed in (("whole", False), ("killed", True)):
        student = student_of(original)
        if killed:
            with pytest.raises(Killed):
                healed(student, original, "sentences", tmp_path / name, callback=kill, **options)
            student = student_of(original)
        messages = []
        result = healed(student, original, "sentences", tmp_path / name, callback=messages.append, **options)
        steps = [message["step"] for message in messages if message["stage"] == "healing"]
        assert steps == ([4, 5, 6] if killed else [1, 2, 3, 4, 5, 6])
        assert result.better
        results.append((fingerprint(student), result.loss_before, result.loss_after))
    assert results[0] == results[1]


def test_other_arguments_start_anew(tmp_path):
    original = original_of("classes")
    healed(student_of(original), original, "classes", tmp_path)
    messages = []
    healed(student_of(original), original, "classes", tmp_path, seed=1, callback=messages.append)
    assert [message["step"] for message in messages if message["stage"] == "healing"] == [1, 2]


def test_limit_0_does_nothing(tmp_path):
    original = original_of("classes")
    student = student_of(original)
    before = fingerprint(student)
    assert healed(student, original, "classes", tmp_path, limit=0) == Healed()
    assert fingerprint(student) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lora", [False, True])
def test_a_student_that_gives_the_same_outputs_is_not_trained(lora, tmp_path):
    original = original_of("classes")
    student = make_variant(original, [])
    names, before = [name for name, _ in student.named_parameters()], fingerprint(student)
    result = healed(student, original, "classes", tmp_path, lora=lora)
    assert (result.steps, result.better) == (0, False)
    assert result.loss_before == result.loss_after < 1e-4
    assert fingerprint(student) == before
    assert [name for name, _ in student.named_parameters()] == names


def test_numbers_may_be_small(tmp_path):
    """Their loss depends on their scale."""
    original = original_of("classes")
    original.config.num_labels, original.num_labels = 1, 1
    original.classifier = torch.nn.Linear(original.classifier.in_features, 1)
    with torch.no_grad():
        original.classifier.weight *= 1e-3
    result = healed(student_of(original), original, "classes", tmp_path)
    assert result.loss_before < 1e-4
    assert result.steps > 0


@pytest.mark.parametrize("lora", [False, True])
def test_a_student_that_becomes_worse_is_left_as_it_was(lora, tmp_path):
    original = original_of("classes")
    student = student_of(original)
    before = fingerprint(student)
    result = healed(student, original, "classes", tmp_path, learning_rate=30.0, lora=lora)
    assert not result.better
    assert result.loss_after > result.loss_before
    assert fingerprint(student) == before


@pytest.mark.parametrize("lora", [False, True])
def test_frozen_parameters_stay_frozen(lora, tmp_path):
    original = original_of("sentences")
    student = make_variant(original, [FFNPruning(width=8), Freeze(attention="random", seed=13)])
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in student.named_parameters()}
    assert healed(student, original, "sentences", tmp_path, lora=lora, learning_rate=1e-3).better
    after = dict(student.named_parameters())
    assert {name: p.requires_grad for name, p in after.items()} == {name: grad for name, (_, grad) in before.items()}
    changed = {name for name, p in after.items() if not torch.equal(p, before[name][0])}
    assert changed
    assert all(before[name][1] for name in changed)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_steps_and_texts_follow_the_time():
    class Train:  # 10 steps of an epoch with 100 texts
        tokens = 10_000
        steps = staticmethod(lambda seed: 10)
        __len__ = staticmethod(lambda: 100)

    def planned(seconds, epochs=None, of_step=9.0, spent=0.0):
        plan = healing._planned(Train(), (seconds, epochs), healing._Times(of_step, 0.001, spent), seed=0)
        return plan["steps"], plan["texts"], plan["seconds"]

    assert planned(100.0) == (9, 90, 100.0)  # 90 s; a step needs 9 s and the outputs of its texts 1 s
    assert planned(100.0, spent=50.0) == (5, 50, 100.0)
    assert planned(1000.0) == (99, 100, 1000.0)  # 900 s, of which 10 s for all outputs
    assert planned(1.0, spent=2.0) == (1, 10, 1.0)
    assert planned(None) == (6, 60, 60.0)  # a tenth of 100 s is below the least, a minute
    assert planned(None, of_step=99.0) == (1, 10, 100.0)
    assert planned(None, epochs=2.0) == (20, 100, None)
    assert planned(None, epochs=0.5) == (5, 50, None)


def test_training_ends_with_the_time(tmp_path):
    original = original_of("classes")
    result = healed(student_of(original), original, "classes", tmp_path, limit="0.01s")
    assert result.steps == 1


def test_the_rate_falls_with_the_time_of_a_machine_that_became_slower(tmp_path, monkeypatch):
    original, objective = original_of("classes"), Objective("mean")
    texts, _ = texts_of(original, samples_for(original, "classes"), seed=0)
    trainer = healing._Healer(student_of(original), texts, objective, tmp_path, healing._Run(100, 1.0, 0), None)
    rate = trainer.create_scheduler(100, torch.optim.SGD(trainer.model.parameters())).lr_lambdas[0]
    assert [rate(step) for step in (0, 4, 50, 100)] == pytest.approx([0.1, 0.5, 0.5, 0.0])
    monkeypatch.setattr(healing._Clock, "share", 0.8)
    assert [rate(step) for step in (50, 90)] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(
    ("limit", "parsed"),
    [
        (0, (0, None)),
        ("0", (0, None)),
        ("90s", (90, None)),
        ("10min", (600, None)),
        ("1.5h", (5400, None)),
        ("1epoch", (None, 1)),
        ("0.5epochs", (None, 0.5)),
        ("default", (None, None)),
    ],
)
def test_limits(limit, parsed):
    assert parse_limit(limit) == parsed


@pytest.mark.parametrize("limit", [10, "10", "ten minutes", "-1min", "1e", None])
def test_what_is_no_limit(limit):
    with pytest.raises(ValueError, match=f"heal={limit!r}: give 0, a time as '10min'"):
        parse_limit(limit)


def test_what_cannot_be_healed(tmp_path):
    original = original_of("sentences")
    with pytest.raises(ValueError, match="pooling='max': choose from mean, cls, last"):
        healed(student_of(original), original, "sentences", tmp_path, pooling="max")
    with pytest.raises(ValueError, match="no parameter of the BertModel is trainable"):
        healed(original_of("sentences").requires_grad_(False), original, "sentences", tmp_path)
    translator, ids = original_of("translations"), torch.tensor([[3, 4]])
    unlabelled = samples_of(translator, [dict.fromkeys(["input_ids", "attention_mask", "decoder_input_ids"], ids)])
    with pytest.raises(ValueError, match="without an original needs the text that the decoder should write, as labels"):
        heal(translator, None, unlabelled, tmp_path, limit="1epoch")
    with pytest.raises(ValueError, match="at least two texts, one to compare by; 1 given"):
        heal(student_of(original), original, samples_for(original, "sentences", 1, 1), tmp_path, limit="1epoch")
    narrow = AutoModel.from_config(small_config("bert", hidden_size=8))
    with pytest.raises(
        ValueError, match=r"outputs of the shape .* heal models of the same task, hidden size and tokens"
    ):
        healed(narrow, original, "sentences", tmp_path)
