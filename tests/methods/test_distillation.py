"""Distillation: what the loss is, against sums written out here; which layers teach; what becomes of the teacher."""

import copy
import io
import json
import math
import pickle
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.cases import native_config
from support.models import differences, outputs, snapshot, trainability
from support.training import gradients, training_step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import Distillation, LayerSelection, LowRank, Theseus, VocabularyTrimming
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.training import label_smoothed_loss

CLASSES, MASKED, TOKENS, TRANSLATION, CAUSAL = WITH_LABELS = [
    ("bert", "sequence-classification"),
    ("bert", "masked-lm"),
    ("bert", "token-classification"),
    ("marian", "seq2seq-lm"),
    ("gpt2", "causal-lm"),
]
DEPTH = {"marian": ("encoder_layers", "decoder_layers"), "gpt2": ("n_layer",), "bert": ("num_hidden_layers",)}
HIDDEN = {"marian": ("encoder_hidden_states", "decoder_hidden_states")}
every_task = pytest.mark.parametrize("of", WITH_LABELS, ids=[task for _, task in WITH_LABELS])


@torch.no_grad()
def model_of(of, depth=2, seed=1, **changes):
    """A native model without dropout and far from its initialisation, in eval mode; `depth` of all stacks, or of each."""
    kind, task = of
    depths = depth if isinstance(depth, tuple) else (depth,) * len(DEPTH[kind])
    tiny = ARCHITECTURES[kind].tiny | dict(zip(DEPTH[kind], depths, strict=True)) | changes
    torch.manual_seed(seed)
    model = AUTO_CLASSES[task].from_config(native_config(replace(ARCHITECTURES[kind], tiny=tiny))).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):  # not constant positions
        parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch_of(of):
    return ARCHITECTURES[of[0]].tiny_inputs(of[1])


def taught(of, depth=2, above=2, **settings):
    """(variant in training mode, the native model that it computes as, its teacher)"""
    student, teacher = model_of(of, depth), model_of(of, above, seed=2)
    return make_variant(student, [Distillation(teacher=teacher, **settings)]).train(), student, teacher


def close_to(value):
    return pytest.approx(value, rel=1e-5)


