"""The pass through a model: what it says that linears see is what they see, for every family, whatever way it takes."""

import copy
import functools
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.cases import plain
from support.models import native, perturbed
from support.moments import Seen
from support.small import small_config
from support.text import words
from tokenizers import processors
from transformers import AutoModel, PreTrainedConfig

from hf_freeze import analysis, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES, architecture_for
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import FactorizedEmbedding, FFNPruning, HeadPruning, LayerSelection, LayerSharing, LowRank
from hf_freeze.methods.base import Facts
from hf_freeze.model import calibrating, fitting, sums
from hf_freeze.model.calibrating import CalibrationPass, collect
from hf_freeze.model.calibration import Calibration, Report, calibrated_linears
from hf_freeze.model.calibrator import Calibrator
from hf_freeze.solvers.columns import refit
from hf_freeze.solvers.moments import best_dense

PADDED = ["bert", "gpt2", "llama", "marian", "t5", "mixtral"]  # texts of different lengths
OTHERS = ["vit", "whisper"]


@functools.cache
def model_of(model_type):
    if model_type in ARCHITECTURES:
        return native(plain(ARCHITECTURES[model_type]))
    torch.manual_seed(0)
    config = small_config(
        model_type, **({"num_hidden_layers": 3, "num_hidden_groups": 1} if model_type == "albert" else {})
    )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model = (
        AutoModel.from_config(config) if model_type in OTHERS else AUTO_CLASSES[task_of(model_type)].from_config(config)
    )
    return perturbed(model).eval()


@pytest.fixture
def tokens_alike(monkeypatch):
    """All tokens count alike, so that moments are plain means."""
    for module in (calibrating, sums):
        monkeypatch.setattr(module, "error_weights", lambda joined: joined.new_ones(len(joined), 1))


def task_of(model_type):
    return {"t5": "seq2seq-lm", "mixtral": "causal-lm", "albert": "masked-lm"}[model_type]


