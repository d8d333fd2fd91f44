"""`hf_freeze.search.compress`: the arguments of the command line from Python, a callback, a loss and a metric of one's own."""

import gc
import json
import re

import datasets
import matplotlib as mpl
import numpy as np
import pytest
import torch
from rich.console import Console
from support.browser import dump_page, needs_browser
from support.cases import ALL
from support.recipes import CLASSIFICATION, cli, one_line_error, write_recipe
from transformers import BertConfig, BertForSequenceClassification

from hf_freeze import data
from hf_freeze.compression.budget import in_bytes
from hf_freeze.data import builtin_tenses
from hf_freeze.experiments.compress.page import Story, write_story
from hf_freeze.experiments.compress.pictures import front_figures
from hf_freeze.experiments.compress.progress import Step
from hf_freeze.experiments.compress.scores import Scoring
from hf_freeze.experiments.compress.shapes import Shape, StackShape, parts_of_shape
from hf_freeze.experiments.compress.trials import CANDIDATE, FINAL, MODEL, PART, Trial
from hf_freeze.experiments.report.plots.style import STYLE
from hf_freeze.experiments.runs import execute, grid
from hf_freeze.search import Budget, Stopped, compress
from hf_freeze.training import ClassificationTrainer, TokenBatchTrainer

QUIET = Console(quiet=True)
SETTINGS = {"data": {"builtin": {"seed": 0, "train": 48, "dev": 24, "test": 24}}, "presets/small/training/epochs": 1}


class InThisProcess:
    """In the place of `Processes`: a test of seconds cannot wait for a process for each training."""

    def __init__(self, jobs, resume_anyway):
        self.said, self.done = [], []

    def has_room(self):
        return True

    def start(self, run, folder, until=None):
        self.said.append((folder, {"stage": "starting"}))
        execute.execute(run, folder, lambda message: self.said.append((folder, message)))
        self.done.append((folder, ""))

    def message(self):
        return self.said.pop(0) if self.said else None

    def ended(self):
        done, self.done = ([], self.done) if self.said else (self.done, [])
        return done

    def close(self):
        pass