@contextmanager
def refused(message):
    with pytest.raises(ValueError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


# -- by hand: nothing here is from the package, nor from torch.nn.functional -------------------------------------------------


def places(task, labels):
    """(place of an output, its label) of all labels that count; in a causal language model, it is the token before."""
    if task == "sequence-classification":
        return [((row,), label) for row, label in enumerate(labels.tolist())]
    shift = int(task == "causal-lm")
    rows = enumerate(labels.tolist())
    return [((i, t - shift), y) for i, row in rows for t, y in enumerate(row) if y != -100 and t >= shift]


def log_p(logits, temperature=1.0):
    scaled = logits.double() / temperature
    return (scaled - scaled.exp().sum().log()).tolist()


@torch.no_grad()
def by_hand(student, teacher, batch, task, temperature=2.0, smoothing=0.0):
    """(smoothed cross-entropy, T² · KL), each a mean over the labels."""
    one, other = student(**batch).logits, teacher(**batch).logits
    entropy = divergence = 0.0
    counted = places(task, batch["labels"])
    for place, label in counted:
        scores = log_p(one[place])
        entropy -= (1 - smoothing) * scores[label] + smoothing * sum(scores) / len(scores)
        pairs = zip(log_p(one[place], temperature), log_p(other[place], temperature), strict=True)
        divergence += sum(math.exp(p) * (p - q) for q, p in pairs)
    return entropy / len(counted), temperature**2 * divergence / len(counted)


@torch.no_grad()
def hidden_by_hand(student, teacher, batch, task, *teaching):
    """Sum over layers of the mean squared distance of directions. `teaching`: of each stack, the teacher's layers for the
    student's first, second, ..., 1-based."""
    one, other = (model(**batch, output_hidden_states=True) for model in (student, teacher))
    names = HIDDEN.get(student.config.model_type, ("hidden_states",))
    total = 0.0
    for name, layers in zip(names, teaching, strict=True):
        if task == "sequence-classification":
            tokens = [(row, 0) for row in range(len(batch["labels"]))]
        elif name == "decoder_hidden_states" or task == "causal-lm":
            tokens = [place for place, _ in places(task, batch["labels"])]
        else:
            tokens = batch["attention_mask"].nonzero().tolist()
        assert len(one[name]) == len(layers) + 2, "the embeddings and the last layer have no part in it"
        for own, layer in enumerate(layers, 1):
            pairs = [(one[name][own][i, t].double(), other[name][layer][i, t].double()) for i, t in map(tuple, tokens)]
            total += sum((a / a.norm() - b / b.norm()).pow(2).sum().item() for a, b in pairs) / len(tokens)
    return total


# -- the loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@every_task
def test_the_loss_is_that_of_the_labels_and_of_the_teacher(of, temperature, alpha):
    model, student, teacher = taught(of, temperature=temperature, alpha=alpha)
    batches = [batch_of(of)]
    if of == CAUSAL:  # and with a prompt that has no labels
        batches.append(batches[0] | {"labels": torch.tensor([[-100, -100, -100, 7, 1], [-100, 4, 1, -100, -100]])})
    for batch in batches:
        entropy, divergence = by_hand(student, teacher, batch, of[1], temperature)
        assert divergence > 0.1, "a vacuous case"
        result = model(**batch)
        assert result.auxiliary_loss.item() == close_to(alpha * divergence)
        assert result.loss.item() == close_to((1 - alpha) * entropy + alpha * divergence)
        assert result["label_weight"].item() == close_to(1 - alpha)


@pytest.mark.parametrize("of", [TRANSLATION, CAUSAL])
def test_without_labels_the_inputs_say_what_counts(of):
    """As the Trainer calls the model where the loss is computed outside: Marian with the decoder's inputs of the collator."""
    model, student, teacher = taught(of, alpha=0.5)
    inputs = batch_of(of)
    labels = inputs.pop("labels")
    if of == TRANSLATION:
        inputs["decoder_input_ids"] = torch.tensor([[0, 6, 2, 9], [0, 7, 1, 0]])
    result = model(**inputs)
    assert "loss" not in result
    _, divergence = by_hand(student, teacher, inputs | {"labels": labels}, of[1])
    assert result.auxiliary_loss.item() == close_to(0.5 * divergence)


@pytest.mark.parametrize("of", [MASKED, TOKENS])
def test_without_labels_it_is_unknown_which_tokens_were_masked(of):
    inputs = {name: value for name, value in batch_of(of).items() if name != "labels"}
    with refused("only the labels tell which outputs count"):
        taught(of)[0](**inputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("of", [TRANSLATION, CAUSAL])
def test_a_smoothed_loss_weighs_the_labels_and_adds_the_teacher(of, smoothing):
    model, student, teacher = taught(of, alpha=0.3)
    batch, loss = batch_of(of), label_smoothed_loss(smoothing, shift=of == CAUSAL)
    entropy, divergence = by_hand(student, teacher, batch, of[1], smoothing=smoothing)
    expected = close_to(0.7 * entropy + 0.3 * divergence)
    assert loss(model(**batch), batch["labels"]).item() == expected
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    items = len(places(of[1], batch["labels"]))
    assert sum(loss(model(**part), part["labels"], items).item() for part in parts) == expected
    if not smoothing:
        assert sum(model(**part, num_items_in_batch=items).loss.item() for part in parts) == expected


@every_task
def test_the_gradient_of_a_batch_is_the_weighted_sum_of_those_of_its_rows(of):
    """Each row alone is without padding. Of hidden states, only a classifier's are a mean over what the labels count."""
    model, _, _ = taught(of, alpha=0.6, hidden="skip" if of == CLASSES else "none")
    batch = batch_of(of)
    _, whole = gradients(model, batch)
    assert max(value.abs().max() for value in whole.values()) > 0.1, "a vacuous case"
    total = {name: torch.zeros_like(value) for name, value in whole.items()}
    for row in range(2):
        part = {name: value[row : row + 1] for name, value in batch.items()}
        length = int(part["attention_mask"].sum())
        part = {name: value[:, :length] if value.ndim == 2 else value for name, value in part.items()}
        if of == TRANSLATION:
            part["labels"] = part["labels"][part["labels"] != -100][None]
        share = len(places(of[1], part["labels"])) / len(places(of[1], batch["labels"]))
        for name, value in gradients(model, part)[1].items():
            total[name] += share * value
    assert not differences(total, whole, 1e-5)


@pytest.mark.parametrize("hidden", ["none", "skip"])
@every_task
def test_what_stands_in_the_padding_changes_nothing(of, hidden):
    model, _, _ = taught(of, hidden=hidden)
    batch = batch_of(of)
    if of == TRANSLATION:
        batch["decoder_input_ids"] = torch.tensor([[0, 6, 2, 9], [0, 7, 1, 0]])
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][batch["attention_mask"] == 0] = 13
    if of == TRANSLATION:
        other["decoder_input_ids"][batch["labels"] == -100] = 13
    (loss, grads), (same, same_grads) = gradients(model, batch), gradients(model, other)
    assert same == close_to(loss)
    assert not differences(same_grads, grads, 1e-5)


# -- hidden states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "above", "depth", "hidden", "teaching"),
    [
        (CLASSES, 4, 2, "skip", [[2]]),
        (CLASSES, 4, 2, "last", [[3]]),
        (CLASSES, 12, 6, "skip", [[2, 4, 6, 8, 10]]),
        (CLASSES, 12, 6, "last", [[7, 8, 9, 10, 11]]),
        (MASKED, 4, 2, "skip", [[2]]),
        (TOKENS, 4, 2, "last", [[3]]),
        (CAUSAL, 6, 3, "skip", [[2, 4]]),
        (CAUSAL, 6, 3, "last", [[4, 5]]),
        (TRANSLATION, (6, 4), (3, 2), "skip", [[2, 4], [2]]),
        (TRANSLATION, (6, 4), (3, 2), "last", [[4, 5], [3]]),
        (TRANSLATION, (12, 6), (6, 3), "skip", [[2, 4, 6, 8, 10], [2, 4]]),
        (TRANSLATION, (12, 6), (6, 3), "last", [[7, 8, 9, 10, 11], [4, 5]]),
        (TRANSLATION, (5, 3), (3, 1), "skip", [[1, 3], []]),  # rounded down; one stack may have one layer
    ],
)
def test_which_layers_teach_and_what(of, above, depth, hidden, teaching):
    model, student, teacher = taught(of, depth, above, alpha=0.25, hidden=hidden, beta=7.0)
    batch = batch_of(of)
    entropy, divergence = by_hand(student, teacher, batch, of[1])
    expected = 0.25 * divergence + 7 * hidden_by_hand(student, teacher, batch, of[1], *teaching)
    result = model(**batch)
    assert result.auxiliary_loss.item() == close_to(expected)
    assert result.loss.item() == close_to(0.75 * entropy + expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("of", [CLASSES, CAUSAL, TRANSLATION])
def test_gradient_checkpointing_changes_nothing(of, reentrant):
    """Nor does it in what hidden states alone teach, of which a hook inside of a checkpoint might see no gradient."""
    model, _, _ = taught(of, 3, 6, alpha=0, hidden="skip")
    batch, first = batch_of(of), next(p for n, p in model.named_parameters() if ".0." in n and p.ndim == 2)
    loss, grads = gradients(model, batch)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    again, same = gradients(model, batch)
    assert again == close_to(loss)
    assert not differences(same, grads, 1e-5)
    model(**batch).auxiliary_loss.backward()
    assert first.grad.abs().max() > 1e-3


@every_task
def test_outside_of_training_it_is_the_student_alone(of):
    model, student, teacher = taught(of, hidden="skip")
    batch, calls = batch_of(of), []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    alone = outputs(student, batch)
    assert not differences(outputs(model, batch), alone), "bit-equal, and nothing is added"
    with torch.no_grad():
        found = model.train()(**batch)
    assert not differences({name: value for name, value in found.items() if torch.is_tensor(value)}, alone)
    assert model.eval()(**batch, return_dict=False)[0].item() == alone["loss"].item()
    assert not calls
    model.train()(**batch)
    assert len(calls) == 1


# -- the teacher -------------------------------------------------------------------------------------------------------------


def test_the_teacher_stays_as_it_is():
    model, _, teacher = taught(TRANSLATION, 2, 4, hidden="last")
    teacher.model.encoder.layers[1].requires_grad_(False)
    teacher.train()
    values, flags, before = snapshot(teacher), trainability(teacher), snapshot(model)
    training_step(model, batch_of(TRANSLATION))
    assert not any(module.training for module in teacher.modules()), "its dropout is off"
    assert not differences(snapshot(teacher), values)
    assert trainability(teacher) == flags
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert differences(snapshot(model), before), "the student has learnt"


def test_the_teacher_is_no_part_of_the_model(tmp_path):
    setting = {"temperature": 3.0, "alpha": 0.25, "hidden": "last", "beta": 5.0}
    model, student, teacher = taught(TRANSLATION, 2, 4, **setting)
    assert model.get_teacher() is teacher
    assert model.state_dict().keys() == student.state_dict().keys()
    assert len(list(model.parameters())) == len(list(student.parameters()))
    for folder, saved in (("variant", model), ("native", student)):
        saved.save_pretrained(tmp_path / folder)
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("variant", "native")]
    assert not differences(*files)
    text = (tmp_path / "variant/config.json").read_text()
    assert json.loads(text)["methods"] == [{"method": "distillation"} | setting]
    assert '"teacher"' not in text


