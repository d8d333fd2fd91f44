"""`hf-freeze score --perplexity`: folders of causal language models on the same windows of a text."""

import json
import math
from importlib.util import find_spec

import pytest
import torch
from support.language_models import llama_small_and_bert
from support.recipes import cli, one_line_error
from support.text import SOURCE, TARGET, fast_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_freeze import install
from hf_freeze.lab.scored import score_windows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A Llama, a variant of it, BERT, and a text."""
    folder = tmp_path_factory.mktemp("models")
    llama_small_and_bert(folder, 24, ["ffn"])
    (folder / "text.txt").write_text("\n\n".join([*TARGET, *SOURCE] * 3), encoding="utf-8")
    return folder


def losses_of(folder, text, window):
    """Of the whole text, in windows, by the logits of one forward for each."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    losses = []
    for start in range(0, len(ids) - window + 1, window):
        part = ids[None, start : start + window]
        with torch.no_grad():
            losses.append(float(model(input_ids=part, labels=part).loss))
    return losses


def test_its_table_has_the_perplexities_and_their_paired_differences(place, tmp_path):
    folders, text, out = [place / "llama", place / "small"], place / "text.txt", tmp_path / "out.json"
    printed = cli("score", *folders, "--perplexity", text, "--window", 12, "--batch-size", 4, "--out", out).output
    expected = [losses_of(folder, text, 12) for folder in folders]
    perplexities = [math.exp(sum(losses) / len(losses)) for losses in expected]
    first, second = json.loads(out.read_text())

    assert f"On {len(expected[0])} windows of 12 tokens" in printed
    assert "95 % interval, paired windows" in " ".join(printed.split())
    assert [first["score"], second["score"]] == pytest.approx(perplexities, rel=1e-5)
    assert all(f"{value:,.2f}" in printed for value in perplexities)
    assert first["to_first"] is None
    difference, low, high = second["to_first"]
    assert difference == pytest.approx(perplexities[1] - perplexities[0], rel=1e-4)

    losses, rng = torch.tensor(expected, dtype=torch.float64), torch.Generator().manual_seed(5)
    drawn = torch.randint(len(expected[0]), (20_000, len(expected[0])), generator=rng)
    means = losses[:, drawn].mean(-1).exp()
    bounds = torch.quantile(means[1] - means[0], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert [low, high] == pytest.approx(bounds, abs=0.05 * (bounds[1] - bounds[0]))


def test_equal_folders_do_not_differ_in_any_window(place):
    _, _, results = score_windows([place / "small"] * 2, place / "text.txt", window=12)
    assert results[1].to_first == (0, 0, 0)


def test_the_default_window_is_what_all_models_have_positions_for(place):
    assert AutoConfig.from_pretrained(place / "llama").max_position_embeddings == 24
    window, count, _ = score_windows([place / "llama"], place / "text.txt")
    assert (window, count) == (24, len(losses_of(place / "llama", place / "text.txt", 24)))


def test_other_ways_to_split_the_text_are_refused(place, tmp_path):
    AutoModelForCausalLM.from_pretrained(place / "llama").save_pretrained(tmp_path / "ended")
    fast_tokenizer(tmp_path / "ended", end_of_text=True)
    with pytest.raises(
        ValueError, match=r"perplexity is per token, and .*ended splits .*text.txt into other tokens than"
    ):
        score_windows([place / "llama", tmp_path / "ended"], place / "text.txt", window=12)


def test_wrong_inputs_are_refused_in_one_line(place, tmp_path):
    def refused(*arguments, folder=place / "llama", text=place / "text.txt"):
        return one_line_error("score", folder, "--perplexity", text, *arguments).removeprefix("Error: ")

    short, folder = tmp_path / "short.txt", tmp_path / "exported"
    short.write_text(TARGET[0])
    count = len(AutoTokenizer.from_pretrained(place / "llama")(TARGET[0])["input_ids"])
    window = count // 2
    assert refused(text=short) == (
        f"{count} tokens are fewer than two windows of 24: choose a window of at most {window}"
    )
    cli("score", place / "llama", "--perplexity", short, "--window", window)  # as the message says
    assert refused("--window", 25) == f"window 25: {place / 'llama'} has 24 positions"
    assert refused(folder=place / "bert") == f"{place / 'bert'} holds ['BertForMaskedLM']: choose models of causal-lm"
    folder.mkdir()
    (folder / "hf_freeze_export.json").write_text('{"format": "onnx"}')
    assert refused(folder=folder) == (
        f"{folder} is exported to onnx: give the saved model or variant that it was made of"
    )
    (folder / "compressed.json").write_text("{}")
    assert refused(folder=folder) == (
        f"{folder} is the folder of a compression: give the model in it that compress has named as written"
    )
    assert refused(folder=tmp_path / "none") == f"{tmp_path / 'none'}: no such folder"
    assert "no such file" in refused(text=tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to score on: give one of --data, --harness, --perplexity"),
        (["--data", "a", "--harness", "b"], "--data and --harness: give one of --data, --harness, --perplexity"),
        (["--harness", "a", "--perplexity", "b"], "--harness and --perplexity: give one of"),
        (["--harness", "a", "--split", "dev"], "--split belongs to --data, not to --harness"),
        (["--harness", "a", "--set", "a=1"], "--set belongs to --data, not to --harness"),
        (["--harness", "a", "--window", "8"], "--window belongs to --perplexity, not to --harness"),
        (["--perplexity", "a", "--limit", "8"], "--limit belongs to --harness, not to --perplexity"),
        (["--data", "a", "--include", "b"], "--include belongs to --harness, not to --data"),
        (["--data", "a", "--batch-size", "2"], "--batch-size belongs to --harness and --perplexity, not to --data"),
    ],
)
def test_options_of_another_way_to_score_are_refused(arguments, message):
    assert message in one_line_error("score", "folder", *arguments)


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(install, "find_spec", lambda package: None if package == "lm_eval" else find_spec(package))
    assert one_line_error("score", "folder", "--harness", "hellaswag") == (
        "Error: `hf-freeze score --harness` needs the package lm_eval, which is missing; from a clone: pip install -c "
        'constraints.txt -e ".[other-tools]"'
    )
