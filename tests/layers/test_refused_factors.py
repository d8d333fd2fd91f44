"""Shapes of factors, and settings of the methods that are refused."""

import json
import math

import pytest
import torch
from support.factors import Largest
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.shapes import balanced_modes, mode_count, modes_of
from hf_freeze.methods.registry import method_from_dict

# -- shapes ------------------------------------------------------------------------------------------------------------------


def test_balanced_factors():
    for number in (*range(2, 400), 512, 768, 1000, 1024, 2048, 3072, 4096, 11_008):
        for count in (2, 3, 4, 5):
            modes = balanced_modes(number, count)
            assert math.prod(modes) == number
            assert len(modes) == count
            assert modes == sorted(modes)
    assert balanced_modes(512, 5) == [2, 4, 4, 4, 4]
    assert balanced_modes(768, 4) == [4, 4, 6, 8]
    assert balanced_modes(2048, 4) == [4, 8, 8, 8]


@pytest.mark.parametrize(
    ("inputs", "outputs", "count"), [(512, 2048, 4), (16, 24, 2), (768, 3072, 5), (6, 4096, 2), (9, 9, 2)]
)
def test_factors_fit_both_dimensions(inputs, outputs, count):
    in_modes, out_modes = modes_of(inputs, outputs, None)
    assert (math.prod(in_modes), math.prod(out_modes)) == (inputs, outputs)
    assert len(in_modes) == len(out_modes) == mode_count(inputs, outputs) == count
    assert modes_of(outputs, inputs, None) == (out_modes, in_modes)
    assert min(*in_modes, *out_modes) > 1


@pytest.mark.parametrize(
    ("prime", "below", "above"), [(509, 504, 512), (17, 16, 18), (2, 4, 4), (3, 4, 4), (5, 4, 6), (97, 96, 98)]
)
def test_a_prime_is_refused(prime, below, above):
    message = f"^{prime} is prime: .* the nearest good sizes are {below} and {above}$"
    for inputs, outputs in ((prime, 64), (64, prime)):
        with pytest.raises(ValueError, match=message):
            modes_of(inputs, outputs, None)


def test_a_shape_serves_both_directions():
    shape = ((2, 8), (8, 4))
    assert modes_of(16, 32, shape) == ((2, 8), (8, 4))
    assert modes_of(32, 16, shape) == ((8, 4), (2, 8))
    assert modes_of(16, 16, shape) == ((2, 8), (2, 8))  # a square matrix: the list of its size, twice
    assert modes_of(16, 16, ((2, 8), (4, 4))) == ((2, 8), (4, 4))  # both fit: inputs, outputs
    for sizes, wrong in (((16, 33), "33 outputs"), ((15, 32), "15 inputs")):
        with pytest.raises(ValueError, match=rf"the products \[16, 32\], but the linear has {wrong}"):
            modes_of(*sizes, shape)


# -- bad input ---------------------------------------------------------------------------------------------------------------


def marian(**changes):
    torch.manual_seed(3)
    return MarianMTModel(MarianConfig(**ARCHITECTURES["marian"].tiny | changes)).eval()  # d_model 16, 24 neurons