def test_a_copy_shares_the_teacher_and_a_pickle_leaves_it_out():
    model, _, teacher = taught(CLASSES, 2, 4)
    batch, buffer = batch_of(CLASSES), io.BytesIO()
    copied = copy.deepcopy(model)
    assert copied.get_teacher() is teacher
    assert copied(**batch).loss.item() == model(**batch).loss.item()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert other.get_teacher() is None
        with refused("Distillation: training needs the teacher, which is not stored with the variant"):
            other.train()(**batch)
    assert model.get_teacher() is teacher, "it keeps its own"


@pytest.mark.parametrize("of", [CLASSES, TRANSLATION])
def test_an_opened_variant_infers_without_the_teacher_and_asks_for_it_in_training(of, tmp_path):
    model, _, teacher = taught(of, 2, 4, hidden="skip")
    batch = batch_of(of)
    model.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES[of[1]].from_pretrained(tmp_path)
    assert not differences(outputs(loaded, batch), outputs(model, batch))
    assert loaded.needs_teacher
    with refused(r"training needs the teacher, .*: call model\.set_teacher\(\.\.\.\)"):
        loaded.train()(**batch)
    loaded.set_teacher(teacher)
    (loss, grads), (same, same_grads) = gradients(model, batch), gradients(loaded, batch)
    assert same == loss
    assert not differences(same_grads, grads)