def rows_of(model, rows=6, seed=0):
    """Single texts without padding, of 3 to 8 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(3, model.config.vocab_size, (1, length), generator=generator)

    texts = []
    for row in range(rows):
        batch = {"input_ids": ids(3 + row % 6)}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids(3 + (2 * row) % 5)
        texts.append(batch)
    return texts


def padded(texts):
    """One batch of them."""
    batch = {}
    for name in texts[0]:
        width = max(text[name].shape[1] for text in texts)
        rows = [torch.nn.functional.pad(text[name][0], (0, width - text[name].shape[1])) for text in texts]
        batch[name] = torch.stack(rows)
        ones = [torch.arange(width) < text[name].shape[1] for text in texts]
        batch[name.replace("input_ids", "attention_mask")] = torch.stack(ones).long()
    return batch


def other_inputs(model):
    """Batches of pictures or sound, without padding."""
    batch = architecture_for(model).tiny_inputs("feature-extraction")
    return [batch, {name: value.flip(0) for name, value in batch.items()}]


def batches_of(model, model_type):
    return other_inputs(model) if model_type in OTHERS else [padded(rows_of(model)[:4]), padded(rows_of(model)[4:])]


def raw(model, batches, names):
    """name -> (inputs, outputs) of every call of the linear, all rows: (T, I), (T, O)"""
    seen = {}

    def keep(name):
        def hook(module, args, output):
            x, y = args[0].detach(), output.detach()
            seen.setdefault(name, []).append((x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])))

        return hook

    handles = [model.base_model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return {name: tuple(torch.cat(part).double() for part in zip(*calls, strict=True)) for name, calls in seen.items()}


def plain_linears(model):
    """Without those of experts, which have tests of their own."""
    return [name for name in calibrated_linears(model) if ".experts." not in name]


def joining(model):
    """The linears whose outputs are added to the stream of states: the last ones of attentions and FFNs."""
    architecture = architecture_for(model)
    outputs = {attention.o for attention in architecture.attentions(model.config).values()}
    return outputs | {linears[-1] for linears in architecture.ffns(model.config).values()}


def assert_moments(moments, x, y=None, *, weights=None, tolerance=1e-4):
    """`weights`: (T,) how much each token counts."""
    assert moments.count == len(x)
    weights = x.new_ones(len(x)) if weights is None else weights
    shares = (weights / weights.sum())[:, None]
    torch.testing.assert_close(moments.gram, x.T @ (shares * x), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moments.mean, (shares * x).sum(0), rtol=tolerance, atol=tolerance)
    if y is not None:
        torch.testing.assert_close(moments.cross, y.T @ (shares * x), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(moments.output_mean, (shares * y).sum(0), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(moments.output_square, (shares * y * y).sum(0), rtol=tolerance, atol=tolerance)


def walked(old, new, batches, *, streams=True):
    """All moments of a pass, and whether states went from layer to layer everywhere."""
    found, streamed = {}, set()
    statistics = CalibrationPass(old, new, batches, Report(), lambda *_: old)
    if not streams:
        statistics.streams.start = lambda stack: False
    with statistics.running():
        for moments in statistics.walk(plain_linears(old)):
            found |= moments
            streamed.add(statistics.streams.flow)
    return found, streamed == {True}


def texts_of(vocabulary, count=40, seed=0):
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(draw.randrange(3, 9))) for _ in range(count)]


# -- what linears see --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", PADDED + OTHERS)
def test_at_once(model_type):
    """The moments are those of texts that run alone, without padding."""
    model = model_of(model_type)
    calibration = collect(model, batches_of(model, model_type))
    alone = other_inputs(model) if model_type in OTHERS else rows_of(model)
    seen = raw(model, alone, plain_linears(model))
    assert {name for name in calibration.moments if ".experts." not in name} == seen.keys()
    for name, (x, _) in seen.items():
        assert_moments(calibration.moments[name], x)


@pytest.mark.parametrize("model_type", PADDED + OTHERS)
def test_layer_by_layer(model_type, tokens_alike):
    """With pairs: the outputs are those of the old model, the inputs those of the new one, with other weights in every layer.
    Outputs that join the stream of states have another test."""
    old, new = model_of(model_type), other_weights(model_of(model_type))
    batches = batches_of(old, model_type)
    moments, streamed = walked(old, new, batches)
    assert streamed
    alone = other_inputs(old) if model_type in OTHERS else rows_of(old)
    before, after = (raw(model, alone, plain_linears(old)) for model in (old, new))
    assert moments.keys() == before.keys()
    whole, _ = walked(old, new, batches, streams=False)
    for name in before:
        assert_moments(moments[name], after[name][0], None if name in joining(old) else before[name][1])
        assert_moments(whole[name], after[name][0], before[name][1])


@pytest.mark.parametrize(
    ("model_type", "norms"),
    [
        (
            "bert",
            {
                "encoder.layer.1.attention.output.": ("dense", "LayerNorm"),
                "encoder.layer.1.output.": ("dense", "LayerNorm"),
            },
        ),
        (
            "llama",
            {
                "layers.0.": ("self_attn.o_proj", "post_attention_layernorm"),
                "": ("layers.0.mlp.down_proj", "layers.1.input_layernorm"),
            },
        ),
    ],
)
def test_outputs_that_join_the_stream(model_type, norms):
    """They get what the stream lacks: with them, the norm that follows reads what it reads in the old model. Each token counts
    as in that norm."""
    old, new = model_of(model_type), other_weights(model_of(model_type))
    moments, _ = walked(old, new, [padded(rows_of(old))])
    for prefix, (linear, norm) in norms.items():
        x, y = wanted(old, new, rows_of(old), prefix + linear, prefix + norm)
        states = raw(old, rows_of(old), [prefix + norm])[prefix + norm][0]
        assert_moments(moments[prefix + linear], x, y, weights=1 / states.square().mean(-1))


def other_weights(model):
    new = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name in plain_linears(new):
            new.base_model.get_submodule(name).weight.mul_(1 + 0.1 * torch.randn(()))
    return new


def wanted(old, new, texts, linear, norm):
    """What a linear that joins the stream of the new model reads there, and what it should give, for the `norm` that follows."""
    (x, y), sums = raw(new, texts, [linear])[linear], [raw(model, texts, [norm])[norm][0] for model in (old, new)]
    return x, sums[0] - (sums[1] - y)


def test_what_is_solved_is_the_least_squares_on_raw_activations(tokens_alike):
    """`torch.linalg.lstsq` on the rows of both models finds the same weights and biases."""
    old = model_of("bert")
    new = copy.deepcopy(old)
    with torch.no_grad():
        new.base_model.get_submodule("encoder.layer.0.intermediate.dense").weight.mul_(0.9)
    texts = rows_of(old, rows=30)
    moments, _ = walked(old, new, [padded(texts)])
    name, kept = "encoder.layer.1.output.dense", [0, 2, 3, 7]
    x, y = wanted(old, new, texts, name, "encoder.layer.1.output.LayerNorm")
    linear = old.base_model.get_submodule(name)
    seen = Seen(linear.weight.detach().double(), linear.bias.detach().double(), x, y, moments[name])
    for solved, expected in (
        (best_dense(linear.weight.detach().double(), seen.bias, moments[name]), seen.lstsq()),
        (refit(linear.weight.detach().double(), seen.bias, moments[name], kept), seen.lstsq(kept)),
    ):
        for one, other in zip(solved, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "marian"])
def test_size_and_order_of_batches_do_not_matter(model_type):
    model = model_of(model_type)
    texts = rows_of(model)
    expected = collect(model, [padded(texts)]).moments
    for batches in ([padded(texts[::-1])], [padded(texts[i : i + 1]) for i in (3, 1, 0, 5, 4, 2)]):
        for name, each in collect(model, batches).moments.items():
            assert each.count == expected[name].count
            torch.testing.assert_close(each.gram, expected[name].gram, rtol=1e-5, atol=1e-5)


def test_the_keys_of_a_cross_attention_are_tokens_of_the_source():
    """Both sides have as many columns, and differ in their padding."""
    model = model_of("marian")
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "decoder_input_ids": torch.tensor([[0, 5, 0, 0], [0, 6, 7, 8]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    }
    counts = {name: each.count for name, each in collect(model, [batch]).moments.items()}
    assert counts["decoder.layers.1.encoder_attn.k_proj"] == counts["encoder.layers.1.fc1"] == 6
    assert counts["decoder.layers.1.encoder_attn.q_proj"] == counts["decoder.layers.1.fc1"] == 5


def test_layers_that_share_weights():
    """A layer that runs several times sees the inputs of all its runs."""
    model = model_of("albert")
    names, texts = calibrated_linears(model), rows_of(model)
    seen = raw(model, texts, names)
    counts = {name: len(x) for name, (x, _) in seen.items()}
    assert set(counts.values()) == {3 * sum(text["input_ids"].shape[1] for text in texts)}
    kept, (moments, streamed) = collect(model, [padded(texts)]).moments, walked(model, model, [padded(texts)])
    assert not streamed
    for name, (x, y) in seen.items():
        assert_moments(kept[name], x)
        assert_moments(moments[name], x, y)
    shared = make_variant(model_of("llama"), [LayerSharing()])
    report = make_variant(shared, [LowRank(rank=3)], calibration=[padded(rows_of(shared))]).calibration_report
    assert report.errors


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_errors_that_are_reported_are_those_of_raw_outputs(model_type, monkeypatch):
    """Of the new model against the old one, so they hold what earlier layers have lost; before layers are fitted."""
    monkeypatch.setattr(fitting, "descend", lambda *args: None)
    model = model_of(model_type)
    method = LowRank(rank=4, components=["ffn", "attention"])
    made = make_variant(model, [method], calibration=[padded(rows_of(model))])
    names = [name for name in calibrated_linears(model) if name not in joining(model)]
    before, after = (raw(each, rows_of(model), names) for each in (model, made))
    for name in names:
        (_, y), (_, new) = before[name], after[name]
        assert made.calibration_report.errors[name][1] == pytest.approx(
            float((y - new).square().sum() / y.square().sum()), rel=1e-2
        )


# -- layers that are fitted --------------------------------------------------------------------------------------------------


def ends(model, batches, layer):
    """(T, H): what leaves a layer, in all rows."""
    found = []
    handle = model.base_model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: found.append(output if torch.is_tensor(output) else output[0])
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


@pytest.mark.parametrize(("model_type", "layer"), [("bert", "encoder.layer.1"), ("llama", "layers.1")])
@pytest.mark.parametrize("method", [FFNPruning(width=8), HeadPruning(share=0.5), LowRank(rank=4)], ids=lambda m: m.name)
def test_a_layer_that_is_fitted_is_nearer_than_by_least_squares_on_raw_activations(
    model_type, layer, method, monkeypatch
):
    """Least squares alone: the other weights as they were, and the last matrix by lstsq, which is what `refit` gives."""
    model, batches = model_of(model_type), [padded(rows_of(model_of(model_type), 200))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    fitted = make_variant(model, [method], calibration=batches)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "descend", lambda *args: None)
        refitted = make_variant(model, [method], calibration=batches)
    alone = rows_of(model, 200)
    wanted, one, other = (ends(each, alone, layer) for each in (model, fitted, refitted))
    weights = 1 / wanted.square().mean(-1, keepdim=True)
    errors = [float((weights * (each - wanted).square()).sum()) for each in (one, other)]
    assert errors[0] < 0.98 * errors[1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in fitted.parameters())
    again = make_variant(model, [method], calibration=batches)
    assert all(torch.equal(value, fitted.state_dict()[name]) for name, value in again.state_dict().items())


def test_weights_that_were_not_cut_are_not_fitted():
    model = model_of("llama")
    made = make_variant(model, [FFNPruning(width=8)], calibration=[padded(rows_of(model, 200))]).state_dict()
    kept = [name for name in made if "self_attn" in name or "norm" in name or "embed" in name]
    assert kept
    assert all(torch.equal(made[name], model.state_dict()[name]) for name in kept)


def test_too_few_texts_to_fit_a_layer():
    model = model_of("llama")
    with pytest.warns(UserWarning, match="few tokens"):
        made = make_variant(model, [FFNPruning(width=16)], calibration=[padded(rows_of(model, 1))])
    assert "fewer values than weights in a layer: its weights were not fitted together" in made.calibration_report.notes


# -- samples -----------------------------------------------------------------------------------------------------------------


def test_labels_are_dropped():
    model = model_of("llama")
    batch = padded(rows_of(model))
    with_labels = batch | {"labels": torch.full_like(batch["input_ids"], 10**6)}  # no forward could use these
    made = [make_variant(model, [FFNPruning(width=8)], calibration=[each]) for each in (batch, with_labels)]
    for name, value in made[0].state_dict().items():
        assert torch.equal(value, made[1].state_dict()[name])


def test_targets_without_a_decoder_mask():
    """Of labels, -100 is padding."""
    model = model_of("marian")
    labels = torch.tensor([[5, 6, 1, -100], [7, 1, -100, -100]])
    batch = {"input_ids": torch.tensor([[5, 1], [6, 1]]), "attention_mask": torch.ones(2, 2).long(), "labels": labels}
    moments = collect(model, [batch]).moments
    assert moments["decoder.layers.0.fc1"].count == 5
    assert moments["encoder.layers.0.fc1"].count == 4


def test_texts_longer_than_the_positions_of_a_decoder():
    model = model_of("marian")
    calibration = collect(model, [" ".join(["w5"] * 40)], words(model.config.vocab_size))
    assert 0 < calibration.moments["decoder.layers.0.fc1"].count < model.config.max_position_embeddings


# -- kept --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert():
    return model_of("bert")


@pytest.fixture(scope="module")
def kept(bert):
    return collect(bert, texts_of(bert.config.vocab_size), words(bert.config.vocab_size))


def test_a_saved_calibration_is_the_same(bert, kept, tmp_path):
    loaded = Calibration.load(kept.save(tmp_path / "kept.safetensors"))
    loaded.check(bert)
    assert str(loaded) == str(kept) == "Calibration of 12 linears of a bert, on 40 texts with 337 tokens"
    methods = [FFNPruning(width=8), HeadPruning(share=0.5)]
    one, other = (make_variant(bert, methods, calibration=each) for each in (kept, loaded))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert (one.calibration_report.texts, one.calibration_report.tokens) == (40, 337)
    q, k, v = (loaded.moments[f"encoder.layer.0.attention.self.{name}"] for name in ("query", "key", "value"))
    assert q is k is v
    stored = (tmp_path / "kept.safetensors").stat().st_size
    assert stored < 2 * 8 * sum(each.gram.numel() for each in {id(m): m for m in loaded.moments.values()}.values())


def test_a_saved_calibration_is_worth_its_texts(bert, kept):
    """Without pairs, but far better than none."""
    texts, tokenizer = texts_of(bert.config.vocab_size, seed=1), words(bert.config.vocab_size)
    made = {
        name: make_variant(bert, [FFNPruning(width=8)], calibration=each, tokenizer=tokenizer)
        for name, each in (("none", None), ("kept", kept), ("texts", texts_of(bert.config.vocab_size)))
    }
    errors = {name: analysis.fidelity(bert, each, texts, tokenizer).error for name, each in made.items()}
    assert errors["kept"] < errors["none"] / 3
    assert errors["texts"] < errors["none"] / 3


def test_half_precision_is_the_same_model(bert, kept):
    kept.check(copy.deepcopy(bert).bfloat16())


def test_linears_of_another_width_are_converted_as_without(bert, kept):
    methods = [FFNPruning(width=8), LowRank(rank=3)]
    with pytest.warns(
        UserWarning, match=r"has nothing for linears .* the first is 'encoder.layer.0.output.dense'"
    ) as seen:
        made = make_variant(bert, methods, calibration=kept)
    assert len(seen) == 1
    assert len(made.calibration_report.notes) == 1
    assert "encoder.layer.1.intermediate.dense" in made.calibration_report.errors


def test_frequencies_of_tokens_are_not_kept():
    model = model_of("llama")
    texts, tokenizer = texts_of(model.config.vocab_size), words(model.config.vocab_size)
    made = make_variant(model, [FactorizedEmbedding(rank=8)], calibration=collect(model, texts, tokenizer))
    without = make_variant(model, [FactorizedEmbedding(rank=8)])
    errors = [analysis.fidelity(model, each, texts, tokenizer).error for each in (made, without)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_after_layers_were_renumbered_nothing_is_used(bert, kept):
    """The second layer would get what the first one has seen."""
    methods = [LayerSelection(keep={"encoder": [1]}), LowRank(rank=3)]
    with pytest.warns(UserWarning, match="has nothing for linears"):
        made = make_variant(bert, methods, calibration=kept)
    without = make_variant(bert, methods)
    assert all(torch.equal(value, without.state_dict()[name]) for name, value in made.state_dict().items())


def test_a_calibration_of_another_model(bert, kept):
    with pytest.raises(ValueError, match="this calibration is of a bert, but the model is a llama"):
        make_variant(model_of("llama"), [LowRank(rank=3)], calibration=kept)
    other = copy.deepcopy(bert)
    with torch.no_grad():
        other.bert.encoder.layer[1].output.dense.weight.mul_(1.001)
    message = (
        "another bert of the same sizes: the weights of 'encoder.layer.1.output.dense' differ, and those of 0 other"
    )
    with pytest.raises(ValueError, match=message):
        make_variant(other, [LowRank(rank=3)], calibration=kept)
    narrower = make_variant(bert, [FFNPruning(width=8)])
    message = (
        r"'encoder.layer.0.intermediate.dense' has \(\d+, 16\) outputs and inputs there, but \(8, 16\) in the model"
    )
    with pytest.raises(ValueError, match=message):
        make_variant(narrower, [LowRank(rank=3)], calibration=kept)
    shallower = make_variant(bert, [LayerSelection(keep={"encoder": [1]})])
    with pytest.raises(ValueError, match=r"only the calibration has a linear 'encoder\.layer\.1"):
        analysis.cut_losses(shallower, kept)


def test_a_file_that_is_no_calibration(bert, tmp_path):
    (tmp_path / "text").write_text("text")
    bert.save_pretrained(tmp_path)
    for name in ("text", "model.safetensors"):
        with pytest.raises(ValueError, match=rf"{name} is no calibration: "):
            Calibration.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "nothing")


# -- what is said ------------------------------------------------------------------------------------------------------------


def test_texts_that_cannot_be_used(bert):
    tokenizer = words(bert.config.vocab_size)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")  # no </s>
    for texts, message in (
        ([], "calibration is empty: give some hundred texts"),
        ([""], "no text of calibration has a token"),
        ("texts.txt", "calibration='texts.txt': give a list of texts, batches, or 'samples'"),
        ("samples", "calibration='samples' needs a causal language model, not a BertFor"),
        ([3], "a text of calibration is a str, a pair or a chat, not a int"),
        ({"input_ids": torch.ones(1, 1)}, "calibration must be texts or batches, not a dict"),
        ([{"labels": 3}], "a batch of calibration is a dict of tensors for the forward, not dict"),
    ):
        with pytest.raises(ValueError, match=message):
            make_variant(bert, [LowRank(rank=3)], calibration=texts, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="calibration with texts needs tokenizer="):
        make_variant(bert, [LowRank(rank=3)], calibration=["w3"])
    larger = words(bert.config.vocab_size + 5)
    with pytest.raises(
        ValueError, match=r"the tokenizer is not that of the model: sentence 0 holds token id \d+, outside"
    ):
        make_variant(bert, [LowRank(rank=3)], calibration=[f"w{bert.config.vocab_size + 2}"], tokenizer=larger)


def test_a_config_has_no_weights(bert):
    assert isinstance(bert.config, PreTrainedConfig)
    with pytest.raises(ValueError, match="calibration= is for trained weights, but the backbone is a config"):
        make_variant(bert.config, [LowRank(rank=3)], task="masked-lm", calibration=["w3"])


def test_too_few_tokens_are_said_once(bert):
    tokenizer = words(bert.config.vocab_size)
    with pytest.warns(
        UserWarning, match=r"has 16 inputs and has seen 5 tokens .* at least 24 tokens, better 240"
    ) as seen:
        make_variant(bert, [LowRank(rank=3), FFNPruning(width=8)], calibration=["w5 w6 w7 w8"], tokenizer=tokenizer)
    assert len(seen) == 1


def test_enough_tokens_are_no_warning(bert):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts, tokenizer = texts_of(bert.config.vocab_size), words(bert.config.vocab_size)
        made = make_variant(bert, [LowRank(rank=3)], calibration=texts, tokenizer=tokenizer)
    assert made.calibration_report.errors


@pytest.mark.parametrize(
    "use",
    [lambda model, batches: make_variant(model, [LowRank(rank=3)], calibration=batches), collect],
    ids=["pass", "at once"],
)
def test_activations_that_are_not_finite_name_their_linear(use, bert):
    model = copy.deepcopy(bert)
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.bias[3] = float("nan")
    message = r"outputs of 'encoder.layer.0.\w+.dense' (cannot be used: gram has \d+ values|are not finite)"
    with pytest.raises(ValueError, match=message):
        use(model, [padded(rows_of(model))])


def test_a_method_that_is_the_same_with_a_calibration_says_so_once(bert):
    plain = SimpleNamespace(name="plain", facts=Facts(), convert=lambda old, new: None, part=lambda kind: None)
    calibrator = Calibrator(bert, [padded(rows_of(bert))], None, lambda *_: bert)
    for _ in range(2):
        calibrator.convert(plain, bert, bert)
    assert calibrator.report.notes == ["plain: is the same with a calibration as without"]


def test_a_reloaded_variant_knows_how_much_it_was_calibrated_with(bert, kept, tmp_path):
    make_variant(bert, [FFNPruning(width=8)], calibration=kept).save_pretrained(tmp_path)
    config = AutoModel.from_pretrained(tmp_path).config
    assert config.calibration == {"texts": 40, "tokens": 337}
    assert make_variant(bert, [FFNPruning(width=8)]).config.to_dict().get("calibration") is None
    with pytest.raises(ValueError, match=r"calibration must be .* not \{'texts': '40'\}"):
        type(config).from_dict(config.to_dict() | {"calibration": {"texts": "40"}})
