"""`hf-freeze score --harness` gives the numbers of lm-eval's own command, and intervals of the samples that models share."""

import json
import random

import datasets
import huggingface_hub.constants
import numpy as np
import pytest
from support.language_models import llama_small_and_bert
from support.processes import new_process
from support.recipes import cli, one_line_error
from support.text import SOURCE, TARGET

from hf_freeze.lab.harness import score_tasks

pytest.importorskip("lm_eval", reason="lm-eval is installed by hand (docs/other_tools.md)")

CHOICES = """
task: own_choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
SENTENCES = """
task: own_sentences
dataset_path: json
dataset_kwargs: {data_files: {test: sentences.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
GROUP = """
group: own_group
task: [own_choices]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""
ON_THE_HUB = "task: far\ndataset_path: nobody/none\ntest_split: test\noutput_type: multiple_choice\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A Llama, a variant of it, BERT, and tasks of local files."""
    folder = tmp_path_factory.mktemp("harness")
    llama_small_and_bert(folder, 64, ["ffn", "attention"], remote_code=True)
    rng, sentences = random.Random(1), [*TARGET, *SOURCE]
    words = [word for sentence in sentences for word in sentence.split()]
    questions = [
        {"query": rng.choice(sentences), "choices": [" ".join(rng.sample(words, 2)) for _ in range(3)], "label": 1}
        for _ in range(60)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (folder / "sentences.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    tasks = {"choices": CHOICES, "sentences": SENTENCES, "group": GROUP, "far": ON_THE_HUB, "broken": "task: ["}
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "same_name.yaml").write_text(CHOICES.replace("metric: acc", "metric: acc_norm"))
    (folder / "no_data.yaml").write_text(CHOICES.replace("choices", "nothing"))
    return folder


@pytest.fixture
def there(place, monkeypatch):
    """lm-eval reads data relative to the working directory."""
    monkeypatch.chdir(place)
    return place


def by_its_command(place, model, out):
    """Results and samples of `lm_eval run`, in a process that does not import hf_freeze itself."""
    command = f"run --model hf --model_args pretrained={model},trust_remote_code=True --include_path . --device cpu"
    command += f" --tasks own_choices,own_sentences --batch_size 1 --log_samples --output_path {out}"
    done = new_process("", *command.split(), module="lm_eval", folder=place)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.rglob("results*.json")
    samples = {}
    for task in ("own_choices", "own_sentences"):
        (path,) = out.rglob(f"samples_{task}*.jsonl")
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(results.read_text())["results"], samples


def test_values_errors_and_intervals_are_those_of_the_command_of_lm_eval(there, tmp_path):
    out = tmp_path / "out.json"
    printed = cli("score", "llama", "small", "--harness", "choices.yaml,sentences.yaml", "--out", out).output
    found = {(one["folder"], one["task"], one["metric"]): one for one in json.loads(out.read_text())}
    expected = {model: by_its_command(there, model, tmp_path / model) for model in ("llama", "small")}
    metrics = [("own_choices", "acc"), ("own_sentences", "word_perplexity"), ("own_sentences", "bits_per_byte")]
    assert list(found) == [(model, *metric) for metric in metrics for model in expected]
    for (model, task, metric), one in found.items():
        theirs = expected[model][0][task]
        assert one["value"] == pytest.approx(theirs[f"{metric},none"], rel=1e-6)
        error = theirs[f"{metric}_stderr,none"]
        assert one["error"] == (None if error == "N/A" else pytest.approx(error, rel=1e-6))
    assert found["llama", "own_choices", "acc"]["error"] > 0
    values = [found[model, "own_sentences", "word_perplexity"]["value"] for model in expected]
    assert values[0] != values[1], "one model for both"
    for task, metric in metrics:
        assert found["llama", task, metric]["to_first"] is None
        values = [found[model, task, metric]["value"] for model in expected]
        difference, low, high = found["small", task, metric]["to_first"]
        assert difference == pytest.approx(values[1] - values[0])
        bounds = bounds_of([expected[model][1][task] for model in expected], metric)
        assert [low, high] == pytest.approx(bounds, abs=0.08 * (bounds[1] - bounds[0]))
    words = " ".join(printed.split())
    assert "own_choices, acc: 60 samples" in words
    assert "95 % interval, paired samples" in words


def bounds_of(samples, metric):
    """95 % interval of the difference of two models, by resampling the samples that lm-eval wrote, both models' at once."""
    rng, values = np.random.default_rng(7), [np.array([each[metric] for each in one], float) for one in samples]
    drawn = rng.integers(len(values[0]), size=(20_000, len(values[0])))
    if metric == "acc":
        scores = [one[drawn].mean(1) for one in values]
    else:  # (log-likelihood, words or bytes)
        nats = [-one[drawn, 0].sum(1) / one[drawn, 1].sum(1) for one in values]
        scores = [np.exp(one) if metric == "word_perplexity" else one / np.log(2) for one in nats]
    return np.quantile(scores[1] - scores[0], [0.025, 0.975]).tolist()


def test_equal_folders_do_not_differ_on_the_first_samples(there):
    first, second = score_tasks([there / "small"] * 2, "choices.yaml", limit=12)
    assert (first.samples, second.samples) == (12, 12)
    assert second.to_first == (0, 0, 0)


def test_a_group_has_its_difference_and_no_interval(there):
    found = {(one.task, one.folder.name): one for one in score_tasks([there / "llama", there / "small"], "group.yaml")}
    member, group = found["own_choices", "small"], found["own_group", "small"]
    assert group.value == member.value
    assert group.to_first == (member.to_first[0], None, None)
    assert member.to_first[1] < member.to_first[2]


def test_a_file_is_opened_although_another_in_its_folder_has_the_same_name(there):
    (one,) = score_tasks([there / "llama"], "same_name.yaml", limit=1)
    assert one.metric == "acc_norm"


def test_tasks_are_named_by_patterns_too_in_a_folder_that_is_included(there):
    found = score_tasks([there / "llama"], "own_sent*", include=there, limit=2)
    assert [(one.task, one.metric) for one in found] == [
        ("own_sentences", "word_perplexity"),
        ("own_sentences", "bits_per_byte"),
    ]


def test_wrong_inputs_are_refused_in_one_line(there, monkeypatch):
    def refused(tasks, *options, folder="llama"):
        return one_line_error("score", folder, "--harness", tasks, *options).removeprefix("Error: ")

    assert refused("missing.yaml") == "missing.yaml: no such task file"
    assert refused("choices.yaml", "--include", "missing") == "missing: no such folder"
    assert refused(" , ") == "no task in ' , ': give names of lm-eval or paths of .yaml files"
    assert refused("broken.yaml").startswith("broken.yaml: cannot be loaded by lm-eval: ")
    assert "Unable to find" in refused("no_data.yaml")
    assert refused("choices.yaml", folder="bert") == (
        "bert holds ['BertForMaskedLM']: choose models of causal-lm or seq2seq-lm"
    )
    (there / "onnx").mkdir(exist_ok=True)
    (there / "onnx" / "hf_freeze_export.json").write_text('{"format": "onnx"}')
    assert refused("choices.yaml", folder="onnx").startswith("onnx is exported to onnx: give the saved model")
    found = refused("own_choice", "--include", ".")
    assert found.startswith("lm-eval has no task 'own_choice': give a name of its own or the path of a .yaml file; did")
    assert "own_choices" in found
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refused("far.yaml").startswith(
        "far.yaml: cannot be loaded by lm-eval: Couldn't reach 'nobody/none' on the Hub"
    )
