"""Components of another checkpoint in a new model."""

import pytest
import torch
from support.cases import Case, native_config
from support.models import native

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import DeLighT, FactorizedEmbedding, Freeze, LayerSelection

MARIAN = ARCHITECTURES["marian"]


def trained(architecture=MARIAN):
    return native(Case(architecture, architecture.tasks[0], "trained", ()))


def fresh(*methods, components, architecture=MARIAN, **fields):
    config = native_config(architecture, "base")
    for name, value in fields.items():
        setattr(config, name, value)
    return make_variant(config, list(methods), task=architecture.tasks[0], seed=3, components=components)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("component", ["embeddings", "attention", "ffn", "norm"])
def test_only_the_component_is_taken(architecture, component):
    source = trained(architecture)
    model, plain = (fresh(components=one, architecture=architecture) for one in ({component: source}, None))
    taken = 0
    for name, value in model.named_parameters():
        is_taken = architecture.component(base_name(model, name)) == component
        assert torch.equal(value, (source if is_taken else plain).get_parameter(name)), name
        taken += is_taken
    assert taken


def test_of_a_folder_and_of_another_depth_and_width(tmp_path):
    source = trained()
    source.save_pretrained(tmp_path)
    model = fresh(
        Freeze(embeddings="frozen"), components={"embeddings": tmp_path}, encoder_layers=1, encoder_ffn_dim=40
    )
    assert torch.equal(model.model.shared.weight, source.model.shared.weight)
    assert not model.model.shared.weight.requires_grad
    assert len(model.model.encoder.layers) == 1
    model.save_pretrained(tmp_path / "variant")
    assert torch.equal(
        type(model).from_pretrained(tmp_path / "variant").model.shared.weight, source.model.shared.weight
    )


def test_methods_convert_what_was_taken():
    source = trained()
    rank = source.config.d_model
    model = fresh(FactorizedEmbedding(rank=rank), components={"embeddings": source})
    table = model.get_input_embeddings()
    ids = torch.arange(10)
    torch.testing.assert_close(table(ids), source.get_input_embeddings()(ids), rtol=1e-5, atol=1e-5)


def test_in_a_model_with_weights_which_stays_as_it_is():
    source, other = trained(), fresh(components=None)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    model = make_variant(other, [Freeze(attention="frozen")], components={"ffn": source})
    assert torch.equal(model.model.encoder.layers[0].fc1.weight, source.model.encoder.layers[0].fc1.weight)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("component", "fields", "message"),
    [
        ("embedding", {}, r"no component 'embedding'; choose from \['embeddings', 'attention'"),
        (
            "ffn",
            {"encoder_ffn_dim": 40},
            r"ffn of MarianMTModel: 'encoder.layers.0.fc1.weight' has the shape \(24, 16\), and",
        ),
        (
            "attention",
            {"encoder_layers": 1},
            r"attention of MarianMTModel: 'encoder.layers.1.self_attn.* and \d+ more are in",
        ),
    ],
)
def test_what_does_not_fit_is_refused(component, fields, message):
    with pytest.raises(ValueError, match=message):
        fresh(components={component: trained()}, **fields)


def test_wrong_sources_and_methods_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"components=\{'ffn': ...\} must be a model or a name, not int"):
        fresh(components={"ffn": 3})
    with pytest.raises(FileNotFoundError, match="does not exist"):
        fresh(components={"ffn": tmp_path / "missing"})
    with pytest.raises(
        ValueError, match="method 'delight': its blocks train from scratch, so the backbone can have no"
    ):
        fresh(DeLighT(width=8), components={"embeddings": trained()})
    variant = make_variant(trained(), [LayerSelection(keep={"encoder": [0]})])
    with pytest.raises(ValueError, match=r"and \d+ more are in one of the two models only"):
        fresh(components={"ffn": variant})
