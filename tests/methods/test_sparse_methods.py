"""MagnitudePruning and VariationalDropout: which weights go, what `finalize` leaves, what is refused."""

import math

import pytest
import torch
from support.cases import BASELINES as BACKBONES
from support.models import differences, native, outputs
from support.schedules import scheduled_model
from support.sparse import BATCH, WEIGHTS, layers_of, zeros

from hf_freeze import count_parameters, make_variant, stored_bytes
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.methods import Freeze, MagnitudePruning, VariationalDropout
from hf_freeze.surgery import effective_weight

every_backbone = pytest.mark.parametrize("case", BACKBONES, ids=[case.architecture.model_type for case in BACKBONES])


# -- scopes ------------------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("share", [0.0, 0.001, 0.37, 0.5, 0.999])
def test_scopes_count_exactly_and_take_the_smallest(case, share):
    backbone = native(case)
    with torch.no_grad():
        for *_, name in case.architecture.linears(backbone.config, "ffn"):  # of unequal scale
            backbone.base_model.get_submodule(name).weight.mul_(1 + len(name) % 3)
    dense = make_variant(backbone, [MagnitudePruning(sparsity=0.0)])
    sizes = [effective_weight(module).abs() for module in layers_of(dense)]
    everything = torch.cat([size.flatten() for size in sizes])
    together = make_variant(backbone, [MagnitudePruning(sparsity=share)])
    assert sum(int(z.sum()) for z in zeros(together)) == round(share * everything.numel())
    limit = everything.sort().values[round(share * everything.numel()) :].min()
    assert all(torch.equal(z, size < limit) for z, size in zip(zeros(together), sizes, strict=True))
    apart = make_variant(backbone, [MagnitudePruning(sparsity=share, scope="layer")])
    for found, size in zip(zeros(apart), sizes, strict=True):
        assert int(found.sum()) == round(share * size.numel())
        assert not found.any() or found.all() or size[found].max() < size[~found].min()


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.77])
@pytest.mark.parametrize("values", [1, 3])
def test_ties_do_not_change_the_count(scope, share, values):
    backbone = scheduled_model(phases=[]).merge()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if ".fc" in name and name.endswith("weight"):
                sign = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
                parameter.copy_(sign * (1 + torch.randint(values, parameter.shape, generator=generator)))
    model = make_variant(backbone, [MagnitudePruning(sparsity=share, scope=scope)])
    groups = [zeros(model)] if scope == "global" else [[z] for z in zeros(model)]
    for group in groups:
        assert sum(int(z.sum()) for z in group) == round(share * sum(z.numel() for z in group))
    again = make_variant(backbone, [MagnitudePruning(sparsity=share, scope=scope)])
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), zeros(again), strict=True))


def test_components_and_layers():
    model = scheduled_model(
        phases=[MagnitudePruning(sparsity=0.5, components=["attention", "ffn"], layers={"decoder": [1]})]
    )
    names = [name for name, module in model.named_modules() if isinstance(module, Masked)]
    assert len(names) == 4 + 4 + 2
    assert all("decoder.layers.1." in name for name in names)


# -- what finalize leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.98])
def test_the_file_of_a_finalized_model_holds_what_is_left(share):
    """fp32 values, and one bit a weight, or a column of two bytes for each value and a count of four for each row."""
    model = scheduled_model(phases=[MagnitudePruning(sparsity=share, scope="layer")])
    dense = stored_bytes(scheduled_model(phases=[]))
    masked = stored_bytes(model)
    assert masked == dense + WEIGHTS // 8
    model.finalize()
    places = 0
    for module in layers_of(model):
        size = module.in_features * module.out_features
        places += min(size // 8, 2 * module.nonzeros + 4 * module.out_features)
    left = sum(module.nonzeros for module in layers_of(model))
    assert left == sum(z.numel() - round(share * z.numel()) for z in zeros(model))
    assert stored_bytes(model) == dense - 4 * (WEIGHTS - left) + places
    assert count_parameters(model).by_component["ffn"].trainable == left + 2 * 2 * (16 + 24)


@pytest.mark.parametrize(("inputs", "share"), [(512, 0.5), (512, 0.01), (40_000, 0.001)])
def test_two_processes_can_send_its_buffers(inputs, share):
    """Neither gloo nor NCCL know 16-bit integers, and DistributedDataParallel sends all buffers."""
    masked = Masked.from_linear(torch.nn.Linear(inputs, 5))
    prune_smallest([masked], 1 - share, "layer")
    sparse = masked.sparse()
    assert hasattr(sparse, "columns") == (share < 0.1)
    assert all(buffer.dtype in (torch.uint8, torch.int32) for buffer in sparse.buffers())
    assert sparse.nonzeros == round(share * inputs * 5)
    assert torch.equal(sparse.dense_weight(), masked.dense_weight())
    x = torch.randn(3, inputs)
    torch.testing.assert_close(sparse(x), masked(x))


@pytest.mark.parametrize(
    "method", [MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=9, threshold=-6.0)]
)
def test_a_finalized_model_of_another_initialisation_takes_more_methods(method):
    model = scheduled_model(phases=[method])
    assert model.config.init == "marian"
    model.finalize()
    further = make_variant(model, [Freeze(attention="frozen")])
    assert differences(outputs(further, BATCH), outputs(model, BATCH)) == []


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1}, r"MagnitudePruning\(sparsity=1\): must be a share of at least 0 and below 1"),
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"sparsity": math.nan}, "sparsity=nan"),
        ({"sparsity": True}, "sparsity=True"),
        ({"sparsity": "0.5"}, "sparsity='0.5'"),
        ({"sparsity": None}, "sparsity=None"),
        ({"sparsity": 0.5, "scope": "row"}, r"MagnitudePruning\(scope='row'\): choose from \['global', 'layer'\]"),
        ({"sparsity": 0.5, "scope": ["layer"]}, r"MagnitudePruning\(scope=\['layer'\]\): choose from"),
        (
            {"sparsity": 0.5, "begin": -0.1},
            r"MagnitudePruning\(begin=-0.1\): must be None or a share of training in 0\.\.1",
        ),
        ({"sparsity": 0.5, "begin": True}, r"MagnitudePruning\(begin=True"),
        ({"sparsity": 0.5, "end": 1.5}, r"MagnitudePruning\(end=1.5"),
        ({"sparsity": 0.5, "end": math.nan}, r"MagnitudePruning\(end=nan"),
        (
            {"sparsity": 0.5, "begin": 0.5, "end": 0.5},
            r"MagnitudePruning\(begin=0.5, end=0.5\): begin must be below end",
        ),
        ({"sparsity": 0.5, "begin": 1}, "begin must be below end"),
        ({"sparsity": 0.5, "end": 0}, "begin must be below end"),
    ],
)
def test_a_pruning_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MagnitudePruning(**arguments)


