"""FFNPruning: which neurons it keeps, that the others count nothing, and what it merges to."""

import copy
import warnings

import pytest
import torch
from support.cases import BASELINES
from support.models import build, differences, native, outputs
from support.parametrize import by_turns
from support.small import small_config
from support.training import training_step
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.methods import FFNPruning, Freeze, LowRank, MagnitudePruning, TensorTrain, VariationalDropout
from hf_freeze.methods.registry import method_from_dict, method_to_dict

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])
MARIAN = next(case for case in BASELINES if case.architecture.model_type == "marian")
WIDTH = 24


def matrix(linear):
    """(outputs, inputs) of an nn.Linear or a Conv1D."""
    return (linear.weight.T if isinstance(linear, Conv1D) else linear.weight).detach()


def largest(backbone, linears, width):
    """The neurons of the largest product of norms, one by one; a gated FFN has two input matrices."""
    *before, after = (matrix(backbone.base_model.get_submodule(name)) for name in linears)
    scores = []
    for neuron in range(after.shape[1]):
        score = float(after[:, neuron].square().sum()) ** 0.5
        for weight in before:
            score *= float(weight[neuron].square().sum()) ** 0.5
        scores.append((score, neuron))
    return sorted(neuron for _, neuron in sorted(scores, reverse=True)[:width])


def kept_of(backbone, method, architecture):
    """FFN -> the neurons that are to be kept."""
    found = {}
    for block, linears in architecture.ffns(backbone.config).items():
        stack, layer, _ = block.split(".")
        if method.keep is not None:
            found[block] = method.keep.get(block, list(range(WIDTH)))
        elif method.layers is None or int(layer) in method.layers.get(stack, []):
            found[block] = largest(backbone, linears, method.width)
        else:
            found[block] = list(range(WIDTH))
    return found


def zeroed(backbone, kept, architecture):
    """The backbone, whose FFNs lose what the neurons that are not kept give to the last linear."""

    def hide(neurons):
        mask = torch.zeros(WIDTH).index_fill(0, torch.tensor(neurons), 1.0)
        return lambda module, arguments: (arguments[0] * mask, *arguments[1:])

    for block, linears in architecture.ffns(backbone.config).items():
        backbone.base_model.get_submodule(linears[-1]).register_forward_pre_hook(hide(kept[block]))
    return backbone


def settings(case):
    stack = next(iter(case.architecture.stacks))
    return {
        "width": FFNPruning(width=13),
        "one neuron": FFNPruning(width=1),
        "all neurons": FFNPruning(width=WIDTH),
        "layers": FFNPruning(width=9, layers={stack: [1]}),
        "keep": FFNPruning(keep={f"{stack}.0.ffn": [0, 3, 23], f"{stack}.1.ffn": [1, 2, 3, 5, 8, 13, 21]}),
        "keep in one layer": FFNPruning(keep={f"{stack}.1.ffn": [7]}),
    }


every_setting = pytest.mark.parametrize("setting", list(settings(MARIAN)))


@every_backbone
@every_setting
def test_it_computes_what_the_dense_model_does_without_those_neurons(case, setting):
    method = settings(case)[setting]
    backbone = native(case)
    model = make_variant(backbone, [method]).eval()
    kept = kept_of(backbone, method, case.architecture)
    for block, linears in case.architecture.ffns(backbone.config).items():
        for name in linears:
            old, new = backbone.base_model.get_submodule(name), model.base_model.get_submodule(name)
            assert type(new) is type(old)
            last = name == linears[-1]
            expected = matrix(old)[:, kept[block]] if last else matrix(old)[kept[block]]
            assert torch.equal(matrix(new), expected), name
            if old.bias is not None:
                assert torch.equal(new.bias, old.bias if last else old.bias[kept[block]]), name
    expected = outputs(zeroed(native(case), kept, case.architecture), case.batch())
    assert differences(outputs(model, case.batch()), expected, 1e-5) == []


@by_turns(every_setting, every_backbone)
def test_merged_it_is_native_and_as_narrow_as_it_can_be(case, setting, tmp_path):
    method = settings(case)[setting]
    model = make_variant(native(case), [method]).eval()
    merged = model.merge()
    assert type(merged) is case.native_class
    widths = {}  # config field -> widths of its FFNs
    for block, neurons in kept_of(native(case), method, case.architecture).items():
        widths.setdefault(case.architecture.stacks[block.split(".")[0]].width, set()).add(len(neurons))
    for field, found in widths.items():
        assert getattr(merged.config, field) == max(found)
    merged.save_pretrained(tmp_path)
    reopened = case.native_class.from_pretrained(tmp_path)
    for one in (merged, reopened):
        assert differences(outputs(one, case.batch()), outputs(model, case.batch()), 1e-5) == []
    if all(len(found) == 1 for found in widths.values()):  # nothing is padded
        assert count_parameters(merged).total == count_parameters(model).total
    again = make_variant(merged, [])
    assert differences(outputs(again, case.batch()), outputs(model, case.batch()), 1e-5) == []
    training_step(model, case.batch())
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch()), 1e-5) == []


