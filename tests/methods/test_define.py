"""DeFINE: against the formulas token by token, what is kept for inference, the start from trained tables, sizes, resizing."""

import copy
import math

import pytest
import torch
from support.generation import generation_problems
from support.models import outputs, trainability
from support.training import training_step
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, MarianConfig, MarianMTModel

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers import DeFINEEmbedding, LowRankOutput, expanded_embedding
from hf_freeze.layers import define as layer_file
from hf_freeze.layers.define import group_counts, output_widths

V, H, N = 40, 16, 8
SETTINGS = {"depth": 3, "width": 12, "groups": 4, "map_dim": N, "dropout": 0.0}
TWO_TABLES = {"share_encoder_decoder_embeddings": False}
UNTIED = {"tie_word_embeddings": False}
# name -> (config, native class, tables of their own, table that the output is tied to)
BACKBONES = {
    "marian": ({}, MarianMTModel, ["model.shared"], "model.shared"),
    "marian-two-tables": (
        TWO_TABLES,
        MarianMTModel,
        ["model.encoder.embed_tokens", "model.decoder.embed_tokens"],
        "model.decoder.embed_tokens",
    ),
    "marian-untied": (
        TWO_TABLES | UNTIED,
        MarianMTModel,
        ["model.encoder.embed_tokens", "model.decoder.embed_tokens"],
        None,
    ),
    "bert": ({}, BertForMaskedLM, ["bert.embeddings.word_embeddings"], "bert.embeddings.word_embeddings"),
    "gpt2": ({}, GPT2LMHeadModel, ["transformer.wte"], "transformer.wte"),
    "llama": ({"tie_word_embeddings": True}, LlamaForCausalLM, ["model.embed_tokens"], "model.embed_tokens"),
    "llama-untied": (UNTIED, LlamaForCausalLM, ["model.embed_tokens"], None),
}
every_backbone = pytest.mark.parametrize("name", BACKBONES)
TASK = {"marian": "seq2seq-lm", "bert": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm"}


def task_of(name):
    return TASK[name.split("-")[0]]


def config_of(name, **fields):
    changes, native_class, *_ = BACKBONES[name]
    return native_class.config_class(**ARCHITECTURES[name.split("-")[0]].tiny | changes | fields)


def backbone(name, **fields):
    """With weights as if trained."""
    torch.manual_seed(1)
    model = BACKBONES[name][1](config_of(name, **fields)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch_of(name):
    return ARCHITECTURES[name.split("-")[0]].tiny_inputs(task_of(name))


def without_labels(model, batch):
    fed = (
        {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}
        if model.config.is_encoder_decoder
        else {}
    )
    return {name: value for name, value in batch.items() if name != "labels"} | fed


def defined(model, *others, **settings):
    return make_variant(model, [methods.DeFINE(**SETTINGS | settings), *others]).eval()


def logits(model, batch):
    return outputs(model, batch)["logits"]


def a_unit(rows=V, dropout=0.0, padding_idx=None, depth=3, width=12, groups=4):
    """With biases and norms as if trained."""
    counts = group_counts(depth, groups)
    table = nn.Embedding(rows, H, padding_idx)
    unit = DeFINEEmbedding(table, N, output_widths(N, width, counts), counts, dropout=dropout, std=0.25)
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return unit.eval()


def by_hand(unit, token, groups):
    """One token at a time, one group at a time."""
    e = unit.weight[token]
    previous = e
    for number, layer in enumerate(unit.layers):
        g = max(groups // 2**number, 1)
        made = []
        for group in range(g):
            part = e.reshape(g, -1)[group]
            if number:
                part = torch.cat([part, previous.reshape(g, -1)[group]])
            made.append(part @ layer.linear.weight[group])
        x = torch.cat(made) + layer.linear.bias
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
        previous = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return (previous @ unit.reduce.weight[0] + unit.reduce.bias) / math.sqrt(H)


# -- the unit ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "width", "groups"), [(3, 12, 4), (1, 8, 1), (2, 16, 4), (4, 24, 8), (3, 6, 2)])
def test_forward_is_the_formulas_token_by_token(depth, width, groups):
    unit = a_unit(depth=depth, width=width, groups=groups)
    expected = torch.stack([by_hand(unit, token, groups) for token in range(V)])
    ids = torch.randint(V, (3, 7))
    with torch.no_grad():
        torch.testing.assert_close(unit(ids), expected[ids], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(unit.train()(ids), expected[ids], rtol=1e-4, atol=1e-6)
    parameters = list(unit.parameters())
    scale = torch.randn(3, 7, H)
    wanted = torch.autograd.grad((expected[ids] * scale).sum(), parameters, retain_graph=True)
    for mode in (True, False):
        found = torch.autograd.grad((unit.train(mode)(ids) * scale).sum(), parameters)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "groups", "counts"), [(3, 4, [4, 2, 1]), (4, 6, [6, 3, 1, 1]), (1, 8, [8]), (3, 1, [1, 1, 1])]
)
def test_groups_are_halved(depth, groups, counts):
    assert group_counts(depth, groups) == counts


@pytest.mark.parametrize(
    ("inputs", "width", "counts", "widths"),
    [
        (128, 512, [4, 2, 1], [256, 384, 512]),  # on the line: 128 + 384 l/3
        (8, 12, [4, 2, 1], [12, 12, 12]),  # 9.3 and 10.7 rounded up to a multiple of 4 and of 2
        (12, 30, [6, 3, 1], [18, 24, 30]),
        (10, 16, [5, 2, 1], [20, 14, 16]),  # of 10, which 5 and 2 divide, and of 2
        (8, 24, [4], [24]),
    ],
)
def test_widths_lie_on_a_line(inputs, width, counts, widths):
    assert output_widths(inputs, width, counts) == widths


def test_fresh_rows_have_the_deviation_asked_for():
    counts = group_counts(3, 4)
    unit = DeFINEEmbedding(nn.Embedding(3000, 64), 32, output_widths(32, 128, counts), counts, dropout=0.1, std=0.05)
    nn.init.normal_(unit.weight, std=0.02)
    assert unit.dense_weight().std().item() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_fresh_tables_have_the_variance_of_dense_ones(init):
    config = config_of("marian-two-tables", vocab_size=2000, decoder_vocab_size=2000, d_model=64)
    settings = methods.DeFINE(depth=3, width=64, groups=4, map_dim=16)
    variant = make_variant(config, [settings], task="seq2seq-lm", init=init)
    dense = make_variant(config, [], task="seq2seq-lm", init=init)
    for name in BACKBONES["marian-two-tables"][2]:
        expected = dense.get_submodule(name).weight.std().item()
        assert variant.get_submodule(name).dense_weight().std().item() == pytest.approx(expected, rel=0.1)
    if init == "backbone":
        assert variant.lm_head.dense_weight().std().item() == pytest.approx(config.init_std, rel=0.1)


def test_tokens_have_masks_of_their_own_in_training():
    unit = a_unit(dropout=0.5).train()
    ids = torch.full((2, 50), 3)
    made = unit(ids)
    assert len(made.flatten(0, 1).unique(dim=0)) > 90
    assert torch.equal(unit.eval()(ids)[0, 0], unit(ids)[1, 49])
    with torch.no_grad():
        assert torch.equal(unit(ids)[0, 0], unit(ids)[1, 49])


def test_what_a_batch_repeats_is_made_once(monkeypatch):
    unit = a_unit().train()
    numbers = []
    expand = unit.expand
    monkeypatch.setattr(unit, "expand", lambda rows, *dropout: numbers.append(len(rows)) or expand(rows, *dropout))
    ids = torch.tensor([[3, 5, 3, 3], [5, 3, 7, 5]])
    made = unit(ids)
    assert numbers == [3]
    torch.testing.assert_close(made, unit.dense_weight()[ids])


def test_nothing_leaks_from_token_to_token():
    unit = a_unit()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for training in (True, False):
        unit.train(training)
        changed = ids.clone()
        changed[0, 1] = 9
        difference = (unit(changed) - unit(ids)).abs().amax(-1)
        assert difference[0, 1] > 0.01
        difference[0, 1] = 0
        assert difference.max() < 1e-6
        rows = unit.weight.grad = None
        unit(ids)[1].square().sum().backward()
        rows = unit.weight.grad.abs().amax(1).nonzero().flatten().tolist()
        assert rows == [4, 5, 6]


def test_a_padding_row_gets_no_gradient():
    unit = a_unit(padding_idx=3)
    assert unit.padding_idx == 3
    for training in (True, False):
        unit.train(training)
        unit.weight.grad = None
        ids = torch.tensor([[3, 5], [7, 3]])
        out = unit(ids)
        torch.testing.assert_close(out, unit.dense_weight()[ids])
        out.square().sum().backward()
        assert not unit.weight.grad[3].any()
        assert unit.weight.grad[5].abs().min() > 0


# -- what is kept for inference ----------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """The numbers of rows that units have been run for, one after the other."""
    numbers = []
    expand = DeFINEEmbedding.expand

    def counting(self, rows, dropout=0.0):
        numbers.append(len(rows))
        return expand(self, rows, dropout)

    monkeypatch.setattr(DeFINEEmbedding, "expand", counting)
    return numbers


def test_all_rows_are_made_once_in_slices(made, monkeypatch):
    monkeypatch.setattr(layer_file, "SLICE", 16)
    monkeypatch.setattr(expanded_embedding, "SLICE", 16)
    unit, ids = a_unit(), torch.arange(V)
    with torch.no_grad():
        kept = unit(ids)
        assert made == [16, 16, 8]
        assert torch.equal(unit(ids[:3]), kept[:3])
        assert made == [16, 16, 8]
    torch.testing.assert_close(unit(ids), kept, rtol=1e-5, atol=1e-6)
    assert made == [16, 16, 8, V]


@pytest.mark.parametrize("change", ["step", "load", "assign", "train", "to"])
@pytest.mark.parametrize("which", ["weight", "layers.1.linear.weight", "layers.0.norm.bias", "reduce.bias"])
def test_what_is_kept_is_dropped_when_a_parameter_changes(change, which):
    unit, ids = a_unit(), torch.arange(V)
    with torch.no_grad():
        before = unit(ids)
    parameter = unit.get_parameter(which)
    if change == "step":
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.5).step()
    elif change in ("load", "assign"):
        state = {name: value.clone() for name, value in unit.state_dict().items()}
        state[which] += torch.randn_like(state[which])
        unit.load_state_dict(state, assign=change == "assign")
    else:
        parameter.data.add_(torch.randn_like(parameter))  # cannot be seen by itself
        unit = unit.train().eval() if change == "train" else unit.to(torch.float64)
    with torch.no_grad():
        after = unit(ids)
        assert not torch.allclose(after.float(), before, atol=1e-3)
        torch.testing.assert_close(after, unit.expand(unit.weight), rtol=1e-5, atol=1e-6)


def test_what_is_kept_is_neither_copied_nor_made_again_for_tied_tables(made):
    variant = defined(backbone("marian"))
    tables = [variant.model.shared, variant.model.encoder.embed_tokens, variant.model.decoder.embed_tokens]
    made.clear()
    expected = logits(variant, batch_of("marian"))
    assert made == [V]
    with torch.no_grad():
        assert len({table.cached_table().data_ptr() for table in tables}) == 1
    twin = copy.deepcopy(variant)
    assert made == [V]
    assert torch.equal(logits(twin, batch_of("marian")), expected)
    assert made == [V, V]
    with torch.no_grad():
        twin.model.shared.layers[0].linear.bias.add_(torch.randn(12))
    assert not torch.allclose(logits(twin, batch_of("marian")), expected, atol=1e-3)
    assert torch.equal(logits(variant, batch_of("marian")), expected)


def test_inference_mode_leaves_what_training_can_use():
    unit, ids = a_unit(), torch.arange(V)
    with torch.inference_mode():
        unit(ids)
    with torch.no_grad():
        kept = unit.cached_table()
    assert not kept.is_inference()


def test_precision_under_autocast():
    unit, ids = a_unit(), torch.arange(V)
    with torch.no_grad():
        expected = unit(ids)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert torch.equal(a_copy := copy.deepcopy(unit)(ids), expected), "what is kept was rounded"
        found = unit(ids)
    assert a_copy.dtype == found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert not torch.equal(found, expected), "the products were not under autocast"
    assert unit.bfloat16()(ids).dtype == torch.bfloat16


# -- in a model --------------------------------------------------------------------------------------------------------------


@every_backbone
def test_each_table_has_its_own_unit_and_a_tied_output_a_projection(name):
    native = backbone(name)
    variant = defined(native)
    _, _, own, tied_to = BACKBONES[name]
    units = {id(p): n for n, m in variant.named_modules() if isinstance(m, DeFINEEmbedding) for p in m.parameters()}
    assert len(units) == len(own) * (1 + 3 * 4 + 2)
    output = variant.get_output_embeddings()
    if tied_to is None:
        assert type(output) is nn.Linear
        assert torch.equal(output.weight, native.get_output_embeddings().weight)
    else:
        assert isinstance(output, LowRankOutput)
        table = variant.get_submodule(tied_to)
        assert output.weight is table.weight
        x = torch.randn(3, H)
        expected = x @ (table.weight @ output.projection).T
        torch.testing.assert_close(output(x), expected + (0 if output.bias is None else output.bias))
        if name == "bert":
            assert output.bias is variant.cls.predictions.bias
            assert torch.equal(output.bias, native.cls.predictions.bias)


@every_backbone
def test_the_model_sees_the_rows_of_the_unit(name):
    """The native model with the rows as its tables, and the output as a matrix, has the same logits."""
    native, batch = backbone(name), batch_of(name)
    variant = defined(native)
    by_name = {
        own: torch.stack([by_hand(variant.get_submodule(own), t, 4) for t in range(V)]) for own in BACKBONES[name][2]
    }
    dense = BACKBONES[name][1](config_of(name, tie_word_embeddings=False)).eval()
    dense.load_state_dict(native.state_dict())
    with torch.no_grad():
        for module_name, module in variant.named_modules(remove_duplicate=False):
            if isinstance(module, DeFINEEmbedding):
                source = variant.all_tied_weights_keys.get(f"{module_name}.weight", f"{module_name}.weight")
                dense.get_submodule(module_name).weight.copy_(by_name[source.removesuffix(".weight")])
        output = variant.get_output_embeddings()
        if isinstance(output, LowRankOutput):
            dense.get_output_embeddings().weight.copy_(output.weight @ output.projection)
    torch.testing.assert_close(logits(variant, batch), logits(dense, batch), rtol=1e-4, atol=1e-5)


@every_backbone
def test_merged_generates_reloads_and_grows(name, tmp_path):
    variant, batch = defined(backbone(name)), batch_of(name)
    training_step(variant, batch)
    expected = logits(variant, batch)
    merged = variant.merge()
    torch.testing.assert_close(logits(merged, batch), expected, rtol=1e-5, atol=1e-5)
    assert not merged.config.tie_word_embeddings
    merged.save_pretrained(tmp_path)
    again, info = BACKBONES[name][1].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(logits(again, batch), expected, rtol=1e-5, atol=1e-5)
    if merged.can_generate():
        assert generation_problems(again.eval(), batch) == []
    again.resize_token_embeddings(V + 3, mean_resizing=False)
    found = logits(again, without_labels(again, batch))
    torch.testing.assert_close(found[..., :V], expected, rtol=1e-5, atol=1e-5)
    assert defined(again).get_input_embeddings().weight.shape == (V + 3, N)


# -- from trained weights ----------------------------------------------------------------------------------------------------


def test_the_start_is_of_least_squares():
    table = torch.randn(V, H)
    counts = group_counts(2, 2)
    unit = DeFINEEmbedding(nn.Embedding(V, H), N, output_widths(N, 12, counts), counts, dropout=0.3, std=0.25)
    rows = torch.randn(V, N)
    unit.fit(table, rows, "unit")
    assert torch.equal(unit.weight, rows)
    with torch.no_grad():
        ones = torch.cat([unit.features(rows), torch.ones(V, 1)], dim=1).double()
        left = table.double() - unit.dense_weight()
    expected = table.double() - ones @ torch.linalg.lstsq(ones, table.double()).solution
    torch.testing.assert_close(left, expected, rtol=1e-4, atol=1e-5)
    assert (ones.T @ left).abs().max() < 1e-4  # what is left is orthogonal to all features
    assert left.norm() < 0.9 * table.norm()


def test_the_start_is_the_same_in_slices_and_every_time(monkeypatch):
    native = backbone("marian")
    expected = defined(native)
    monkeypatch.setattr(layer_file, "SLICE", 16)
    monkeypatch.setattr(expanded_embedding, "SLICE", 16)
    torch.manual_seed(99)
    found = defined(native)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.model.shared.layers[1].linear.weight, expected.model.shared.layers[1].linear.weight)