@pytest.mark.parametrize("form", ["native", "variant", "taught itself", "smaller and wider"])
def test_what_may_be_a_teacher(form):
    student, batch = model_of(TRANSLATION), batch_of(TRANSLATION)
    teacher = model_of(TRANSLATION, 4, seed=2)
    if form == "variant":
        teacher = make_variant(teacher, [LowRank(rank=4)])
    elif form == "taught itself":  # by what has no part in it
        teacher = make_variant(teacher, [Distillation(teacher=model_of(TRANSLATION, 6, seed=3))])
    elif form == "smaller and wider":  # which is no matter to outputs
        teacher = model_of(TRANSLATION, 1, seed=2, d_model=32)
    hidden = "none" if form == "smaller and wider" else "skip"
    expected = by_hand(student, teacher, batch, "seq2seq-lm")[1]
    if hidden == "skip":
        expected += hidden_by_hand(student, teacher, batch, "seq2seq-lm", [2], [2])
    teacher.train()
    model = make_variant(student, [Distillation(teacher=teacher, alpha=1.0, hidden=hidden, beta=1.0)])
    assert model.train()(**batch).loss.item() == close_to(expected)


@pytest.mark.parametrize(("steps", "left"), [(3, 0.9), (20, 0.5)])
def test_a_training_moves_the_student_towards_the_teacher(steps, left, tmp_path):
    model, _, teacher = taught(CAUSAL, 2, 4, alpha=1.0)
    batch = batch_of(CAUSAL)
    _, before = by_hand(model.eval(), teacher, batch, "causal-lm")
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    settings |= {"max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 0.01, "disable_tqdm": True}
    rows = [{name: value[i] for name, value in batch.items()} for i in range(2)]
    Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows).train()
    assert by_hand(model.eval(), teacher, batch, "causal-lm")[1] < left * before