def test_a_width_that_another_module_has_too_stays_as_it_is():
    """SigLIP pools its images with an FFN that is as wide as those in layers, by the same field of the config."""
    torch.manual_seed(0)
    backbone = AutoModel.from_config(small_config("siglip")).eval()
    variant = make_variant(backbone, [FFNPruning(width=WIDTH)]).eval()
    batch = variant.architecture.tiny_inputs("feature-extraction")
    merged = variant.merge()
    assert merged.config.vision_config.intermediate_size == backbone.config.vision_config.intermediate_size
    assert merged.config.text_config.intermediate_size == WIDTH
    with torch.no_grad():
        expected, actual = variant(**batch).logits_per_text, merged(**batch).logits_per_text
    assert torch.allclose(actual, expected, atol=1e-5)


def test_encoder_and_decoder_have_widths_of_their_own():
    merged = make_variant(native(MARIAN), [FFNPruning(width=5, layers={"encoder": [0, 1]})]).merge()
    assert (merged.config.encoder_ffn_dim, merged.config.decoder_ffn_dim) == (5, WIDTH)


@every_backbone
def test_it_costs_less(case):
    dense, pruned = build(case), make_variant(native(case), [FFNPruning(width=12)])
    forward = [multiply_adds(model, length=8).by_component["ffn"].forward for model in (dense, pruned)]
    assert forward[1] == forward[0] / 2


def test_equal_neurons_are_kept_from_the_first():
    backbone = native(MARIAN)
    for name in ("encoder.layers.0.fc1", "encoder.layers.0.fc2"):
        torch.nn.init.ones_(backbone.base_model.get_submodule(name).weight)
    backbone.base_model.get_submodule("encoder.layers.0.fc1").bias.data = torch.arange(WIDTH).float()
    model = make_variant(backbone, [FFNPruning(width=3)])
    assert model.base_model.get_submodule("encoder.layers.0.fc1").bias.tolist() == [0, 1, 2]


def test_neurons_are_picked_after_what_came_before():
    """Widths may shrink in turn; a linear that another method changes later is found."""
    case = MARIAN
    first = make_variant(native(case), [FFNPruning(width=13)])
    both = make_variant(native(case), [FFNPruning(width=13), FFNPruning(width=6)])
    assert (
        differences(outputs(make_variant(first, [FFNPruning(width=6)]), case.batch()), outputs(both, case.batch()))
        == []
    )
    at_once = make_variant(native(case), [FFNPruning(width=6)])
    assert differences(outputs(both, case.batch()), outputs(at_once, case.batch()), 1e-6) == []
    factors = make_variant(native(case), [FFNPruning(width=9, layers={"encoder": [0]}), LowRank(rank=4)])
    assert differences(outputs(factors.merge(), case.batch()), outputs(factors, case.batch()), 1e-5) == []