def test_the_start_is_nearer_than_fresh_weights_and_its_output_the_nearest():
    native = backbone("marian-two-tables")
    variant = defined(native, width=32)
    fresh = make_variant(native.config, [methods.DeFINE(**SETTINGS | {"width": 32})], task="seq2seq-lm")
    for name in BACKBONES["marian-two-tables"][2]:
        dense = native.get_submodule(name).weight
        errors = [(each.get_submodule(name).dense_weight() - dense).norm() / dense.norm() for each in (variant, fresh)]
        assert errors[0] < 0.6 < errors[1]
    dense = native.lm_head.weight.detach().double()
    error = (variant.lm_head.dense_weight().double() - dense).norm()
    torch.testing.assert_close(error, torch.linalg.svdvals(dense)[N:].norm(), rtol=1e-5, atol=0)


def test_more_features_than_rows_are_no_difficulty():
    native = backbone("gpt2")
    variant = defined(native, width=64)
    torch.testing.assert_close(variant.transformer.wte.dense_weight(), native.transformer.wte.weight, rtol=0, atol=0.02)


# -- freezing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["marian", "bert", "gpt2", "llama"])
def test_random_embeddings_are_a_working_unit_that_is_not_stored(name, tmp_path):
    variant = defined(backbone(name), methods.Freeze(embeddings="random", seed=5))
    unit = variant.get_input_embeddings()
    assert not any(parameter.requires_grad for parameter in unit.parameters())
    assert variant.get_output_embeddings().projection.requires_grad
    made = unit.dense_weight()
    # About as long as a table's, U(±sqrt(3/H)), before it a GELU.
    assert 0.3 < made.square().mean().item() * H < 0.6
    assert torch.equal(unit.layers[0].norm.weight, torch.ones(12))
    assert not unit.layers[0].norm.bias.any()
    seeded = [n for n in variant.seeded_tensors if n.startswith(f"{BACKBONES[name][2][0]}.")]
    assert len(seeded) == 15
    expected = logits(variant, batch_of(name))
    variant.save_pretrained(tmp_path)
    again, info = AUTO_CLASSES[task_of(name)].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(again, batch_of(name)), expected)
    before = made.clone()
    training_step(again, batch_of(name))
    assert torch.equal(again.get_input_embeddings().dense_weight(), before)