both = pytest.mark.parametrize(
    "make",
    [lambda **a: MagnitudePruning(sparsity=0.5, **a), lambda **a: VariationalDropout(training_size=9, **a)],
    ids=["magnitude", "variational"],
)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"components": []}, r"\(components=\[\]\): must be a list such as \['ffn', 'attention'\]"),
        ({"components": "ffn"}, r"\(components='ffn'\): must be a list"),
        ({"components": ["norm"]}, r"\(components=\['norm'\]\): choose from \['ffn', 'attention'\]"),
        ({"components": [1]}, "choose from"),
        ({"layers": [0]}, r"layers=\[0\]: must be None or a dict"),
        ({"layers": {"encoder": [True]}}, "must be None or a dict"),
        ({"nonzeros": 5}, r"\(nonzeros=5\): must be None, or a dict from linears to numbers"),
        ({"nonzeros": {"a": -1}}, r"\(nonzeros=\{'a': -1\}\)"),
        ({"nonzeros": {"a": 1.0}}, r"\(nonzeros=\{'a': 1.0\}\)"),
        ({"nonzeros": {"a": True}}, r"\(nonzeros=\{'a': True\}\)"),
    ],
)
def test_bad_places_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": {"encoder": [2]}}, r"no layer 2 in stack 'encoder' of marian: it has layers 0\.\.1"),
        ({"layers": {"body": [0]}}, "no stack 'body' in marian; choose from"),
        ({"layers": {"encoder": []}}, r"\(layers=\{'encoder': \[\]\}\) names no layer"),
        ({"layers": {}}, r"\(layers=\{\}\) names no layer"),
        ({"nonzeros": {}}, "nonzeros must name the linears"),
        (
            {"nonzeros": {"encoder.layers.0.fc1": 3}, "layers": {"encoder": [0]}},
            "'encoder.layers.0.fc2' does not match",
        ),
        (
            {
                "nonzeros": {"encoder.layers.0.fc1": 385, "encoder.layers.0.fc2": 3},
                "layers": {"encoder": [0]},
            },
            r"'encoder\.layers\.0\.fc1': nonzeros=385: must be in 0\.\.384 for 16 inputs, 24 outputs",
        ),
    ],
)
def test_what_does_not_fit_the_backbone_is_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        scheduled_model(phases=[make(**arguments)])


@both
def test_a_linear_is_changed_once(make):
    message = r"'encoder\.layers\.0\.fc1' is a \w+ already, which another method made; leave it out by"
    for first in (MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=9)):
        with pytest.raises(ValueError, match=message):
            scheduled_model(phases=[first, make()])
        model = scheduled_model(phases=[first])
        model.finalize()
        with pytest.raises(ValueError, match=message):
            make_variant(model, [make()])
    apart = scheduled_model(phases=[make(layers={"encoder": [0]}), make(layers={"decoder": [0]})])
    assert len(layers_of(apart)) == 4
    apart.finalize()
    assert not apart.finalizable


@both
def test_numbers_of_weights_without_the_weights_are_refused(make):
    """`nonzeros` is what `finalize()` writes into a config; without its checkpoint there is no telling which."""
    counts = {"encoder.layers.0.fc1": 3, "encoder.layers.0.fc2": 0}
    method = make(nonzeros=counts, layers={"encoder": [0]})
    assert not method.facts.finalizable
    message = r"only the checkpoint of the finalized model knows which weights remain; load that checkpoint, or"
    with pytest.raises(ValueError, match=message):
        scheduled_model(phases=[method])
    with pytest.raises(ValueError, match=message):
        make_variant(scheduled_model(phases=[]), [method])
    finalized = scheduled_model(phases=[make()])
    finalized.finalize()
    with pytest.raises(ValueError, match=message):
        make_variant(finalized.config, [], task="seq2seq-lm")
    with torch.device("meta"):  # for counting
        model = scheduled_model(phases=[method])
    assert [module.nonzeros for module in layers_of(model)] == [3, 0]