FC1 = "encoder.layers.0.fc1"
BAD = {
    "rank 0": ({"method": "low_rank", "rank": 0}, r"LowRank\(rank=0\): must be an integer of at least 1"),
    "rank True": ({"method": "low_rank", "rank": True}, r"rank=True\): must be an integer"),
    "rank of text": ({"method": "low_rank", "rank": "4"}, r"rank='4'\): must be an integer"),
    "no rank": ({"method": "low_rank"}, r"low_rank.*rank"),
    "rank above full": ({"method": "low_rank", "rank": 17}, r"rank=17: must be in 1..16 for 16 inputs and 24 outputs"),
    "rank of a linear": (
        {"method": "low_rank", "rank": {FC1: 99}},
        rf"method 'low_rank', '{FC1}': rank=99: must be in 1..16",
    ),
    "no ranks": ({"method": "low_rank", "rank": {}}, r"LowRank\(rank={}\) names no linear"),
    "unknown linear": (
        {"method": "low_rank", "rank": {"encoder.layers.7.fc1": 2}},
        r"LowRank: no linear 'encoder.layers.7.fc1' in these components and layers; choose from \['encoder.layers.0.fc1'",
    ),
    "linear of another component": (
        {"method": "tucker", "ranks": {"encoder.layers.0.self_attn.q_proj": [2, 2, 2, 2]}},
        r"Tucker: no linear 'encoder.layers.0.self_attn.q_proj' in these components and layers",
    ),
    "linear of another layer": (
        {"method": "tensor_train", "ranks": {FC1: [1, 2, 1]}, "layers": {"decoder": [0]}},
        rf"TensorTrain: no linear '{FC1}' in these components and layers; choose from \['decoder.layers.0.fc1'",
    ),
    "tt rank 0": ({"method": "tensor_train", "rank": 0}, r"TensorTrain\(rank=0\): must be an integer of at least 1"),
    "tucker rank 0": ({"method": "tucker", "rank": 0}, r"Tucker\(rank=0\): must be an integer of at least 1"),
    "tt rank above full": (
        {"method": "tensor_train", "rank": 17},
        rf"method 'tensor_train', '{FC1}': rank=17: must be in 1..16, the largest full rank of \[1, 16, 1\]",
    ),
    "tucker rank above full": ({"method": "tucker", "rank": 7}, r"rank=7: must be in 1..6, the largest full rank of"),
    "tt ranks too many": (
        {"method": "tensor_train", "ranks": [1, 2, 2, 1]},
        r"ranks=\[1, 2, 2, 1\]: 2 cores need 3 ranks, the first and last 1",
    ),
    "tucker ranks too few": (
        {"method": "tucker", "ranks": [2, 2, 2]},
        r"ranks=\[2, 2, 2\]: the 4 modes \[4, 4, 4, 6\] need one rank each",
    ),
    "tt ranks above full": (
        {"method": "tensor_train", "ranks": [1, 17, 1]},
        r"ranks=\[1, 17, 1\]: rank 1 is 17, but must be in 1..16, its full rank",
    ),
    "tt ranks not from 1": (
        {"method": "tensor_train", "ranks": [2, 2, 1]},
        r"rank 0 is 2, but must be in 1..1, its full",
    ),
    "tt ranks that do not follow": (
        {"method": "tensor_train", "ranks": [1, 1, 13, 1, 1], "shape": [[2, 2, 2, 2], [2, 3, 2, 2]]},
        r"rank 2 is 13, but must be at most 6: the previous rank 1 times the modes 2 and 3",
    ),
    "tucker ranks above full": (
        {"method": "tucker", "ranks": [2, 5, 2, 2]},
        r"ranks=\[2, 5, 2, 2\]: rank 1 is 5, but must be in 1..4, its mode",
    ),
    "a rank of 0 in ranks": (
        {"method": "tucker", "ranks": [2, 0, 2, 2]},
        r"Tucker\(ranks\[1\]=0\): must be an integer",
    ),
    "ranks no list": ({"method": "tucker", "ranks": 3}, r"Tucker\(ranks=3\): must be a list of integers"),
    "ranks of a linear": (
        {"method": "tensor_train", "ranks": {FC1: [1, 2, 2, 1]}},
        rf"method 'tensor_train', '{FC1}': ranks=\[1, 2, 2, 1\]: 2 cores need 3 ranks",
    ),
    "ranks of no linear": ({"method": "tucker", "ranks": {}}, r"Tucker\(ranks={}\) names no linear"),
    "rank and ranks": (
        {"method": "tucker", "rank": 2, "ranks": [2, 2, 2, 2]},
        r"Tucker\(rank=2, ranks=\[.*\): give one",
    ),
    "neither": ({"method": "tensor_train"}, r"TensorTrain\(rank=None, ranks=None\): give one of them"),
    "wrong product": (
        {"method": "tensor_train", "rank": 2, "shape": [[4, 4], [5, 5]]},
        rf"'{FC1}': shape=\[\[4, 4\], \[5, 5\]\] has the products \[16, 25\], but the linear has 24 outputs",
    ),
    "shape of one": (
        {"method": "tucker", "rank": 2, "shape": [[4, 4]]},
        r"Tucker\(shape=\[\[4, 4\]\]\): must be two lists",
    ),
    "shape with 0": (
        {"method": "tucker", "rank": 2, "shape": [[4, 0], [4, 6]]},
        r"Tucker\(shape\[0\]\[1\]=0\): must be",
    ),
    "shape of unequal lengths": (
        {"method": "tensor_train", "rank": 2, "shape": [[4, 2, 2], [4, 6]]},
        r"a tensor train needs equally many modes of inputs and outputs, not \[4, 2, 2\] and \[4, 6\]",
    ),
    "endless shape": (
        {"method": "tensor_train", "rank": 2, "shape": [[1] * 40 + [16], [1] * 40 + [24]]},
        r"TensorTrain: shape has a list of 41 factors; the limit is 32",
    ),
    "component": (
        {"method": "low_rank", "rank": 2, "components": ["embeddings"]},
        r"LowRank\(components=\['embeddings'\]\): choose from \['ffn', 'attention'\]",
    ),
    "no component": (
        {"method": "low_rank", "rank": 2, "components": []},
        r"must be a list such as \['ffn', 'attention'\]",
    ),
    "execution": (
        {"method": "tucker", "rank": 2, "execution": "fast"},
        r"Tucker\(execution='fast'\): choose from \['auto', 'dense', 'factors'\]",
    ),
    "layer": ({"method": "tucker", "rank": 2, "layers": {"encoder": [2]}}, r"no layer 2 in stack 'encoder' of marian"),
    "stack": ({"method": "tucker", "rank": 2, "layers": {"middle": [0]}}, r"no stack 'middle' in marian; choose from"),
    "no layer": ({"method": "tucker", "rank": 2, "layers": {"encoder": []}}, r"Tucker\(layers=.*\) names no layer"),
    "unknown field": ({"method": "tucker", "size": 2}, r"unknown field 'size' of method 'tucker'; choose from"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_variant(marian(), [methods.LowRank(rank=2)]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bad", BAD)
def test_bad_settings_are_refused_in_one_line(bad, saved, tmp_path):
    data, message = BAD[bad]
    with pytest.raises(ValueError, match=message) as error:
        make_variant(marian(), [method_from_dict(data)])
    assert "\n" not in str(error.value)
    # The same from a config that was edited by hand, before the model is made: nothing but meta tensors.
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"methods": [data]}))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with Largest() as spy, pytest.raises(ValueError, match=message) as error:
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert spy.seen <= 32 * 16  # the positions, which transformers computes


