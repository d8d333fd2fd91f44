"""The offline metrics, against values computed some other way."""

import math
import threading

import evaluate
import numpy as np
import pytest
import sacrebleu
import torch
from datasets import Dataset

from hf_freeze.lab.metrics import F1, METRICS, Accuracy, ChrF, MatthewsCorrelation, Perplexity, SacreBLEU, load

PREDICTIONS = ["the cat sat on the mat", "there is a small house by the lake", "good morning", "", "Ünlü bir söz ."]
REFERENCES = [
    ["the cat sat on a mat", "a cat was on the mat"],
    ["there was a little house by the lake", "a small house stands by the lake"],
    ["good morning to you", "morning"],
    ["nothing", "nothing at all"],
    ["Ünlü bir söz .", "bir söz"],
]
DOCUMENTS = [list(document) for document in zip(*REFERENCES, strict=True)]

TRUE = [1, 0, 2, 2, 1, 0, 1, 2, 0, 1]
PREDICTED = [1, 0, 1, 2, 1, 2, 0, 2, 0, 1]
TRUE_BINARY = [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1]
PREDICTED_BINARY = [1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1]

INPUTS = {
    "sacrebleu": {"predictions": PREDICTIONS, "references": REFERENCES},
    "chrf": {"predictions": PREDICTIONS, "references": REFERENCES},
    "perplexity": {"nll": [3.5, 0.25, 12.0, 7.75], "tokens": [2, 1, 9, 4]},
    "accuracy": {"predictions": PREDICTED, "references": TRUE},
    "f1": {"predictions": PREDICTED_BINARY, "references": TRUE_BINARY},
    "matthews_correlation": {"predictions": PREDICTED, "references": TRUE},
}
every_metric = pytest.mark.parametrize("name", METRICS)


@pytest.fixture(autouse=True)
def metrics_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")


def counts(label):
    """tp, fp, fn, tn of one label of the three-class example."""
    pairs = list(zip(PREDICTED, TRUE, strict=True))
    tp = sum(p == label and t == label for p, t in pairs)
    fp = sum(p == label and t != label for p, t in pairs)
    fn = sum(p != label and t == label for p, t in pairs)
    return tp, fp, fn, len(pairs) - tp - fp - fn


# ---- values


def test_sacrebleu_is_corpus_bleu():
    result = SacreBLEU().compute(predictions=PREDICTIONS, references=REFERENCES)
    expected = sacrebleu.corpus_bleu(PREDICTIONS, DOCUMENTS)
    fields = ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len")
    assert {field: result[field] for field in fields} == {field: getattr(expected, field) for field in fields}
    assert 0 < result["score"] < 100
    version = sacrebleu.__version__
    assert result["signature"] == f"nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"


@pytest.mark.parametrize(
    ("ours", "theirs", "signature"),
    [
        ({"lowercase": True}, {"lowercase": True}, "case:lc"),
        ({"tokenize": "char"}, {"tokenize": "char"}, "tok:char"),
        (
            {"smooth_method": "add-k", "smooth_value": 2},
            {"smooth_method": "add-k", "smooth_value": 2},
            "smooth:add-k[2.00]",
        ),
        ({"use_effective_order": True}, {"use_effective_order": True}, "eff:yes"),
        ({"trg_lang": "zh"}, {"tokenize": "zh"}, "tok:zh"),
    ],
)
def test_options_of_sacrebleu(ours, theirs, signature):
    expected = sacrebleu.corpus_bleu([text.upper() for text in PREDICTIONS], DOCUMENTS, **theirs).score
    inputs = {"predictions": [text.upper() for text in PREDICTIONS], "references": REFERENCES}
    for result in (SacreBLEU(**ours).compute(**inputs), SacreBLEU().compute(**inputs, **ours)):
        assert result["score"] == expected
        assert signature in result["signature"]


