"""`describe --texts` and `diff --texts`: numbers of models on texts of a file."""

import random
import re

import pytest
from support.cases import plain
from support.models import native
from support.recipes import cli, one_line_error
from support.text import words
from transformers import AutoModelForMaskedLM

from hf_freeze import analysis, make_variant
from hf_freeze.analysis.calibration import CUTS
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.data import sample
from hf_freeze.methods import LowRank
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import served_fidelity


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a variant, and texts as lines and as a table."""
    folder = tmp_path_factory.mktemp("models")
    model = native(plain(ARCHITECTURES["bert"]))
    model.save_pretrained(folder / "model")
    make_variant(model, [LowRank(rank=3)]).save_pretrained(folder / "variant")
    words(40).save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(3, 40)}" for _ in range(draw.randrange(3, 9))) for _ in range(40)]
    (folder / "texts.txt").write_text("\n\n".join(texts) + "\n")
    (folder / "texts.csv").write_text("Review\n" + "\n".join(texts) + "\n")
    return folder


def texts_of(folder):
    return (folder / "texts.txt").read_text().split("\n\n")


def test_describe_shows_what_each_cut_would_lose(folder):
    shown = cli("describe", folder / "model", "--texts", folder / "texts.txt", "--samples", "30").output
    texts = sample([text.strip() for text in texts_of(folder)], 30)
    model = native(plain(ARCHITECTURES["bert"]))
    losses = analysis.cut_losses(model, analysis.calibrate(model, texts, words(40)))
    assert f"on 30 texts with {losses.tokens} tokens" in shown
    line = next(line for line in shown.splitlines() if "encoder 0: FFN" in line)
    numbers = [f"{losses.losses['encoder.0.ffn'][cut]:.2%}" for cut in CUTS]
    assert re.findall(r"\d+\.\d+%", line) == numbers
    table = cli("describe", folder / "model", "--texts", folder / "texts.csv", "--column", "Review", "--samples", "30")
    assert table.output == shown


def test_diff_compares_the_answers(folder):
    command = ["diff", folder / "model", folder / "variant", "--top", "0"]
    assert "KL" not in cli(*command).output
    shown = cli(*command, "--texts", folder / "texts.txt").output
    found = served_fidelity(folder / "model", folder / "variant", sample([t.strip() for t in texts_of(folder)], 512))
    low, high = found.intervals["kl"]
    assert re.search(rf"KL of the predictions \(nats\) .* {found.kl:.4g} .* {low:.4g} to {high:.4g}", shown)
    assert re.search(rf"same first choice .* {found.agreement:.2%}", shown)
    assert re.search(rf"fidelity of B to A, 0 to 1 .* {found.score:.4f}", shown)
    assert "on 40 texts" in shown


def test_diff_compares_exported_folders_by_their_answers(folder, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(folder / "model", num_hidden_layers=1)  # which is traced fastest
    model.save_pretrained(tmp_path / "model")
    words(40).save_pretrained(tmp_path / "model")
    exported = export_model(tmp_path / "model", "torch", out=tmp_path / "exported")
    shown = cli("diff", tmp_path / "model", exported, "--texts", folder / "texts.txt").output
    assert re.search(r"fidelity of B to A, 0 to 1 .* 1.0000", shown)
    assert "Tensors of A" not in shown
    message = one_line_error("diff", exported, tmp_path / "model")
    assert "exported is exported, so its tensors cannot be compared; compare answers: --texts FILE" in message


def test_texts_that_cannot_be_used(folder):
    assert "--texts needs a folder or Hub id of a model" in one_line_error(
        "describe", "bert", "--texts", folder / "texts.txt"
    )
    command = ["diff", folder / "variant", folder / "model", "--texts", folder / "texts.txt"]
    assert "variant has no tokenizer, which its answers need" in one_line_error(*command)
    assert "nothing.txt" in one_line_error("describe", folder / "model", "--texts", folder / "nothing.txt")
    message = one_line_error("describe", folder / "model", "--texts", folder / "texts.csv", "--column", "text")
    assert "Review" in message


def test_a_sample_of_more_begins_with_that_of_fewer():
    items = list(range(100))
    assert sample(items, 10) == sample(items, 50)[:10] != sample(items, 10, seed=1)
    assert sorted(sample(items, 1000)) == items
    with pytest.raises(ValueError, match=r"sample\(number=0\): must be at least 1"):
        sample(items, 0)