def test_a_shallower_student_learns_from_the_model_that_it_was_taken_from():
    trained, batch = model_of(TRANSLATION, 4), batch_of(TRANSLATION)
    model = make_variant(trained, [LayerSelection(share=0.5), Distillation(teacher=trained, hidden="skip")])
    both = model.merge(), trained
    entropy, divergence = by_hand(*both, batch, "seq2seq-lm")
    distance = hidden_by_hand(*both, batch, "seq2seq-lm", [2], [2])
    loss = model.train()(**batch).loss.item()
    assert loss == close_to(0.5 * (entropy + divergence) + 10 * distance)
    before = snapshot(model)
    for _ in range(3):
        training_step(model, batch)
    after = snapshot(model)
    assert all(not torch.equal(after[name], before[name]) for name, trains in trainability(model).items() if trains)
    assert model.train()(**batch).loss.item() < loss


def test_with_theseus_a_predecessor_returns_what_the_teacher_does():
    """While only predecessors run, layer j of the successor's depth returns what layer 2j of the teacher does."""
    trained, batch = model_of(TRANSLATION, 4), batch_of(TRANSLATION)
    for rate, successors in ((1e-9, False), (1, True)):
        methods = [Theseus(rate=rate, train="all"), Distillation(teacher=trained, hidden="skip")]
        model = make_variant(trained, methods).train()
        model.advance(0, 1)
        found = model(**batch).auxiliary_loss.item()
        assert found > 1 if successors else found == pytest.approx(0, abs=1e-6)
        training_step(model, batch)
        model.finalize()
        assert model.train()(**batch).auxiliary_loss.item() > 1


# -- what is refused ---------------------------------------------------------------------------------------------------------


