"""`pictures` in the rows of a recipe: what is refused, what a run measures, and what its report shows."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console
from support.recipes import write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_freeze import analysis
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.translation import encode, load_data
from hf_freeze.run_folder import read_maps

UNTRAINED = {"methods": [], "training": {"epochs": 0}}
ROWS = {
    "0": {"label": "both", "pictures": ["attention", "embeddings"]} | UNTRAINED,
    "1": {"label": "attention alone", "pictures": ["attention"]} | UNTRAINED,
}


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ("attention", r"row '0': pictures must be a list, not 'attention'"),
        (["heads"], r"row '0': unknown pictures\.0='heads'; choose from \['attention', 'embeddings'\]"),
    ],
)
def test_unknown_pictures_are_refused(tmp_path, pictures, message):
    rows = {"0": ROWS["0"] | {"pictures": pictures}}
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows))


def test_a_grid_shows_where_heads_look_and_which_embeddings_are_alike(tmp_path, pictures):
    recipe, out = load_recipe(write_recipe(tmp_path / "r.yaml", rows=ROWS)), tmp_path / "runs"
    run_grid(recipe, out, console=Console(quiet=True))
    folder = out / "row-0-seed-1"
    maps = read_maps(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert list(maps["attention"]) == list(model.architecture.attentions(model.config))
    # Fresh weights attend almost equally: an encoder's shares sum to less than 1, for texts are longer than the reach.
    shares = np.array(maps["attention"]["encoder.0.self"])
    assert shares.shape == (2, 17)
    assert np.all((shares > 0) & (shares.sum(1, keepdims=True) <= 1.001))
    ids = encode(load_data(recipe.data)["train"], tokenizer)["input_ids"]
    counts = np.bincount(np.concatenate(list(ids)), minlength=model.config.vocab_size)
    tokens = analysis.most_frequent(counts, 24, leave_out=tokenizer.all_special_ids)
    shown = maps["embeddings"]
    assert sorted(shown["tokens"]) == sorted(tokenizer.decode([token]).strip() or "␣" for token in tokens)
    similarity = analysis.embedding_similarity(model, tokens)
    order = analysis.clustered(similarity)
    torch.testing.assert_close(torch.tensor(shown["similarity"]), similarity[order][:, order], rtol=0, atol=1e-4)
    assert list(read_maps(out / "row-1-seed-1")) == ["attention"]

    report = write_report(out, say=lambda _: None)
    assert [list(report.mapped(picture)) for picture in ("attention", "embeddings")] == [["0", "1"], ["0"]]
    assert (out / "attention.png").exists()
    assert (out / "embeddings.png").exists()
    text, page = (out / "report.md").read_text("utf-8"), (out / "report.html").read_text("utf-8")
    assert "![where the heads look](attention.png)" in text
    assert "and those of a random table. Row 0, the first seed." in text
    for title in ("Where the heads look", "Which embeddings are alike"):
        assert f"<figcaption>{title} <span>" in page
    assert json.dumps(shown["tokens"][0], ensure_ascii=False).strip('"') in page
