"""What each cut would lose, by the solvers and by the raw outputs; how far one model is from another."""

import copy
import math
import random

import pytest
import torch
from support.cases import plain
from support.models import native
from support.text import words

from hf_freeze import analysis, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FFNPruning, HeadPruning, LowRank, VocabularyTrimming


def texts_of(count=40, seed=0):
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(3, 40)}" for _ in range(draw.randrange(3, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def bert():
    return native(plain(ARCHITECTURES["bert"]))


@pytest.fixture(scope="module")
def losses(bert):
    return analysis.cut_losses(bert, analysis.calibrate(bert, texts_of(), words(40)))


def outputs(model, texts):
    """name -> (T, O) the outputs of the last linear of the first FFN, and of an attention, without padding."""
    seen = {}
    names = {"ffn": "encoder.layer.0.output.dense", "self": "encoder.layer.0.attention.output.dense"}
    handles = [
        model.base_model.get_submodule(name).register_forward_hook(
            lambda module, args, output, kind=kind: seen.setdefault(kind, []).append(output[0])
        )
        for kind, name in names.items()
    ]
    with torch.no_grad():
        for text in texts:
            model(**words(40)(text, return_tensors="pt"))
    for handle in handles:
        handle.remove()
    return {kind: torch.cat(each).double() for kind, each in seen.items()}


@pytest.mark.parametrize(
    ("method", "kind", "cut"),
    [
        (FFNPruning(width=18, layers={"encoder": [0]}), "ffn", "75 % kept"),
        (FFNPruning(width=12, layers={"encoder": [0]}), "ffn", "50 % kept"),
        (FFNPruning(width=6, layers={"encoder": [0]}), "ffn", "25 % kept"),
        (HeadPruning(share=0.5, layers={"encoder": [0]}), "self", "50 % kept"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_losses_are_those_of_the_pruned_model(method, kind, cut, bert, losses):
    """Of the method with the same calibration, measured on the raw outputs. Curvature may choose other heads."""
    calibration = analysis.calibrate(bert, texts_of(), words(40))
    pruned = make_variant(bert, [method], calibration=calibration)
    before, after = (outputs(model, texts_of())[kind] for model in (bert, pruned))
    lost = (after - before).square().sum() / (before - before.mean(0)).square().sum()
    assert losses.losses[f"encoder.0.{kind}"][cut] == pytest.approx(float(lost), rel=0.02)


def test_more_is_lost_where_less_is_kept(losses):
    assert list(losses.losses) == ["encoder.0.self", "encoder.0.ffn", "encoder.1.self", "encoder.1.ffn"]
    for block, cuts in losses.losses.items():
        if block.endswith("ffn"):
            assert 0 < cuts["75 % kept"] < cuts["50 % kept"] < cuts["25 % kept"] < 1
        else:
            assert {"75 % kept", "25 % kept"}.isdisjoint(cuts)  # of 2 heads, one goes or none
        assert 0 < cuts["4 bits"] < cuts["half the weights, low rank"] < 1


def test_the_table_and_the_picture(losses, tmp_path):
    lines = str(losses).splitlines()
    assert lines[0] == "Share of its output that a part loses by each cut, on 40 texts with 337 tokens"
    assert lines[1].split("  ")[0] == "part"
    assert lines[2].startswith("encoder 0: self-attention")
    assert " – " in lines[2]
    assert len({len(line) for line in lines[1:]}) == 1
    figure = losses.figure()
    figure.savefig(tmp_path / "cuts.png")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["encoder 0: self-attention", "encoder 0: FFN"]
    assert axes.get_xticklabels()[0].get_text() == "75 % of\nneurons or\nheads kept"


def test_models_that_cannot_be_calibrated(bert):
    with pytest.raises(ValueError, match="needs a model with trained weights, not a BertConfig"):
        analysis.calibrate(bert.config, texts_of(), words(40))
    with pytest.raises(ValueError, match="is on meta and has no values"):
        analysis.calibrate(copy.deepcopy(bert).to("meta"), texts_of(), words(40))
    with pytest.raises(ValueError, match="calibration is empty"):
        analysis.calibrate(bert, [])


# -- fidelity ----------------------------------------------------------------------------------------------------------------


def test_a_model_is_itself(bert):
    found = analysis.fidelity(bert, bert, texts_of(), words(40))
    assert (found.error, found.kl, found.agreement) == (0, pytest.approx(0, abs=1e-12), 1)
    assert found.perplexity is None


def test_the_numbers_are_those_of_the_logits():
    """Against a loop over single texts."""
    model = native(plain(ARCHITECTURES["gpt2"]))
    other = make_variant(model, [LowRank(rank=3)]).eval()
    kl, same, nats, tokens, targets = 0.0, 0, 0.0, 0, 0
    for text in texts_of(9):
        batch = words(40)(text, return_tensors="pt")
        batch.pop("token_type_ids", None)
        with torch.no_grad():
            p, q = (each(**batch).logits[0].double().log_softmax(-1) for each in (model, other))
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        nats -= float(q[:-1].gather(1, batch["input_ids"][0, 1:, None]).sum())
        tokens, targets = tokens + len(p), targets + len(p) - 1
    found = analysis.fidelity(model, other, texts_of(9), words(40))
    assert found.kl == pytest.approx(kl / tokens, rel=1e-4)
    assert found.agreement == pytest.approx(same / tokens)
    assert found.perplexity == pytest.approx(math.exp(nats / targets), rel=1e-4)


def test_held_out_batches_are_compared_too(bert, monkeypatch):
    """What `make_variant` keeps for a choice is part of the texts here."""
    monkeypatch.setattr("hf_freeze.model.samples._BATCH", 16)
    other = make_variant(bert, [LowRank(rank=3)])
    small = analysis.fidelity(bert, other, texts_of(), words(40))
    monkeypatch.setattr("hf_freeze.model.samples._BATCH", 4096)
    whole = analysis.fidelity(bert, other, texts_of(), words(40))
    assert small.kl == pytest.approx(whole.kl, rel=1e-4)


def test_models_with_other_outputs_are_not_compared(bert):
    other = make_variant(bert, [VocabularyTrimming(keep=list(range(30)))])
    with pytest.raises(ValueError, match=r"different outputs, of the shapes \(\d+, 9, 40\) and \(\d+, 9, 30\)"):
        analysis.fidelity(bert, other, ["w3 w4 w5 w6 w7 w8 w9 w10"], words(40))