def test_a_damaged_config_of_a_large_model_allocates_nothing(saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    config |= {"d_model": 4096, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "max_position_embeddings": 64}
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    for data in (
        {"method": "low_rank", "rank": 10**12},
        {"method": "tensor_train", "ranks": [1, 10**12, 1]},
        {"method": "tucker", "ranks": [10**12] * 12},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"methods": [data]}))
        with Largest() as spy, pytest.raises(ValueError, match=r"method .*rank.*"):
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert spy.seen <= 64 * 4096


def test_a_prime_width_is_refused():
    with pytest.raises(ValueError, match=rf"method 'tucker', '{FC1}': 23 is prime: .* are 21 and 24"):
        make_variant(marian(encoder_ffn_dim=23), [methods.Tucker(rank=2)])


FACTORIZED = [methods.LowRank(rank=2), methods.TensorTrain(rank=2), methods.Tucker(rank=2)]


CHANGED_TWICE = [  # all but LowRank twice: factors may get a smaller rank
    (first, second)
    for first in [*FACTORIZED, methods.MagnitudePruning(sparsity=0.5)]
    for second in FACTORIZED
    if not first.name == second.name == "low_rank"
]


@pytest.mark.parametrize(("first", "second"), CHANGED_TWICE, ids=lambda m: m.name)
def test_a_linear_is_changed_once(first, second):
    message = rf"^method '{second.name}': '{FC1}' is a \w+Linear already, which another method made; .*$"
    model = marian()
    variant = make_variant(model, [first])
    with pytest.raises(ValueError, match=message):
        make_variant(model, [first, second])
    with pytest.raises(ValueError, match=message):
        make_variant(variant, [second])
    with pytest.raises(ValueError, match=message):
        make_variant(model.config, [first, second], task="seq2seq-lm")
    if variant.finalizable:
        variant.finalize()
        with pytest.raises(ValueError, match="is a SparseLinear already"):
            make_variant(variant, [second])
    make_variant(model, [methods.LowRank(rank=2, components=["attention"]), second])  # apart from each other


@pytest.mark.parametrize("method", FACTORIZED, ids=lambda m: m.name)
def test_factors_cannot_be_made_from_a_seed(method):
    freeze = methods.Freeze(ffn="random")
    message = r"^Freeze\(ffn='random'\): '.*fc1' is a \w+Linear, and only the matrices of plain linears can be drawn from a seed"
    for order in ([method, freeze], [freeze, method]):
        with pytest.raises(ValueError, match=message) as error:
            make_variant(marian(), order)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=message):
            make_variant(make_variant(marian(), order[:1]), order[1:])
        with pytest.raises(ValueError, match=message):
            make_variant(marian().config, order, task="seq2seq-lm")
    apart = methods.Freeze(ffn="random", layers={"decoder": [0, 1]})
    encoder = method_from_dict({"method": method.name, "rank": 2, "layers": {"encoder": [0, 1]}})
    assert len(make_variant(marian(), [apart, encoder]).seeded_tensors) == 8
