"""DeLighT: units against dense block-diagonal matrices, published sizes, tables, attentions, and what it refuses."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import differences, outputs, perturbed
from support.training import training_step
from torch import nn
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant, methods, multiply_adds
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers import LowRankOutput
from hf_freeze.layers.dextra import DExTraAttention, DExTraEmbedding, DExTraUnit, dextra_sizes
from hf_freeze.methods import DeLighT, Freeze, LayerSharing, LiteTransformer, LowRank, TensorTrain

TASK = {"marian": "seq2seq-lm", "gpt2": "causal-lm"}
every_backbone = pytest.mark.parametrize("name", TASK)
ATTENTIONS = ("self_attn", "encoder_attn", ".attn")
TINY = {"n_min": 1, "n_max": 2, "map_dim": 4, "groups": 2, "dropout": 0.0}


def config_of(name, **fields):
    return AutoConfig.for_model(name, **ARCHITECTURES[name].tiny | fields)


def sized(d, depth, heads=8, **fields):
    """A Marian of other sizes."""
    stacks = {f"{stack}_layers": depth for stack in ("encoder", "decoder")}
    stacks |= {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    return config_of("marian", d_model=d, vocab_size=1000, decoder_vocab_size=1000, **stacks, **fields)


def made(name, *others, fields=(), **settings):
    """A variant as if trained, in eval mode; `others` are applied to it."""
    config = config_of(name, **dict(fields))
    model = make_variant(config, [DeLighT(**TINY | settings)], task=TASK[name], init="marian", seed=1)
    torch.manual_seed(2)
    model = perturbed(model)
    return (make_variant(model, list(others)) if others else model).eval()


def batch_of(name):
    return ARCHITECTURES[name].tiny_inputs(TASK[name])


def of_kind(model, kind):
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


# -- units -------------------------------------------------------------------------------------------------------------------


def sizes_by_formulas(spec, d, outputs, depth, multiplier, most, p):
    """(groups, widths) of the group layers, one by one."""
    middle = (depth + 1) // 2
    if spec == "released":
        rising = [min(2**layer, most) for layer in range(1, middle + 1)]
        widths = [int(width) for width in np.linspace(p, multiplier * d, middle)]
        widths += widths[: depth // 2][::-1]
    else:
        rising = [min(2 ** (layer - 1), most) for layer in range(1, middle + 1)]
        widths = [d + (multiplier * d - d) * layer / middle for layer in range(1, middle + 1)]
        down = depth - middle
        widths += [multiplier * d + (outputs - multiplier * d) * layer / down for layer in range(1, down + 1)]
    groups = rising + rising[: depth // 2][::-1]
    for layer in range(depth - 1):
        step = np.lcm.reduce([groups[layer], groups[layer + 1], 8 if spec == "released" else 1])
        widths[layer] = int(-(-widths[layer] // step) * step)
    return groups, [*widths[:-1], outputs]


UNITS = [  # I, O, N, multiplier, groups, p
    (32, 16, 4, 2.0, 4, 16),
    (32, 16, 5, 3.5, 4, 16),
    (16, 8, 3, 2.0, 2, 8),
    (16, 8, 1, 2.0, 4, 8),
    (16, 8, 2, 2.0, 1, 8),
    (4, 32, 4, 2.0, 2, 16),
    (32, 16, 7, 2.125, 8, 16),
]
every_unit = pytest.mark.parametrize(("d", "outputs", "depth", "multiplier", "most", "p"), UNITS)
every_spec = pytest.mark.parametrize("spec", ["released", "paper"])


def beside(x, y, groups):
    """Group by group: a piece of the input, then one of what the last layer made."""
    pairs = zip(x.chunk(groups, -1), y.chunk(groups, -1), strict=True)
    return torch.cat([piece for pair in pairs for piece in pair], dim=-1)


def normed(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def by_formulas(unit, x, groups, dense):
    """METHODS of the paper, with one dense matrix for each layer and the shuffle as a list of places."""
    counts = [1, *groups, 1] if dense else groups
    first, y = x, x
    for number, (layer, g) in enumerate(zip(unit.layers, counts, strict=True)):
        if number > (1 if dense else 0):
            y = beside(first, y, g)
        z = y @ torch.block_diag(*layer.linear.weight) + layer.linear.bias
        places = [group * (z.shape[-1] // g) + n for n in range(z.shape[-1] // g) for group in range(g)]
        pieces = [normed(piece, layer.norm.weight, layer.norm.bias) for piece in z[..., places].chunk(g, -1)]
        y = torch.cat(pieces, dim=-1)
        y = y * torch.sigmoid(y)
        if dense and number == 0:
            first = y
    return y


def a_unit(d, outputs, depth, multiplier, most, p, spec, dropout=0.0):
    sizes = dextra_sizes(d, outputs, depth=depth, multiplier=multiplier, groups=most, spec=spec, projected=p)
    unit = DExTraUnit(sizes, dropout, dtype=torch.float64)
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return unit.eval()


@every_spec
@every_unit
def test_a_unit_is_its_formulas(spec, d, outputs, depth, multiplier, most, p):
    groups, widths = sizes_by_formulas(spec, d, outputs, depth, multiplier, most, p)
    unit = a_unit(d, outputs, depth, multiplier, most, p, spec)
    dense = spec == "released"
    layers = list(unit.layers)[1:-1] if dense else list(unit.layers)
    assert [layer.linear.groups for layer in layers] == groups
    assert [layer.linear.out_features for layer in layers] == widths
    assert [layer.norm.normalized_shape[0] for layer in layers] == [w // g for w, g in zip(widths, groups, strict=True)]
    x = torch.randn(2, 5, d, dtype=torch.float64, requires_grad=True)
    found, expected = unit(x), by_formulas(unit, x, groups, dense)
    assert found.shape == (2, 5, outputs)
    torch.testing.assert_close(found, expected)
    scale = torch.randn_like(expected)
    parameters = [x, *unit.parameters()]
    wanted = torch.autograd.grad((expected * scale).sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad((found * scale).sum(), parameters), wanted)


def test_dropout_is_after_every_layer_and_in_training_alone():
    unit = a_unit(32, 16, 4, 2.0, 4, 16, "released", dropout=0.5)
    x, seen = torch.randn(9, 32, dtype=torch.float64), []
    for layer in unit.layers:
        layer.register_forward_hook(lambda layer, given, made: seen.append((made == 0).double().mean().item()))
    unit(x)
    assert seen == [0] * 6
    unit.train()(x)
    assert seen[6:] == pytest.approx([0.5] * 6, abs=0.2)
    torch.testing.assert_close(unit(x, 0.0), unit.eval()(x))


# -- sizes -------------------------------------------------------------------------------------------------------------------


def matrices(d, outputs, depth, multiplier, most, p):
    """Parameters of a released unit, (linears, norms), by its formulas."""
    groups, widths = sizes_by_formulas("released", d, outputs, depth, round(multiplier, 3), most, p)
    linears, norms, taken = d * p + p, 2 * p, p
    for g, width in zip(groups, widths, strict=True):
        linears, norms, taken = linears + taken * width // g + width, norms + 2 * (width // g), width + p
    return linears + taken * outputs + outputs, norms + 2 * outputs


@pytest.mark.parametrize(("d", "millions"), [(128, 2.496), (256, 8.190), (384, 17.648), (512, 31.166), (640, 48.438)])
def test_published_numbers_of_parameters(d, millions):
    with torch.device("meta"):
        model = make_variant(sized(d, 8), [DeLighT(width=d)], task="seq2seq-lm")
    found = count_parameters(model)
    assert round((found.total - 1000 * 128) / 1e6, 3) == millions
    most = 2 ** int(np.ceil(np.log2(d / 32)))
    h, kinds = d // 2, {"attention": 0, "norm": 0}
    for b in range(8):
        linears, norms = matrices(d, h, 4 + 4 * b // 7, 2 + b / 7, most, h)
        kinds["attention"] += 2 * (linears + 3 * (h * h + h) + h * d + d) + 3 * (d * h + h) + h * d + d
        kinds["norm"] += 2 * norms + 5 * 2 * d
    of_table = sum(matrices(128, d, 4, 2.0, most, h))
    projection = 128 * d if d != 128 else 0
    assert {name: found.by_component[name].total for name in kinds} == kinds
    assert found.by_component["ffn"].total == 16 * (2 * d * d // 4 + d // 4 + d)
    assert found.by_component["embeddings"].total == 1000 * 128 + 2 * of_table
    assert found.by_component["head"].total == projection


@pytest.mark.parametrize(
    ("n_min", "n_max", "depth"), [(4, 4, 43), (8, 8, 115), (4, 8, 92), (4, 12, 158), (6, 8, 102), (6, 12, 172)]
)
def test_published_depths(n_min, n_max, depth):
    blocks = DeLighT(n_min=n_min, n_max=n_max).blocks()
    assert len(blocks) == n_max
    assert sum(n for n, _ in blocks) + 5 * n_max + n_min + 3 == depth
    assert blocks[0] == (n_min, 2.0)
    assert blocks[-1] == (n_max, pytest.approx(2 + n_max / n_min - 1))
    assert DeLighT(n_min=n_min, n_max=n_max, block_wise=False).blocks() == [(n_min, 2.0)] * n_max


def test_blocks_from_deep_to_shallow():
    """Row R16 of the preprint, 12 → 4, has the size of R5, 4 → 12."""
    deep_first, deep_last = DeLighT(n_min=12, n_max=4, groups=2), DeLighT(n_min=4, n_max=12, groups=2)
    assert deep_first.blocks() == deep_last.blocks()[::-1]
    assert [depth for depth, _ in deep_first.blocks()] == [12, 11, 10, 9, 9, 8, 7, 6, 6, 5, 4, 4]
    config = AutoConfig.for_model("gpt2", **(ARCHITECTURES["gpt2"].tiny | {"n_layer": 12}))
    sizes = []
    for method in (deep_first, deep_last):
        with torch.device("meta"):
            sizes.append(count_parameters(make_variant(config, [method], task="causal-lm")).total)
    assert sizes[0] == sizes[1]
    with pytest.raises(
        ValueError, match=r"DeLighT\(n_min=12\): each stack must have n_min layers, but 'decoder' has 4; set n_la"
    ):
        make_variant(
            AutoConfig.for_model("gpt2", **(ARCHITECTURES["gpt2"].tiny | {"n_layer": 4})),
            [deep_first],
            task="causal-lm",
        )


def test_one_block_has_no_line():
    assert DeLighT(n_min=1, n_max=1).blocks() == [(1, 2.0)]


@pytest.mark.parametrize(
    ("d", "spec", "groups"),
    [
        (16, "released", 1),
        (48, "released", 2),
        (64, "released", 2),
        (160, "released", 8),
        (48, "paper", 2),
        (128, "paper", 4),
    ],
)
def test_groups_follow_from_the_hidden_size(d, spec, groups):
    with torch.device("meta"):
        settings = DeLighT(n_min=8, n_max=8, spec=spec, map_dim=128 if spec == "released" else d)
        model = make_variant(sized(d, 8, heads=2), [settings], task="seq2seq-lm")
    expected = [1, 2, 4, 8, 16, 16, 8, 4, 2, 1] if spec == "released" else [1, 2, 4, 8, 8, 4, 2, 1]
    for unit in of_kind(model, DExTraUnit).values():
        assert [layer.linear.groups for layer in unit.layers] == [min(g, groups) for g in expected]


@every_backbone
def test_every_parameter_lies_in_one_component(name):
    model = made(name)
    for full, _ in canonical_parameters(model):
        found = model.architecture.matches(base_name(model, full))
        assert len(found) == 1 or full.startswith(("lm_head", "final")), full
        assert ".dextra." not in full or found == ["norm" if ".norm." in full else "attention"]


@every_backbone
def test_multiply_adds_are_those_of_matrices_and_scores(name):
    model = made(name)
    found = multiply_adds(model, length=8).by_component

    def sizes(*parts):
        return sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1 and any(part in n for part in parts))

    assert found["ffn"].forward == sizes("fc", "mlp")
    assert found["embeddings"].forward == sizes(".unit.") + 40 * 4 + 4 * 16
    assert found["attention"].forward == sizes("attn") + (6 if name == "marian" else 2) * 2 * 8 * 8


# -- blocks ------------------------------------------------------------------------------------------------------------------


@every_backbone
@torch.no_grad()
def test_one_head_attends_to_what_a_unit_makes(name):
    """Of 8 numbers, whatever heads the backbone has; the FFN has 4 neurons, and swish."""
    model, seen = made(name).double(), {}
    for place, module in model.named_modules():
        if place.endswith((*ATTENTIONS, "fc1", "fc2", "c_fc", "mlp.c_proj")):
            module.register_forward_hook(
                lambda module, given, keywords, y, place=place: seen.update(
                    {place: (module, given[0] if given else keywords["hidden_states"], keywords, y)}
                ),
                with_kwargs=True,
            )
    model(**batch_of(name))
    described = model.architecture.attentions(model.config).values()
    assert {(each.head_count(model.config), each.head_size(model.config)) for each in described} == {(1, 8)}
    lengths = {5: batch_of(name)["attention_mask"].bool(), 4: torch.ones(2, 4, dtype=torch.bool)}
    attentions = {place: each for place, each in seen.items() if place.endswith(ATTENTIONS)}
    assert len(attentions) == (6 if name == "marian" else 2)
    for place, (module, x, keywords, (found, _)) in attentions.items():
        cross = place.endswith("encoder_attn")
        assert isinstance(module, DExTraAttention) != cross
        inner = module if cross else module.attention
        x = x if cross else module.dextra(x)
        keys = keywords["key_value_states"] if cross else x
        if name == "gpt2":
            q, k, v = inner.c_attn(x).chunk(3, -1)
        else:
            q, k, v = inner.q_proj(x), inner.k_proj(keys), inner.v_proj(keys)
        assert q.shape[-1] == 8
        visible = lengths[keys.shape[1]][:, None].expand(-1, x.shape[1], -1)
        if "encoder.layers" not in place and not cross:
            visible = visible & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        weights = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        expected = (inner.c_proj if name == "gpt2" else inner.out_proj)(weights @ v)
        rows = lengths[x.shape[1]]
        torch.testing.assert_close(found[rows], expected[rows])
    ins = [each for place, each in seen.items() if place.endswith(("fc1", "c_fc"))]
    outs = [each for place, each in seen.items() if place.endswith(("fc2", "mlp.c_proj"))]
    for (_, _, _, neurons), (_, given, _, _) in zip(ins, outs, strict=True):
        assert neurons.shape[-1] == 4
        torch.testing.assert_close(given, neurons * torch.sigmoid(neurons))


def test_swish_stays(tmp_path):
    model = made("marian", fields={"activation_function": "relu"})
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    activations = [m for n, m in reloaded.named_modules() if n.endswith("activation_fn")]
    assert [type(each) for each in activations] == [nn.SiLU] * 4
    assert differences(outputs(reloaded, batch_of("marian")), outputs(model, batch_of("marian"))) == []


def test_scores_are_scaled_as_the_backbone_scales_them():
    model = made("gpt2", fields={"scale_attn_by_inverse_layer_idx": True})
    scales = [module.attention.scaling for module in of_kind(model, DExTraAttention).values()]
    assert scales == pytest.approx([8**-0.5, 8**-0.5 / 2])


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_group_layers_are_drawn_after_glorot(init):
    settings = DeLighT(n_min=2, n_max=2, map_dim=64, groups=4)
    model = make_variant(sized(128, 2), [settings], task="seq2seq-lm", init=init)
    for place, unit in of_kind(model, DExTraUnit).items():
        for layer in unit.layers:
            weight, bound = layer.linear.weight, (6 / sum(layer.linear.weight.shape[1:])) ** 0.5
            assert weight.abs().max().item() == pytest.approx(bound, rel=0.02), place
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), place
            assert not layer.linear.bias.any()


# -- tables ------------------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("groups", [1, 2])
def test_an_embedding_is_a_unit_of_a_row(name, groups):
    model = made(name, groups=groups).double()
    for place, table in of_kind(model, DExTraEmbedding).items():
        counts, _ = sizes_by_formulas("released", 4, 16, 1, 2.0, groups, 8)
        expected = by_formulas(table.unit, table.weight * 2, counts, True) / (4 if name == "marian" else 1)
        ids = torch.randint(40, (3, 7))
        with torch.no_grad():
            torch.testing.assert_close(table(ids), expected[ids], msg=place)
            torch.testing.assert_close(table.cached_table(), expected)
            table.unit.layers[0].norm.bias.add_(1)
            assert (table(ids) - expected[ids]).abs().max() > 0.01
            table.unit.layers[0].norm.bias.sub_(1)
        torch.testing.assert_close(table.train()(ids), expected[ids])
        found, wanted = (
            torch.autograd.grad((made * torch.arange(16)).sum(), list(table.unit.parameters()))
            for made in (table(ids), expected[ids])
        )
        torch.testing.assert_close(found, wanted)


def test_embeddings_are_dropped_in_training_alone():
    model = made("gpt2", dropout=0.5)
    table, ids = model.transformer.wte, torch.full((2, 50), 3)
    assert {unit.dropout for unit in of_kind(model, DExTraUnit).values()} == {0.5} == {table.dropout}
    assert len(table.train()(ids).flatten(0, 1).unique(dim=0)) > 90
    kept = table.eval()(ids)
    assert torch.equal(kept[0, 0], kept[1, 49])
    assert differences(outputs(model, batch_of("gpt2")), outputs(made("gpt2"), batch_of("gpt2"))) == []


def test_the_scale_of_the_backbone_cancels_out():
    scaled, plain = (made("marian", fields={"scale_embedding": scale}) for scale in (True, False))
    assert scaled.model.encoder.embed_scale == 4
    assert scaled.model.encoder.embed_tokens.scale == 4
    assert differences(outputs(scaled, batch_of("marian")), outputs(plain, batch_of("marian")), 1e-5) == []


def test_encoder_and_decoder_share_the_table_and_have_a_unit_each():
    model = made("marian")
    shared, encoder, decoder = model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
    assert shared.weight is encoder.weight is decoder.weight is model.lm_head.weight
    for name, parameter in encoder.unit.named_parameters():
        assert parameter is shared.unit.get_parameter(name)
        assert parameter is not decoder.unit.get_parameter(name)
    ids = torch.arange(40)
    assert (encoder(ids) - decoder(ids)).abs().max() > 0.1
    assert (encoder(ids) - shared(ids)).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("marian", {}),
        ("marian", {"share_encoder_decoder_embeddings": False}),
        ("marian", {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}),
        ("gpt2", {}),
    ],
    ids=str,
)
def test_nothing_is_left_without_a_gradient(name, fields, tmp_path):
    model = made(name, fields=fields).train()
    model(**batch_of(name)).loss.backward()
    left = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert [n for n in left if not n.endswith(("k_proj.bias", "wpe.weight"))] == []  # softmax cancels a bias of keys
    table = getattr(model.lm_head, "weight", None)
    tied = fields.get("tie_word_embeddings", True)
    assert isinstance(model.lm_head, LowRankOutput) == tied
    assert table.shape == ((40, 4) if tied else (40, 16))
    training_step(model, batch_of(name))
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES[TASK[name]].from_pretrained(tmp_path)
    assert differences(outputs(reloaded, batch_of(name)), outputs(model, batch_of(name))) == []


@every_backbone
def test_logits_are_products_with_the_table(name):
    model = made(name)
    states = torch.randn(3, 16)
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(model.lm_head(states), states @ model.lm_head.projection.T @ table.T)
    model = made(name, map_dim=16)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert isinstance(model.get_input_embeddings(), DExTraEmbedding)
    assert outputs(model, batch_of(name))["logits"].shape[-1] == 40


@every_backbone
def test_without_a_map_dim_tables_stay(name):
    model = made(name, map_dim=None)
    assert of_kind(model, DExTraEmbedding) == {}
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert len(of_kind(model, DExTraUnit)) == (4 if name == "marian" else 2)


# -- with other methods ------------------------------------------------------------------------------------------------------


@every_backbone
def test_blocks_share_where_they_are_alike(name):
    model = made(name, LayerSharing(), block_wise=False)
    units = [unit for place, unit in of_kind(model, DExTraUnit).items() if "dextra" in place]
    assert len({id(unit.layers[1].linear.weight) for unit in units}) == (2 if name == "marian" else 1)
    model(**batch_of(name)).loss.backward()
    with pytest.raises(
        ValueError, match=r"\ALayerSharing: two layers of stack .* have different shapes: '.*dextra.*\Z"
    ):
        made(name, LayerSharing())


@every_backbone
def test_linears_may_be_factorised(name):
    model, batch = made(name), batch_of(name)
    full = make_variant(copy.deepcopy(model), [LowRank(rank=4), LowRank(rank=8, components=["attention"])]).eval()
    assert differences(outputs(full, batch), outputs(model, batch), 1e-3) == []
    for method in (
        LowRank(rank=2, components=["ffn", "attention"]),
        TensorTrain(rank=2, components=["ffn", "attention"]),
    ):
        smaller = make_variant(copy.deepcopy(model), [method]).eval()
        kinds = {type(m).__name__ for n, m in smaller.named_modules() if n.endswith((".out_proj", "c_proj", "q_proj"))}
        assert kinds == {f"{type(method).__name__}Linear"}
        assert differences(outputs(smaller, batch), outputs(model, batch), 1e-3) != []
        training_step(smaller, batch)


def test_random_units_are_refused():
    with pytest.raises(
        ValueError, match=r"\AFreeze\(attention='random'\): '.*dextra.*' is a GroupLinear, and only.*\Z"
    ):
        made("marian", Freeze(attention="random"))
    frozen = made("marian", Freeze(attention="frozen"))
    state = {
        name: not p.requires_grad for name, p in frozen.named_parameters() if "attn" in name and "norm" not in name
    }
    assert any("dextra" in name for name in state)
    assert all(state.values())


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_min": 0}, r"DeLighT\(n_min=0\): must be an integer of at least 1"),
        ({"n_min": None}, r"DeLighT\(n_min=None\): must be an integer"),
        ({"n_max": 2.5}, r"DeLighT\(n_max=2\.5\): must be an integer"),
        ({"width": 0}, r"DeLighT\(width=0\): must be"),
        ({"map_dim": -1}, r"DeLighT\(map_dim=-1\): must be"),
        ({"groups": 0}, r"DeLighT\(groups=0\): must be"),
        ({"n_max": 65}, r"DeLighT\(n_min=4, n_max=65\): both must be at most 64"),
        ({"n_min": 65}, r"DeLighT\(n_min=65, n_max=8\): both must be at most 64"),
        ({"m_w": 0.5}, r"DeLighT\(m_w=0\.5\): must be a number in 1\.\.16"),
        ({"m_w": 17}, r"DeLighT\(m_w=17\)"),
        ({"m_w": True}, r"DeLighT\(m_w=True\)"),
        ({"m_w": float("nan")}, r"DeLighT\(m_w=nan\)"),
        ({"block_wise": 1}, r"DeLighT\(block_wise=1\): must be True or False"),
        ({"dropout": 1.0}, r"DeLighT\(dropout=1\.0\): must be a share of at least 0 and below 1"),
        ({"spec": "ours"}, r"DeLighT\(spec='ours'\): choose from \['released', 'paper'\]"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeLighT(**arguments)


EXAMPLE = DeLighT(**TINY)
DEEPER = DeLighT(n_min=3, n_max=3, groups=3)


@pytest.mark.parametrize(
    ("name", "fields", "applied", "message"),
    [
        ("marian", {}, [DeLighT(**TINY | {"width": 32})], r"DeLighT\(width=32\): the hidden size of this marian is 16"),
        (
            "marian",
            {"decoder_layers": 3},
            [EXAMPLE],
            r"DeLighT\(n_max=2\): .*'decoder' has 3; set decoder_layers=2, or n_max=3",
        ),
        (
            "marian",
            {},
            [DeLighT(**TINY | {"map_dim": 257})],
            r"DeLighT\(map_dim=257\): must be at most 16 times the hidden size 16",
        ),
        ("gpt2", {"n_layer": 1}, [EXAMPLE], r"DeLighT\(n_max=2\): .*'decoder' has 1; set n_layer=2, or n_max=1"),
        ("gpt2", {"n_embd": 24}, [EXAMPLE], "DeLighT: the hidden size 24 must be a multiple of 16"),
        (
            "gpt2",
            {"n_layer": 3},
            [DEEPER],
            r"DeLighT: the hidden size 16 must be a multiple of 48, .*; choose from \[48\], or fewer groups",
        ),
        (
            "gpt2",
            {"n_layer": 3},
            [replace(DEEPER, spec="paper", map_dim=5, groups=2)],
            "DeLighT: a layer of 2 groups mixes in 5 numbers, in a unit from 5 to 16: the groups must divide them; choose",
        ),
        (
            "gpt2",
            {"add_cross_attention": True},
            [EXAMPLE],
            "DeLighT: this gpt2 has cross-attentions; set add_cross_attention=False",
        ),
        ("marian", {}, [EXAMPLE, EXAMPLE], "DeLighT after 'delight', which has put in other blocks; leave one"),
        (
            "marian",
            {},
            [LiteTransformer(kernels=[3, 3], heads=2), EXAMPLE],
            "DeLighT after 'lite_transformer', which has put in other blocks",
        ),
        (
            "gpt2",
            {},
            [methods.Theseus.example, EXAMPLE],
            r"DeLighT after 'theseus', which needs the old blocks until finalize\(\)",
        ),
        ("gpt2", {}, [LowRank(rank=2), EXAMPLE], r"'delight': 'h\.0\.mlp\.c_fc' is a LowRankLinear already"),
        ("gpt2", {}, [methods.DeFINE.example, EXAMPLE], r"'delight': 'transformer\.wte' is a DeFINEEmbedding already"),
    ],
)
def test_what_does_not_fit_is_refused(name, fields, applied, message):
    with pytest.raises(ValueError, match=rf"\A.*({message}).*\Z"):
        make_variant(config_of(name, **fields), applied, task=TASK[name])


def test_refusals_of_backbones(tmp_path):
    trained = AUTO_CLASSES["causal-lm"].from_config(config_of("gpt2"))
    trained.save_pretrained(tmp_path)
    for backbone in (trained, tmp_path):
        with pytest.raises(ValueError, match=r"\Amethod 'delight': its blocks train from scratch.*pass the config.*\Z"):
            make_variant(backbone, [EXAMPLE], task="causal-lm")
    with pytest.raises(ValueError, match="does not support 'llama'"):
        make_variant(AutoConfig.for_model("llama", **ARCHITECTURES["llama"].tiny), [EXAMPLE], task="causal-lm")
    with pytest.raises(ValueError, match="delight: no native model has DExTra units; it cannot be merged"):
        made("gpt2").merge()