@pytest.mark.parametrize("word_order", [0, 2])
def test_chrf_is_corpus_chrf(word_order):
    result = ChrF(word_order=word_order).compute(predictions=PREDICTIONS, references=REFERENCES)
    expected = sacrebleu.corpus_chrf(PREDICTIONS, DOCUMENTS, word_order=word_order)
    signature = f"nrefs:2|case:mixed|eff:yes|nc:6|nw:{word_order}|space:no|version:{sacrebleu.__version__}"
    rest = {"char_order": 6, "word_order": word_order, "beta": 2, "signature": signature}
    assert result == {"score": expected.score, **rest}


@pytest.mark.parametrize("metric", [SacreBLEU, ChrF])
def test_references_can_be_one_text_or_differ_in_number(metric):
    single = [texts[0] for texts in REFERENCES]
    wrapped = metric().compute(predictions=PREDICTIONS, references=[[text] for text in single])
    assert metric().compute(predictions=PREDICTIONS, references=single) == wrapped
    assert "nrefs:1|" in wrapped["signature"]
    uneven = [REFERENCES[0][1:], *REFERENCES[1:]]
    result = metric().compute(predictions=PREDICTIONS, references=uneven)
    theirs = {"sacrebleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}[metric.name]
    documents = [[DOCUMENTS[1][0], *DOCUMENTS[0][1:]], [None, *DOCUMENTS[1][1:]]]
    assert result["score"] == theirs(PREDICTIONS, documents).score
    assert result["score"] != metric().compute(predictions=PREDICTIONS, references=REFERENCES)["score"]
    assert "nrefs:var|" in result["signature"]


def test_perplexity_of_a_uniform_distribution_is_its_size():
    tokens = [7, 1, 30]
    result = Perplexity().compute(nll=[count * math.log(50) for count in tokens], tokens=tokens)
    assert result == {
        "perplexity": pytest.approx(50, rel=1e-12),
        "nll_per_token": pytest.approx(math.log(50), rel=1e-12),
        "tokens": 38,
    }


def test_perplexity_weighs_tokens_not_batches():
    metric = Perplexity()
    metric.add_batch(nll=2.0, tokens=1)  # of a batch, as numbers
    metric.add_batch(nll=torch.tensor(3.0), tokens=torch.tensor(9))
    metric.add(nll=5.0, tokens=10)
    assert metric.compute()["perplexity"] == pytest.approx(math.exp(10 / 20), rel=1e-12)


def test_perplexity_is_exp_of_the_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, 11, dtype=torch.float64), torch.randint(11, (6, 5))
    labels[2, 3:] = -100
    metric = Perplexity()
    for rows, targets in zip(logits.split(4), labels.split(4), strict=True):
        nll = torch.nn.functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="none")
        metric.add_batch(nll=nll.view_as(targets).sum(1), tokens=(targets != -100).sum(1))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).exp().item()
    assert metric.compute()["perplexity"] == pytest.approx(expected, rel=1e-12)


def test_perplexity_of_a_diverged_model():
    assert Perplexity().compute(nll=[1e9], tokens=[1])["perplexity"] == math.inf
    assert Perplexity().compute(nll=[math.inf, 1.0], tokens=[1, 1])["perplexity"] == math.inf
    assert math.isnan(Perplexity().compute(nll=[math.nan, 1.0], tokens=[1, 1])["perplexity"])
    assert Perplexity().compute(nll=[0.0], tokens=[3])["perplexity"] == 1


def test_accuracy_counts():
    assert Accuracy().compute(predictions=PREDICTED, references=TRUE) == {"accuracy": 0.7}


def test_f1_of_two_classes_by_hand():
    # tp 4, fp 1, fn 2; for the other class tp 4, fp 2, fn 1
    inputs = {"predictions": PREDICTED_BINARY, "references": TRUE_BINARY}
    assert F1().compute(**inputs)["f1"] == pytest.approx(2 * 4 / (2 * 4 + 1 + 2))
    assert F1(pos_label=0).compute(**inputs)["f1"] == pytest.approx(2 * 4 / (2 * 4 + 2 + 1))
    assert F1().compute(predictions=[0, 0], references=[0, 0]) == {"f1": 0.0}