@every_backbone
def test_saved_it_opens_without_looking_at_weights(case, tmp_path):
    model = make_variant(native(case), [settings(case)["keep"]]).eval()
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    again = case.auto_class.from_pretrained(tmp_path)
    assert differences(outputs(again, case.batch()), outputs(model, case.batch())) == []
    method = settings(case)["keep"]
    assert method_from_dict(method_to_dict(method)) == method


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"FFNPruning\(width=None, keep=None, expert_width=None, share=None\): give one of them"),
        ({"width": 3, "keep": {"encoder.0.ffn": [0]}}, r"FFNPruning\(width=3, keep=.*\): give one of them"),
        ({"width": 0}, r"FFNPruning\(width=0\): must be an integer of at least 1"),
        ({"width": -2}, r"FFNPruning\(width=-2"),
        ({"width": True}, r"FFNPruning\(width=True"),
        ({"width": 2.0}, r"FFNPruning\(width=2\.0"),
        ({"width": "8"}, r"FFNPruning\(width='8'"),
        ({"width": 3, "layers": [0]}, r"layers=\[0\]: must be None or a dict"),
        ({"keep": {}}, r"FFNPruning\(keep=\{\}\): must be a dict such as"),
        ({"keep": [0, 1]}, r"FFNPruning\(keep=\[0, 1\]\): must be a dict such as"),
        ({"keep": {"encoder.0.ffn": []}}, r"keep=\{'encoder.0.ffn': \[\]\}\): must be a list of different neurons"),
        ({"keep": {"encoder.0.ffn": 3}}, "must be a list of different neurons"),
        (
            {"keep": {"encoder.0.ffn": [0, 0]}},
            r"\[0, 0\].*must be a list of different neurons, at least one, in ascending order",
        ),
        ({"keep": {"encoder.0.ffn": [2, 1]}}, "in ascending order"),
        ({"keep": {"encoder.0.ffn": [-1, 1]}}, "must be a list of different neurons"),
        ({"keep": {"encoder.0.ffn": [True]}}, "must be a list of different neurons"),
        ({"keep": {"encoder.0.ffn": [1.0]}}, "must be a list of different neurons"),
        ({"keep": {"encoder.0.ffn": [0]}, "layers": {"encoder": [0]}}, "keep names the FFNs already"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FFNPruning(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 25}, r"FFNPruning\(width=25\) of 'encoder\.0\.ffn': must be in 1\.\.24"),
        ({"width": 2**63}, r"FFNPruning\(width=9223372036854775808\) of 'encoder\.0\.ffn': must be in 1\.\.24"),
        ({"keep": {"encoder.1.ffn": [3, 24]}}, r"FFNPruning: neuron 24 of 'encoder\.1\.ffn': must be in 0\.\.23"),
        (
            {"keep": {"encoder.2.ffn": [0]}},
            r"FFNPruning: no FFN 'encoder\.2\.ffn' in marian; choose from \['encoder\.0",
        ),
        ({"keep": {"ffn": [0]}}, "FFNPruning: no FFN 'ffn'"),
        ({"width": 3, "layers": {"encoder": [2]}}, r"no layer 2 in stack 'encoder' of marian: it has layers 0\.\.1"),
        ({"width": 3, "layers": {"body": [0]}}, "no stack 'body' in marian; choose from"),
        ({"width": 3, "layers": {"encoder": []}}, r"FFNPruning\(layers=\{'encoder': \[\]\}\) names no layer"),
    ],
)
def test_a_setting_that_does_not_fit_the_backbone_is_refused(arguments, message):
    for backbone in (native(MARIAN), native(MARIAN).config):
        with pytest.raises(ValueError, match=message):
            make_variant(backbone, [FFNPruning(**arguments)], task="seq2seq-lm")


def test_to_keep_all_neurons_is_said():
    width = native(MARIAN).config.encoder_ffn_dim
    with pytest.warns(
        UserWarning, match=rf"FFNPruning\(width={width}.* keeps all neurons of its FFNs: nothing is removed"
    ):
        make_variant(native(MARIAN), [FFNPruning(width=width)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_variant(native(MARIAN), [FFNPruning(keep={"encoder.0.ffn": list(range(width - 1))})])


def test_neurons_of_a_random_ffn():
    random, pruning = Freeze(ffn="random", seed=3), FFNPruning(width=13)
    merged = make_variant(native(MARIAN), [random]).merge()
    for allowed in ([pruning, random], [Freeze(attention="random"), pruning], [Freeze(ffn="frozen"), pruning]):
        assert (
            make_variant(copy.deepcopy(merged), allowed).get_submodule("model.encoder.layers.0.fc1").out_features == 13
        )
    # The other way round, what is left of the FFN is random.
    later = make_variant(native(MARIAN), [pruning, random])
    assert "model.encoder.layers.0.fc1.weight" in later.seeded_tensors
    assert later.get_parameter("model.encoder.layers.0.fc1.weight").shape == (13, 16)


@pytest.mark.parametrize(
    "earlier", [TensorTrain(rank=2), MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=9)]
)
def test_an_ffn_that_another_method_has_changed_is_refused(earlier):
    message = r"method 'ffn_pruning': 'encoder\.layers\.0\.fc1' is a \w+ already.*put 'ffn_pruning' before that method"
    with pytest.raises(ValueError, match=message):
        make_variant(native(MARIAN), [earlier, FFNPruning(width=13)])
    model = make_variant(native(MARIAN), [earlier])
    with pytest.raises(ValueError, match=message):
        make_variant(model, [FFNPruning(width=13)])
    if model.finalizable:
        model.finalize()
        with pytest.raises(ValueError, match=message):
            make_variant(model, [FFNPruning(width=13)])
    assert isinstance(make_variant(model.merge(), [FFNPruning(width=13)]), type(native(MARIAN)))


def test_a_config_that_was_changed_is_refused(tmp_path):
    make_variant(native(MARIAN), [FFNPruning(width=13)]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"width": 13', '"width": 14'))
    with pytest.raises((ValueError, RuntimeError), match=r"mismatch|size|shape"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
