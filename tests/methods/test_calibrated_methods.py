"""What a calibration changes in methods that act on single linears and on tables: nearer outputs, and the same files."""

import copy
import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from support.cases import ALL, once_on_each_architecture
from support.models import native, perturbed
from support.parametrize import over
from support.small import small_config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_freeze import make_variant
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers.masked import Masked
from hf_freeze.layers.quantized import QuantizedLinear
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.methods import (
    FactorizedEmbedding,
    LowRank,
    MagnitudePruning,
    Quantize,
    TensorTrain,
    Tucker,
    VocabularyTrimming,
)
from hf_freeze.model.calibrating import CalibrationPass, Report
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.samples import samples_of
from hf_freeze.surgery import effective_weight, token_tables

INT4 = {"weights": "int4", "components": ["ffn", "attention"]}
METHODS = {
    "tensor train": TensorTrain(rank=6),
    "tucker": Tucker(rank=3),
    "wanda": MagnitudePruning(sparsity=0.6, criterion="wanda"),
    "obs": MagnitudePruning(sparsity=0.6, criterion="obs"),
    "obs in each layer": MagnitudePruning(sparsity=0.6, criterion="obs", scope="layer"),
    "int4": Quantize(**INT4),
    "int4 in groups": Quantize(**INT4, granularity="group-64"),
    "int8": Quantize(weights="int8"),
    "int4 and tables": Quantize(weights="int4", components=["ffn", "attention", "embeddings"]),
    "table": FactorizedEmbedding(rank=10),
}
MODELS = {"gpt2": AutoModelForCausalLM, "marian": AutoModelForSeq2SeqLM, "llama": AutoModelForCausalLM}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return perturbed(MODELS[request.param].from_config(small_config(request.param))).eval()


def batches(model, seed=1):
    """Texts of which few tokens make most, in rows of different lengths."""
    torch.manual_seed(seed)
    tokens = min(model.config.vocab_size, 24)
    likely = torch.arange(1, tokens + 1).float().reciprocal()

    def ids(rows, length):
        return torch.multinomial(likely, rows * length, replacement=True).view(rows, length)

    result = []
    for length in (9, 12):
        mask = torch.ones(16, length, dtype=torch.int64)
        mask[::3, -4:] = 0
        batch = {"input_ids": ids(16, length), "attention_mask": mask}
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids(16, 10), "decoder_attention_mask": torch.ones(16, 10, dtype=torch.int64)}
        result.append(batch)
    return result


def variant(model, *methods, texts=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="calibration has")
        return make_variant(model, list(methods), calibration=texts).eval()


@pytest.fixture(scope="module")
def pruned(model):
    """Calibrated variants, which no test changes."""
    chosen = {name: METHODS[name] for name in ("obs", "obs in each layer", "wanda")}
    chosen["magnitude"] = MagnitudePruning(sparsity=0.6)
    return {name: variant(model, method, texts=batches(model)) for name, method in chosen.items()}


def error(model, other, texts):
    return fidelity_on(model, other, texts).error


def uncalibrated(method):
    """What the method does without texts."""
    return replace(method, criterion="magnitude") if isinstance(method, MagnitudePruning) else method


EACH = itertools.product(MODELS, METHODS) if ALL else zip(itertools.cycle(MODELS), METHODS, strict=False)


@pytest.mark.parametrize(
    ("model", "method"),
    [pytest.param(model, METHODS[name], id=f"{model}-{name}") for model, name in EACH],
    indirect=["model"],
)
def test_outputs_are_nearer_and_the_files_are_the_same(model, method, tmp_path):
    texts = batches(model)
    plain, calibrated = variant(model, uncalibrated(method)), variant(model, method, texts=texts)
    assert error(model, calibrated, texts) < 0.9 * error(model, plain, texts)
    shapes = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    assert {name: (value.shape, value.dtype) for name, value in calibrated.state_dict().items()} == shapes
    calibrated.save_pretrained(tmp_path)
    again = MODELS[model.config.model_type].from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = calibrated(**texts[0]).logits
        assert torch.equal(again(**texts[0]).logits, expected)
        torch.testing.assert_close(calibrated.merge()(**texts[0]).logits, expected, rtol=1e-3, atol=1e-4)


@over(once_on_each_architecture(lambda case: case.from_model and any(one.facts.calibration for one in case.methods)))
def test_the_model_that_is_given_stays_as_it_is(case):
    """Until the end, its memory is that of the new one."""
    given = native(case)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    texts = case.batch()
    labels = texts.pop("labels", None)
    if given.config.is_encoder_decoder and labels is not None:
        texts["decoder_input_ids"] = labels.clamp_min(0)
    variant(given, *case.methods, texts=[texts])
    assert [name for name, value in given.state_dict().items() if not torch.equal(value, before[name])] == []


def test_as_many_weights_stay_as_without_a_calibration(model, pruned):
    texts = batches(model)
    for calibrated in pruned.values():
        kept = [module.kept_entries() for module in calibrated.modules() if isinstance(module, Masked)]
        share = sum(int(each.sum()) for each in kept) / sum(each.numel() for each in kept)
        assert share == pytest.approx(0.4, abs=0.03)  # Wanda's is a whole number of each row
        finalized = copy.deepcopy(calibrated)
        finalized.finalize()
        with torch.no_grad():
            torch.testing.assert_close(finalized(**texts[0]).logits, calibrated(**texts[0]).logits)
        nonzeros = sum(module.nonzeros for module in finalized.modules() if isinstance(module, SparseLinear))
        assert nonzeros == sum(int(each.sum()) for each in kept)