@pytest.mark.parametrize("average", ["micro", "macro", "weighted", None])
def test_f1_of_three_classes_by_its_formula(average):
    each = [2 * tp / (2 * tp + fp + fn) for tp, fp, fn, _ in map(counts, range(3))]
    tp, fp, fn, _ = (sum(column) for column in zip(*map(counts, range(3)), strict=True))
    expected = {
        "micro": 2 * tp / (2 * tp + fp + fn),
        "macro": sum(each) / 3,
        "weighted": sum(TRUE.count(label) * score for label, score in enumerate(each)) / len(TRUE),
        None: each,
    }[average]
    for result in (
        F1(average=average).compute(predictions=PREDICTED, references=TRUE),
        F1(average="macro" if average is None else None).compute(
            predictions=PREDICTED, references=TRUE, average=average
        ),
    ):
        assert result == {"f1": pytest.approx(expected, rel=1e-12)}


def test_f1_of_chosen_labels():
    tp, fp, fn, _ = (sum(column) for column in zip(*map(counts, [0, 2]), strict=True))
    result = F1(average="micro", labels=[0, 2]).compute(predictions=PREDICTED, references=TRUE)
    assert result["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))


def test_matthews_correlation_by_its_formula():
    tp, fp, fn, tn = 4, 1, 2, 4
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    result = MatthewsCorrelation().compute(predictions=PREDICTED_BINARY, references=TRUE_BINARY)
    assert result == {"matthews_correlation": pytest.approx(expected, rel=1e-12)}
    perfect = MatthewsCorrelation().compute(predictions=TRUE, references=TRUE)
    assert perfect["matthews_correlation"] == pytest.approx(1)
    assert MatthewsCorrelation().compute(predictions=[1, 1], references=[1, 1])["matthews_correlation"] == 0


def test_matthews_correlation_of_three_classes_by_covariances():
    predicted, true = np.eye(3)[PREDICTED], np.eye(3)[TRUE]
    predicted, true = predicted - predicted.mean(0), true - true.mean(0)
    expected = (predicted * true).sum() / math.sqrt((predicted**2).sum() * (true**2).sum())
    result = MatthewsCorrelation().compute(predictions=PREDICTED, references=TRUE)
    assert result["matthews_correlation"] == pytest.approx(expected, rel=1e-12)


# ---- as evaluate's


@every_metric
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_batches_give_what_everything_at_once_gives(name, files, tmp_path):
    kwargs = {"cache_dir": str(tmp_path / "cache")} if files else {}
    metric, inputs = load(name, **kwargs), INPUTS[name]
    expected = metric.compute(**inputs)
    size = len(next(iter(inputs.values())))
    for start in range(0, size, 3):
        metric.add_batch(**{key: values[start : start + 3] for key, values in inputs.items()})
    assert metric.compute() == expected
    singular = {"predictions": "prediction", "references": "reference"}
    for index in range(size):
        metric.add(**{singular.get(key, key): values[index] for key, values in inputs.items()})
    assert metric.compute() == expected
    metric.add_batch(**{key: values[:2] for key, values in inputs.items()})
    assert metric.compute(**{key: values[2:] for key, values in inputs.items()}) == expected
    assert bool(list(tmp_path.glob("cache/**/*.lock"))) == files
    assert not list(tmp_path.glob("**/*.arrow"))


@every_metric
def test_instances_do_not_mix(name):
    inputs = INPUTS[name]
    head, tail = ({key: values[part] for key, values in inputs.items()} for part in (slice(3), slice(3, None)))
    first, second, whole = load(name), load(name), load(name)
    first.add_batch(**head)
    second.add_batch(**tail)
    whole.add_batch(**head)
    whole.add_batch(**tail)
    assert whole.compute() == load(name).compute(**inputs)
    assert second.compute() == load(name).compute(**tail)
    assert first.compute() == load(name).compute(**head)


@every_metric
def test_arrays_tensors_and_columns(name):
    inputs = INPUTS[name]
    expected = load(name).compute(**inputs)
    rows = Dataset.from_dict(inputs)
    assert load(name).compute(**{key: rows[key] for key in inputs}) == expected
    assert load(name).compute(**{key: tuple(values) for key, values in inputs.items()}) == expected
    if name not in ("sacrebleu", "chrf"):
        for convert in (np.array, torch.tensor, lambda values: list(torch.tensor(values))):
            arrays = {key: convert(values) for key, values in inputs.items()}
            assert load(name).compute(**arrays) == pytest.approx(expected, rel=1e-6)


def test_combine_at_once_and_in_batches():
    inputs = INPUTS["accuracy"]
    metrics = [Accuracy(), F1(average="macro"), MatthewsCorrelation()]
    combined = evaluate.combine(metrics)
    result = combined.compute(**inputs)
    assert list(result) == ["accuracy", "f1", "matthews_correlation"]
    assert result["f1"] == F1().compute(**inputs, average="macro")["f1"]
    for start in range(0, 10, 4):
        combined.add_batch(**{key: values[start : start + 4] for key, values in inputs.items()})
    assert combined.compute() == result


def test_combine_names_what_both_have():
    combined = evaluate.combine([SacreBLEU(), ChrF()])
    result = combined.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert result["sacrebleu_score"] == sacrebleu.corpus_bleu(PREDICTIONS, DOCUMENTS).score
    assert result["chrf_score"] == sacrebleu.corpus_chrf(PREDICTIONS, DOCUMENTS).score
    assert result["bp"] == sacrebleu.corpus_bleu(PREDICTIONS, DOCUMENTS).bp


def test_combine_of_different_inputs_in_batches():
    combined = evaluate.combine([Perplexity(), Accuracy()])
    combined.add_batch(predictions=[1, 0], references=[1, 1], nll=[2.0, 4.0], tokens=[3, 3])
    assert combined.compute() == {"perplexity": math.e, "nll_per_token": 1.0, "tokens": 6, "accuracy": 0.5}


def test_processes_share_files(tmp_path):
    """Rank 0 of two reads what rank 1 has written, as `evaluate` does it on a shared file system."""
    kwargs = {"num_process": 2, "experiment_id": "e", "cache_dir": str(tmp_path), "timeout": 20}
    results = {}

    def rank(process_id, predictions, references):
        metric = Accuracy(process_id=process_id, **kwargs)
        metric.add_batch(predictions=predictions, references=references)
        results[process_id] = metric.compute()

    threads = [threading.Thread(target=rank, args=args) for args in ((0, [1, 1], [1, 1]), (1, [1, 0], [0, 1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {0: {"accuracy": 0.5}, 1: None}


@every_metric
def test_metrics_describe_themselves(name):
    metric = load(name)
    assert metric.name == name
    assert list(metric.features) == list(INPUTS[name])
    assert metric.description
    assert str(metric.options) in metric.compute.__doc__


def test_a_failed_computation_leaves_the_metric_usable():
    metric = F1()
    with pytest.raises(ValueError, match=r"average='binary' needs two classes, not \[0, 1, 2\]; choose from"):
        metric.compute(predictions=PREDICTED, references=TRUE)
    assert metric.compute(predictions=[1, 0], references=[1, 1]) == {"f1": pytest.approx(2 / 3)}


# ---- refusals


@every_metric
def test_different_numbers_are_refused_with_both(name):
    first, second = INPUTS[name]
    inputs = {first: INPUTS[name][first][:3], second: INPUTS[name][second][:2]}
    for call in (load(name).compute, load(name).add_batch):
        with pytest.raises(ValueError, match=f"{name} got 3 {first} but 2 {second}; their numbers must be equal"):
            call(**inputs)


@every_metric
def test_nothing_is_refused(name, tmp_path):
    first, second = INPUTS[name]
    for kwargs in ({}, {"cache_dir": str(tmp_path)}):
        with pytest.raises(ValueError, match=f"{name} has nothing to score: give {first} and {second} to add_batch"):
            load(name, **kwargs).compute()
    with pytest.raises(ValueError, match=f"{name} got no {first}: the batch is empty"):
        load(name).compute(**{first: [], second: []})
    with pytest.raises(ValueError, match=f"{name} needs {first} and {second}; missing: {second}"):
        load(name).compute(**{first: INPUTS[name][first]})


@every_metric
def test_a_refused_batch_leaves_nothing_behind(name):
    metric, inputs = load(name), INPUTS[name]
    metric.add_batch(**inputs)
    with pytest.raises(ValueError, match="the batch is empty"):
        metric.add_batch(**{key: [] for key in inputs})
    assert metric.compute() == load(name).compute(**inputs)


@pytest.mark.parametrize(
    ("name", "inputs", "match"),
    [
        ("sacrebleu", {"predictions": "a cat", "references": ["a cat"]}, "predictions of sacrebleu must be a list"),
        (
            "sacrebleu",
            {"predictions": ["a", 3], "references": ["a", "b"]},
            r"predictions\[1\] must be a str, not int",
        ),
        ("chrf", {"predictions": [None], "references": ["a"]}, r"predictions\[0\] must be a str, not NoneType"),
        ("sacrebleu", {"predictions": ["a"], "references": [[]]}, r"references\[0\] is empty: each prediction needs"),
        (
            "chrf",
            {"predictions": ["a"], "references": [["b", None]]},
            r"references\[0\] must be a str or a list",
        ),
        ("accuracy", {"predictions": [0.7], "references": [1]}, r"predictions\[0\] must be a class label .* float 0.7"),
        ("f1", {"predictions": [[0.1, 0.9]], "references": [1]}, r"not list \[0.1, 0.9\]; convert logits with argmax"),
        ("matthews_correlation", {"predictions": [1], "references": ["b"]}, r"references\[0\] must be a class label"),
        ("accuracy", {"predictions": [math.nan], "references": [1]}, "not float nan"),
        ("accuracy", {"predictions": [math.inf], "references": [1]}, "not float inf"),
        ("perplexity", {"nll": [-3.0], "tokens": [4]}, r"nll\[0\] is -3.0: a negative log-likelihood is at least 0"),
        ("perplexity", {"nll": ["a"], "tokens": [4]}, r"nll\[0\] must be a number, not str: 'a'"),
        ("perplexity", {"nll": [3.0], "tokens": [-1]}, r"tokens\[0\] must be a count, not -1"),
        ("perplexity", {"nll": [3.0], "tokens": [1.5]}, r"tokens\[0\] must be a count, not 1.5"),
        ("perplexity", {"nll": [3.0], "tokens": [math.inf]}, r"tokens\[0\] must be a count, not inf"),
        ("perplexity", {"nll": [3.0, 1.0], "tokens": [0, 0]}, "the perplexity of 2 items with 0 tokens in total"),
    ],
)
def test_bad_values_are_refused_by_their_place(name, inputs, match):
    with pytest.raises(ValueError, match=match):
        load(name).compute(**inputs)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "f1",
            {"average": "mean"},
            r"unknown average 'mean'; choose from \['binary', 'micro', 'macro', 'weighted', None\]",
        ),
        ("sacrebleu", {"tokenize": "moses"}, r"unknown tokenize 'moses'; choose from \[.*'13a'.*\]"),
        ("sacrebleu", {"smooth_method": "sine"}, r"unknown smooth_method 'sine'; choose from \['add-k', 'exp'"),
        ("chrf", {"char_order": 0}, "chrf needs char_order >= 1, .*, not char_order=0"),
        ("accuracy", {"average": "macro"}, "accuracy does not take average; choose from"),
    ],
)
def test_bad_options_are_refused_before_anything_is_stored(name, options, match):
    with pytest.raises(ValueError, match=match):
        load(name, **options)
    metric = load(name)
    with pytest.raises(ValueError, match=match):
        metric.compute(**INPUTS[name], **options)
    assert metric.writer is None


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown metric 'bleu'; choose from \['accuracy', 'chrf', 'f1'"):
        load("bleu")
    with pytest.raises(ValueError, match="accuracy does not take labels; choose from"):
        Accuracy().add_batch(predictions=[1], labels=[1])