def test_frozen_embeddings_keep_their_values():
    variant = defined(backbone("bert"), methods.Freeze(embeddings="frozen"))
    unit = variant.bert.embeddings.word_embeddings
    assert not any(value for name, value in trainability(variant).items() if "word_embeddings" in name)
    before = unit.dense_weight().clone()
    training_step(variant, batch_of("bert"))
    assert torch.equal(unit.dense_weight(), before)


# -- resizing ----------------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("rows", [47, 33])
def test_resizing_adds_and_removes_rows_of_the_table(name, rows, tmp_path):
    variant, batch = defined(backbone(name)), batch_of(name)
    rest = without_labels(variant, batch)
    before = logits(variant, rest)  # what is kept has V rows
    table = variant.get_input_embeddings().weight.clone()
    assert variant.resize_token_embeddings(rows, mean_resizing=False) is variant.get_input_embeddings()
    if "two" in name or name == "marian-untied":
        variant.resize_decoder_token_embeddings(rows)
    kept = min(rows, V)
    for own in BACKBONES[name][2]:
        assert variant.get_submodule(own).weight.shape == (rows, N)
    assert torch.equal(variant.get_input_embeddings().weight[:kept], table[:kept])
    torch.testing.assert_close(logits(variant, rest)[..., :kept], before[..., :kept], rtol=1e-5, atol=1e-5)
    batch["input_ids"][0, 0] = rows - 1
    found = logits(variant, batch)
    assert found.shape[-1] == rows
    assert variant.get_output_embeddings().weight.shape[0] == rows
    variant.save_pretrained(tmp_path)
    again, info = AUTO_CLASSES[task_of(name)].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(again, batch), found)
    torch.testing.assert_close(logits(again.merge(), batch), found, rtol=1e-5, atol=1e-5)
    training_step(again, batch)
    assert not torch.equal(logits(again, batch), found)