def test_the_mask_of_magnitudes_stays_and_its_weights_are_refitted(model, pruned):
    texts, plain, calibrated = batches(model), variant(model, MagnitudePruning(sparsity=0.6)), pruned["magnitude"]
    masks = [[m.mask for m in each.modules() if isinstance(m, Masked)] for each in (plain, calibrated)]
    assert all(torch.equal(*pair) for pair in zip(*masks, strict=True))
    assert error(model, calibrated, texts) < 0.9 * error(model, plain, texts)


def test_weights_go_where_the_predictions_change_least(pruned):
    shares = [
        {m.zeros() / m.weight.numel() for m in pruned[name].modules() if isinstance(m, Masked)}
        for name in ("obs in each layer", "obs")
    ]
    assert max(shares[0]) - min(shares[0]) < 0.01 < max(shares[1]) - min(shares[1])


@pytest.mark.parametrize("criterion", ["wanda", "obs"])
def test_a_criterion_of_a_calibration_needs_one(model, criterion):
    method = MagnitudePruning(sparsity=0.5, criterion=criterion)
    message = f"criterion='{criterion}'.* needs a calibration: give make_variant trained weights and calibration="
    with pytest.raises(ValueError, match=message):
        make_variant(model, [method])
    with pytest.raises(ValueError, match=message):
        make_variant(model.config, [method], task="causal-lm")


def test_bad_criteria():
    with pytest.raises(ValueError, match=r"MagnitudePruning\(criterion='hessian'\).*choose from"):
        MagnitudePruning(sparsity=0.5, criterion="hessian")
    with pytest.raises(ValueError, match=r"criterion='obs', begin=0.2, end=None\): in training, magnitudes decide"):
        MagnitudePruning(sparsity=0.5, criterion="obs", begin=0.2)


# -- few bits ----------------------------------------------------------------------------------------------------------------


def test_numbers_lie_on_the_grid_that_is_stored(model):
    calibrated = variant(model, METHODS["int4 in groups"], texts=batches(model))
    layers = [module for module in calibrated.modules() if isinstance(module, QuantizedLinear)]
    assert layers
    for layer in layers:
        numbers, steps = layer.integers(), layer.steps()
        assert -7 <= int(numbers.min()) < 0 < int(numbers.max()) <= 7
        assert (steps > 0).all()
        assert torch.equal(effective_weight(layer), numbers.float() * layer.grid.spread(steps, layer.in_features))


def test_factors_are_rounded_for_what_they_see(model):
    texts, low = batches(model), LowRank(rank=8)
    start = variant(model, low)
    plain, calibrated = (variant(start, Quantize(weights="int4"), texts=each) for each in (None, texts))
    assert error(start, calibrated, texts) < 0.9 * error(start, plain, texts)


@pytest.mark.parametrize(
    "method", [Quantize(weights="int4", train=True), Quantize(scheme="nf4")], ids=["train", "scheme"]
)
def test_what_is_not_calibrated_is_as_without_and_said(model, method):
    if method.scheme:
        pytest.importorskip("bitsandbytes")
    plain, calibrated = variant(model, method), variant(model, method, texts=batches(model))
    assert_same(plain, calibrated)
    assert any("the same with a calibration as without" in note for note in calibrated.calibration_report.notes)


def assert_same(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# -- tables and tokens -------------------------------------------------------------------------------------------------------


def test_lookups_count_real_tokens(model):
    batch = batches(model)[0]
    statistics = CalibrationPass(model, model, [batch], Report(), lambda *_: None)
    with statistics.running():
        counts = statistics.lookups(list(token_tables(model, architecture_for(model))))
        output = statistics.output_moments()
    real = batch["input_ids"][batch["attention_mask"].bool()]
    if model.config.is_encoder_decoder:
        real = torch.cat([real, batch["decoder_input_ids"].flatten()])
    assert torch.equal(counts, torch.bincount(real, minlength=model.config.vocab_size))
    assert output.count == (160 if model.config.is_encoder_decoder else int(batch["attention_mask"].sum()))


def test_texts_follow_new_token_numbers(model):
    """After VocabularyTrimming, a later method is calibrated on the texts that have only kept tokens, with their new numbers."""
    kept = [token for token in range(model.config.vocab_size) if token != 5]
    texts = batches(model)
    trimmed = variant(model, VocabularyTrimming(keep=kept))
    cut = variant(model, VocabularyTrimming(keep=kept), LowRank(rank=4), texts=texts)
    rows = [[row for row in range(len(b["input_ids"])) if not any((b[k] == 5)[row].any() for k in b)] for b in texts]
    mine = [{k: v[at] - (v[at] > 5).long() for k, v in b.items()} for b, at in zip(texts, rows, strict=True) if at]
    assert_same(cut, variant(trimmed, LowRank(rank=4), texts=mine))
    assert cut.calibration_report.notes[0].startswith("vocabulary_trimming: is the same")
    with pytest.raises(ValueError, match="has a token that is not among the 3 kept ones"):
        samples_of(model, texts).renumbered([40, 41, 42])


def test_modules_without_values_do_not_run(model, monkeypatch):
    """Memory that nothing has been written to may hold anything."""
    convert = LowRank.convert

    def filled(self, old, new, statistics=None):
        for _, module in self.modules(new, new.architecture):
            for factor in (module.up, module.down):
                factor.data.fill_(torch.nan)
        convert(self, old, new, statistics)

    expected = variant(model, LowRank(rank=4), texts=batches(model))
    monkeypatch.setattr(LowRank, "convert", filled)
    assert_same(variant(model, LowRank(rank=4), texts=batches(model)), expected)