def test_a_config_names_no_teacher():
    data = {"method": "distillation", "alpha": 0.25}
    assert method_from_dict(data) == Distillation(alpha=0.25)
    with refused("unknown field 'teacher' of method 'distillation'"):
        method_from_dict(data | {"teacher": "some/path"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"alpha": 1.5}, r"Distillation\(alpha=1\.5\): must be a share in 0\.\.1"),
        ({"temperature": 0}, r"Distillation\(temperature=0\): must be a number above 0"),
        ({"temperature": float("inf")}, r"temperature=inf\): must be a number above 0"),
        ({"beta": -1}, r"Distillation\(beta=-1\): must be a number above 0"),
        ({"beta": True}, r"beta=True\): must be a number above 0"),
        ({"hidden": "all"}, r"hidden='all'\): choose from \['none', 'skip', 'last'\]"),
        ({"alpha": 0}, r"Distillation\(alpha=0, hidden='none'\) learns nothing from the teacher"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with refused(message):
        Distillation(**setting)


@pytest.mark.parametrize(
    ("of", "depth", "above", "changes", "hidden", "message"),
    [
        (TRANSLATION, 2, 2, {"vocab_size": 41, "decoder_vocab_size": 41}, "none", "vocab_size=41, the student 40"),
        (CLASSES, 2, 2, {"num_labels": 3}, "none", "the teacher has num_labels=3, the student 2"),
        (CLASSES, 2, 4, {"hidden_size": 32}, "skip", "the teacher's hidden size is 32, the student's 16"),
        (CLASSES, 3, 2, {}, "last", r"the teacher has the layers \{'encoder': 2\}, the student \{'encoder': 3\}"),
        (TRANSLATION, (2, 3), (4, 2), {}, "skip", r"4, 'decoder': 2\}, the student .* it needs at least as many"),
        (CLASSES, 1, 4, {}, "skip", "each stack has only one layer, and the last layer does not learn"),
    ],
)
def test_teachers_that_are_refused(of, depth, above, changes, hidden, message):
    student, teacher = model_of(of, depth), model_of(of, above, seed=2, **changes)
    with refused(message):
        make_variant(student, [Distillation(teacher=teacher, hidden=hidden)])
    model = make_variant(student, [Distillation(hidden=hidden)])  # and of one that was opened again
    with refused(message):
        model.set_teacher(teacher)
    assert model.get_teacher() is None


@pytest.mark.parametrize("teacher", ["some/path", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_no_teacher(teacher):
    with refused(f"the teacher must be a model of transformers, not a {type(teacher).__name__}"):
        make_variant(model_of(CLASSES), [Distillation(teacher=teacher)])


def test_a_tuple_has_no_room_for_the_term():
    with refused(r"the methods \['distillation'\] add a term to the loss, which needs return_dict=True"):
        taught(CLASSES)[0](**batch_of(CLASSES), return_dict=False)


GPT2_CLASSES = ("gpt2", "sequence-classification")


@pytest.mark.parametrize(
    ("of", "other", "changes", "hidden", "message"),
    [
        (CLASSES, TOKENS, {}, "none", r"for \['token-classification'\], the student for \['sequence-classification'\]"),
        (
            CLASSES,
            CLASSES,
            {"problem_type": "multi_label_classification"},
            "none",
            "problem_type='multi_label_classification': the outputs of a classifier can only be learnt if it chooses one",
        ),
        (CLASSES, GPT2_CLASSES, {}, "skip", "the teacher is a gpt2, the student a bert; only hidden='none'"),
    ],
)
def test_what_another_task_or_architecture_teaches(of, other, changes, hidden, message):
    with refused(message):
        make_variant(model_of(of, **changes), [Distillation(teacher=model_of(other, seed=2, **changes), hidden=hidden)])


def test_outputs_are_learnt_from_another_architecture():
    student, teacher = model_of(CLASSES), model_of(GPT2_CLASSES, seed=2)
    model = make_variant(student, [Distillation(teacher=teacher, alpha=1.0, temperature=1.0)]).train()
    batch = {name: value for name, value in batch_of(CLASSES).items() if name != "token_type_ids"}
    one, other = (m.eval()(**batch).logits.log_softmax(-1) for m in (student, teacher))
    assert model.train()(**batch).loss.item() == close_to((other.exp() * (other - one)).sum(-1).mean().item())


@pytest.fixture
def with_tokenizers(tmp_path):
    """Two models of the causal task with so many rows, opened from folders with a tokenizer of so many tokens each."""

    def opened(rows, tokens):
        for number, (size, count) in enumerate(zip(rows, tokens, strict=True)):
            model_of(CAUSAL, seed=number, vocab_size=size).save_pretrained(tmp_path / str(number))
            words = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / str(number))
        return [AUTO_CLASSES["causal-lm"].from_pretrained(tmp_path / str(number)).eval() for number in (0, 1)]

    return opened


@pytest.mark.parametrize("rows", [(40, 48), (48, 40)], ids=["teacher", "student"])
def test_rows_of_padding_are_not_compared(rows, with_tokenizers):
    """As between Qwen2.5-0.5B (151,936 rows) and 7B (152,064), which have one tokenizer."""
    student, teacher = with_tokenizers(rows, (36, 36))
    variant = make_variant(student, [Distillation()])
    with pytest.warns(UserWarning, match="with one tokenizer: the first 40 outputs are compared") as said:
        variant.set_teacher(teacher)
    assert len(said) == 1
    batch = batch_of(CAUSAL)
    entropy, _ = by_hand(student, student, batch, "causal-lm")
    for model in (student, teacher):
        model.resize_token_embeddings(40)
    _, divergence = by_hand(student, teacher, batch, "causal-lm")
    assert variant.train()(**batch).loss.item() == close_to(0.5 * entropy + 0.5 * divergence)


@pytest.mark.parametrize(
    ("tokens", "methods", "message"),
    [
        (
            (36, 35),
            [],
            "vocab_size=48, the student 40: .* their tokenizers differ; if only .*, teacher.resize",
        ),
        ((44, 44), [], "their tokenizers differ"),  # the student has no row for the last tokens
        ((36, 36), [VocabularyTrimming(keep=[*range(38)])], "vocab_size=48, the student 38: .* given tokens new ids"),
    ],
)
def test_other_tokens_are_no_rows_of_padding(tokens, methods, message, with_tokenizers):
    student, teacher = with_tokenizers((40, 48), tokens)
    with refused(message):
        make_variant(student, [*methods, Distillation(teacher=teacher)])


def test_no_model_is_its_own_teacher():
    model = make_variant(model_of(CLASSES), [Distillation()])
    with refused("a model cannot be its own teacher"):
        model.set_teacher(model)


@pytest.mark.parametrize("of", [CAUSAL, TRANSLATION])
def test_a_batch_without_a_label_adds_nothing(of):
    """As one of several that are accumulated."""
    model, *_ = taught(of, 2, 4, hidden="skip")
    batch = batch_of(of)
    labels = torch.full_like(batch["labels"], -100)
    loss = label_smoothed_loss(0.1, shift=model.shifts_labels)(model(**batch | {"labels": labels}), labels, 7)
    assert loss.item() == 0