class CountingTrainer(ClassificationTrainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Cross-entropy in which the second class counts three times."""
        type(self).calls += 1
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        weights = torch.tensor([1.0, 3.0] + [1.0] * (outputs.logits.shape[-1] - 2))
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], weight=weights)
        loss = outputs.get("label_weight", 1.0) * loss + outputs.get("auxiliary_loss", 0.0)  # of the teacher
        return (loss, outputs) if return_outputs else loss


def share_of_right(predictions, references):
    return sum(one == other for one, other in zip(predictions, references, strict=True)) / len(references)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe, and a classifier that has learned a little: parts of another are worth nothing."""
    folder = tmp_path_factory.mktemp("compress")
    write_recipe(folder / "recipe.yaml", **CLASSIFICATION, **SETTINGS)
    splits = builtin_tenses(seed=0, train=48, dev=24, test=24)
    tokenizer = data.train_tokenizer(list(splits["train"]["sentence"]), 120, kind="wordpiece")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=len(set(splits["train"]["label"])), **sizes)
    model = BertForSequenceClassification(config)
    batch = tokenizer(list(splits["train"]["sentence"]), padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(**batch, labels=torch.tensor(splits["train"]["label"])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def arguments(place, **changes):
    chosen = {"data": place / "recipe.yaml", "budget": Budget(max_bytes="50kB"), "engine": "torch", "console": QUIET}
    return chosen | {"epochs": 2, "out": place / "out"} | changes


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(grid, "Processes", InThisProcess)
    gc.freeze()  # as the processes do: each training ends with a collection
    yield
    gc.unfreeze()


def check_folder(out, result):
    """A model card, a record, a page and a picture that say what came out."""
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"for a budget of {in_bytes(50_000)}" in card.replace("at most ", "")
    assert f"| after | {in_bytes(result.after.bytes)} |" in card
    assert f"- Kept: {result.words}." in card
    assert 'pipeline("text-classification", model="served")' in card
    assert 0 < result.measuring < result.seconds
    assert f"{100 * result.measuring / result.seconds:.1f} % went into measuring." in card
    assert "95 % interval over its examples" in card
    variant = (result.model / "README.md").read_text(encoding="utf-8")
    assert variant.split("## Compression")[1].startswith(card.split("## Compression")[1][:200])
    record = json.loads((result.model / "results.json").read_text(encoding="utf-8"))
    assert record["compression"]["kept"] == result.words
    assert not (out / "served" / "README.md").exists(), "the card takes no bytes of the budget"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "being compressed" not in page
    assert result.words in page
    assert page.count("<svg") == 3
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sum(path.stat().st_size for path in (out / "served").iterdir()) == result.after.bytes <= 50_000


def test_a_stopped_compression_goes_on_with_a_loss_and_a_metric_of_ones_own(place, in_this_process):
    steps, own = [], {"metric": share_of_right, "trainer_class": CountingTrainer}

    def stop_in_the_last_training(step):
        steps.append(step)
        return step.phase == "epochs"

    with pytest.raises(
        Stopped, match=r"stopped it after “planning the last training”; the same call resumes from there"
    ):
        compress(place / "model", **arguments(place), **own, callback=stop_in_the_last_training)
    assert CountingTrainer.calls > 0
    page = (place / "out" / "report.html").read_text(encoding="utf-8")
    assert "<strong>Stopped:</strong> the callback stopped it after" in page
    assert 'http-equiv="refresh"' not in page
    shares = [step.share for step in steps]
    assert shares == sorted(shares[:-1]) + shares[-1:], "it only grows, until the length of the last training is known"
    assert steps[0].best is None
    measured = [step.text for step in steps if step.phase == "sensitivity"]
    assert len(measured) > 10
    assert "measuring what layers, heads, neurons and ranks are worth: ffn pruning of the encoder" in measured
    # How many candidates are left depends on losses, which depend on the CPU; one alone is not trained before the end.
    compared = any((place / "out" / "trainings").glob("row-candidate-*/metrics.json"))
    assert steps[-1].best.label.startswith("candidate") if compared else steps[-1].best is None
    assert steps[-1].seconds_left > 0

    later = []
    result = compress(place / "model", **arguments(place), **own, callback=later.append)
    assert {step.phase for step in later} == {"training", "end"}, "what is kept is not done again"
    assert later[-1].share == 1
    assert later[-1].best.kind == "compressed"
    before = CountingTrainer.calls
    assert compress(place / "model", **arguments(place), **own) == result
    assert CountingTrainer.calls == before
    assert 0 <= result.after.dev_score <= 1, "the metric's own scale"
    check_folder(place / "out", result)
    untrained = [*(place / "out" / "trainings").glob("row-tokens-*-seed-1/metrics.json")]
    metrics = [json.loads(path.read_text(encoding="utf-8"))["metrics"] for path in untrained]
    assert metrics
    assert not any(name.startswith("test_") for one in metrics for name in one), "nothing needs their score"
    with pytest.raises(ValueError, match=r"holds another compression \(metric was 'share of right', now None\)"):
        compress(place / "model", **arguments(place), trainer_class=CountingTrainer)


@pytest.mark.skipif(not ALL, reason="20 seconds, since each training is a process: HF_FREEZE_TESTS=all")
def test_the_command_line_and_python_find_the_same(place):
    out, changes = place / "by-command", ["--engine", "torch", "--epochs", "2", "--out", place / "by-command"]
    said = cli("compress", place / "model", "--data", place / "recipe.yaml", "--max-bytes", "50kB", *changes).output
    result = compress(place / "model", **arguments(place, out=out))
    assert f"Kept: {result.words}." in said
    check_folder(out, result)


def test_settings_that_are_wrong(place, tmp_path):
    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            compress(place / "model", **arguments(place, out=tmp_path / "out", **changes))

    class Local(ClassificationTrainer):
        pass

    refused(r"unknown engine 'rust'; choose from \['ctranslate2', 'onnx', 'torch'\]", engine="rust")
    refused(
        r"engine 'ctranslate2' serves translators, not sequence-class.*; choose onnx or torch", engine="ctranslate2"
    )
    refused(r"hours=0: must be above 0", hours=0)
    refused(r"epochs=-1: must be above 0", epochs=-1)
    refused(r"unknown targets 'teacher'; choose from \['data', 'model'\]", targets="teacher")
    refused(r"metric='accuracy': must be a function of predictions and references", metric="accuracy")
    refused(r"must be a subclass of hf_freeze.training.ClassificationTrainer", trainer_class=TokenBatchTrainer)
    refused(r"trainer_class=.*Local: .* define it at the top level of a file", trainer_class=Local)
    refused(r"--set 'epochs': write KEY=VALUE", settings=["epochs"])
    error = one_line_error("compress", place / "model", "--data", place / "recipe.yaml", "--out", tmp_path / "out")
    assert "a budget limits bytes, time or loss" in error
    where = ("compress", place / "model", "--data", place / "recipe.yaml", "--out", tmp_path / "out")
    error = one_line_error(*where, "--max-bytes", "30%", "--targets", "model", "--engine", "onnx")
    assert "targets='model' is for the task 'translation', not 'sequence-classification'; leave it out" in error
    assert "max_ms='120%': a share of what the model takes is above 0 %" in one_line_error(*where, "--max-ms", "120%")


def test_a_metric_must_return_a_number_and_has_an_interval():
    split = datasets.Dataset.from_dict({"label": [0, 1] * 50})
    right, wrong = np.array([0, 1] * 50), np.zeros(100, dtype=int)
    scoring = Scoring("sequence-classification", {}, share_of_right)
    difference, low, high = scoring.difference(wrong, right, split)
    assert (difference, scoring.shown(difference, signed=True)) == (0.5, "+0.5")
    assert 0.35 < low < 0.45 < 0.55 < high < 0.65
    with pytest.raises(ValueError, match=r"metric <lambda> returned nan: must be a finite number"):
        Scoring("sequence-classification", {}, lambda predictions, references: float("nan")).score(right, split)


def trial(kind, name, **figures):
    return Trial(
        name=name, kind=kind, words=f"what {name} keeps", **{"bytes": 5e5, "loss": 1.5, "score": 30.0} | figures
    )


def story(**changes):
    """Of a model whose name is no HTML, with limits of bytes and time."""
    trials = [
        trial(MODEL, "tokens-100", bytes=2e6, ms=3.0, score=34.0),
        trial(PART, "recover-layers", bytes=1.5e6, ms=2.0, estimated=True, curve=((1.0, 2.0), (2.0, 1.5))),
        *(trial(CANDIDATE, f"candidate-{n}", bytes=n * 3e5, ms=0.5 * n, score=25.0 + n) for n in (1, 2, 3)),
        trial(FINAL, "final", ms=1.0, loss=None, score=None, curve=((1.0, 1.8),)),
    ]
    step = Step(phase="training", text="training <final>", share=0.4, seconds_left=700.0, best=trials[2])
    stacks = {"encoder": StackShape(layers=3, heads=0.5)}
    whole = Shape(stacks={"encoder": StackShape(layers=6)}, vocabulary=4000)
    given = {"name": "<model>", "budget": Budget(max_bytes="1MB", max_ms=1.5), "scoring": Scoring("translation", {})}
    given |= {
        "step": step,
        "trials": trials,
        "chosen": "encoder 3 of 6 layers",
        "command": "hf-freeze compress <model>",
    }
    given |= {"parts": parts_of_shape(Shape(stacks=stacks, vocabulary=2000, rank=16), whole, hidden=64, bits=8)}
    return Story(**given | {"phases": {"whole": 1.25}} | changes)


def test_the_page_while_it_runs(tmp_path):
    write_story(story(), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;model&gt;, being compressed" in page
    assert 'http-equiv="refresh"' in page
    assert "Training &lt;final&gt;" in page
    assert "40% of all epochs, about 12 minutes left" in page
    assert "candidate 1: what candidate-1 keeps; 300.0 kB, dev loss 1.500" in page
    assert "<td>~1.50 MB</td><td>~2.00</td>" in page, "estimated"
    assert "3 of 6" in page, "what is kept"
    assert not re.search(r"(src|href)=[\"'](?!#)", re.sub(r"xlink:href", "href", page)), "it needs no other file"
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_at_most_seven_points_have_names_and_the_budget_is_drawn():
    shown = story()
    with mpl.rc_context(STYLE):
        figures = front_figures(shown.trials, shown.budget, "BLEU")
    for name, limit in (("front", 1.0), ("time", 1.5)):
        (axes,) = figures[name].axes
        names = [text.get_text() for text in axes.texts]
        assert sorted(names) == ["candidate 1", "candidate 2", "candidate 3", "the model"], (
            "the last one has no score yet"
        )
        assert [line.get_xdata()[0] for line in axes.lines if line.get_label() == "budget"] == [limit]


@needs_browser
def test_a_browser_shows_the_page(tmp_path):
    write_story(story(), tmp_path)
    shown, log = dump_page((tmp_path / "report.html").as_uri(), tmp_path / "profile")
    assert "about 12 minutes left" in shown
    assert "Content Security Policy" not in log


def test_what_is_not_used_of_a_recipe_may_be_missing(tmp_path):
    """Recipes whose backbone the user names lack it, and one that was written for compress has no rows."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: sequence-classification\ndata: {train: [a.jsonl], dev: [a.jsonl], test: [a.jsonl]}\n"
        "training: {epochs: 1, max_tokens: 500, warmup_steps: 10}\n"
    )
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"mine.yaml: training.learning_rate is missing"):
        compress(tmp_path, data=path, budget=Budget(max_bytes="1MB"), out=out)
    with pytest.raises(ValueError, match=r"holds no tokenizer; save it beside the model"):
        compress(
            tmp_path,
            data=path,
            budget=Budget(max_bytes="1MB"),
            out=out,
            engine="onnx",
            settings=["training.learning_rate=1e-3"],
        )