def test_a_trimmed_vocabulary_keeps_its_rows():
    native = backbone("marian")
    keep = [*range(26), 31, 39]
    variant = make_variant(native, [methods.VocabularyTrimming(keep=keep), methods.DeFINE(**SETTINGS)])
    assert variant.model.shared.weight.shape == (len(keep), N)
    defined = make_variant(native, [methods.DeFINE(**SETTINGS)])
    trimmed = make_variant(defined, [methods.VocabularyTrimming(keep=keep)])
    assert torch.equal(trimmed.model.shared.weight, defined.model.shared.weight[keep])


# -- parameters --------------------------------------------------------------------------------------------------------------


def on_meta(config, *applied, task="seq2seq-lm"):
    with torch.device("meta"):
        return count_parameters(make_variant(config, list(applied), task=task))


def unit_parameters(n, widths, counts, hidden):
    """Of a unit, without its table."""
    inputs = [n, *(n + width for width in widths[:-1])]
    groups = sum(i * o // g + o for i, o, g in zip(inputs, widths, counts, strict=True))
    return groups + 2 * sum(widths) + widths[-1] * hidden + hidden


def test_the_translator_of_the_paper():
    """English to German: three matrices of about 31,160 rows; two tables of 512 columns to 128 save 23.93 million."""
    v, d, n = 31_160, 512, 128
    config = MarianConfig(vocab_size=v, decoder_vocab_size=v, d_model=d, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
                          encoder_layers=6, decoder_layers=6, pad_token_id=0, **TWO_TABLES, **UNTIED)  # fmt: skip
    dense = on_meta(config)
    assert dense.total / 1e6 == pytest.approx(92, abs=0.1)
    counts = on_meta(config, methods.DeFINE(depth=3, width=512, groups=4, map_dim=n))
    units = 2 * unit_parameters(n, [256, 384, 512], [4, 2, 1], d)
    saved = 2 * v * (d - n)
    assert round(saved / 1e6, 2) == 23.93
    assert dense.total - counts.total == saved - units
    assert counts.by_component["embeddings"].total == 2 * v * n + units
    assert counts.by_component["head"] == dense.by_component["head"]


def test_a_tied_table_costs_one_unit_and_one_projection():
    v, d = 1000, 64
    config = BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": v, "hidden_size": d})
    dense = on_meta(config, task="masked-lm")
    counts = on_meta(config, methods.DeFINE(depth=2, width=32, groups=2, map_dim=16), task="masked-lm")
    unit = unit_parameters(16, [24, 32], [2, 1], d)
    assert dense.total - counts.total == v * (d - 16) - unit - 16 * d
    assert counts.by_component["head"].total - dense.by_component["head"].total == 16 * d
    config = config_of("marian", vocab_size=v, decoder_vocab_size=v, d_model=d)
    dense, counts = on_meta(config), on_meta(config, methods.DeFINE(depth=2, width=32, groups=2, map_dim=16))
    assert dense.total - counts.total == v * (d - 16) - unit - 16 * d


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, r"DeFINE\(depth=0\): must be an integer of at least 1"),
        ({"width": 12.0}, r"DeFINE\(width=12\.0\): must be an integer"),
        ({"groups": True}, r"DeFINE\(groups=True\): must be an integer"),
        ({"depth": 65}, r"DeFINE\(depth=65\): must be in 1\.\.64"),
        ({"dropout": 1.0}, r"DeFINE\(dropout=1\.0\): must be a share of at least 0 and below 1"),
        (
            {"map_dim": 10},
            r"DeFINE\(map_dim=10, groups=4\): must be a multiple of 4, for layers of \[4, 2, 1\] groups; choose from \[8, 12\]",
        ),
        ({"map_dim": 3}, r"map_dim=3, groups=4\): must be a multiple of 4, .*; choose from \[4\], or other groups"),
        ({"map_dim": 12, "groups": 5}, r"map_dim=12, groups=5\): must be a multiple of 10, for layers of \[5, 2, 1\]"),
        ({"depth": 2, "width": 13}, r"width=13, groups=4\): must be a multiple of 2, .*; choose from \[12, 14\]"),
        ({"map_dim": 20}, r"DeFINE\(map_dim=20\): must be in 1\.\.16, the hidden size of this marian"),
        ({"width": 260}, r"DeFINE\(width=260\): must be in 1\.\.256, 16 times the hidden size of this marian"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        defined(backbone("marian"), **settings)


def test_a_table_is_replaced_once():
    native = backbone("gpt2")
    with pytest.raises(ValueError, match=r"\Amethod 'define': 'transformer.wte' is a DeFINEEmbedding already, .*\Z"):
        make_variant(defined(native), [methods.DeFINE(**SETTINGS)])
    with pytest.raises(ValueError, match=r"\Amethod 'define': 'transformer.wte' is a LowRankEmbedding already, .*\Z"):
        make_variant(native, [methods.FactorizedEmbedding(rank=4), methods.DeFINE(**SETTINGS)])
    message = r"\Amethod 'define': another method has given 'bert.embeddings.word_embeddings' rows of 4 numbers, .*\Z"
    with pytest.raises(ValueError, match=message):
        make_variant(backbone("bert"), [methods.FactorizedEmbedding(rank=4), methods.DeFINE(**SETTINGS)])
