"""HeadPruning: pruned is masked, whatever is left of an attention; caches, sizes, what it merges to, and what it refuses."""

import copy
import pickle

import pytest
import torch
from support.cases import BASELINES
from support.models import build, differences, native, outputs, perturbed
from support.training import training_step
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.analysis import choose_ranks, linear_latencies
from hf_freeze.layers import NoAttention
from hf_freeze.methods import HeadPruning, LayerSharing, LowRank, TensorTrain

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])
MARIAN = next(case for case in BASELINES if case.architecture.model_type == "marian")
LLAMA = next(case for case in BASELINES if case.architecture.model_type == "llama")


def heads_of(case):
    """Attention -> its number of heads, and how many of them share keys."""
    config = native(case).config
    found = case.architecture.attentions(config)
    return {name: (a.head_count(config), a.group_size(config)) for name, a in found.items()}


def settings(case):
    """Name -> attention -> the heads to remove."""
    heads = heads_of(case)
    first, last = next(iter(heads)), list(heads)[-1]
    group = {name: list(range(size)) for name, (_, size) in heads.items()}
    every = {name: list(range(number)) for name, (number, _) in heads.items()}
    return {
        "the first of each": group,
        "the last of one": {last: every[last][-heads[last][1] :]},
        "a whole attention": {first: every[first]},
        "all": every,
        "a whole attention and one of another": {first: every[first]} | ({last: group[last]} if first != last else {}),
    }


every_setting = pytest.mark.parametrize("setting", list(settings(MARIAN)))


def pruned(case, setting):
    removed = settings(case)[setting]
    return make_variant(native(case), [HeadPruning(heads=removed)]).eval(), removed


@torch.no_grad()
def masked(case, removed):
    """The backbone, whose output projections ignore these heads."""
    backbone = native(case).eval()
    for name, heads in removed.items():
        attention = case.architecture.attentions(backbone.config)[name]
        output = backbone.base_model.get_submodule(attention.o)
        weight = output.weight if isinstance(output, Conv1D) else output.weight.T  # a view: (inputs, outputs)
        size = weight.shape[0] // heads_of(case)[name][0]
        for head in heads:
            weight[head * size : (head + 1) * size] = 0
    return backbone


@every_backbone
@every_setting
def test_pruned_is_masked(case, setting, tmp_path):
    model, removed = pruned(case, setting)
    expected = outputs(masked(case, removed), case.batch())
    assert differences(outputs(model, case.batch()), expected, 1e-5) == []
    merged = model.merge()
    assert type(merged) is case.native_class
    assert differences(outputs(merged, case.batch()), expected, 1e-5) == []
    model.save_pretrained(tmp_path)
    reloaded, info = case.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]  # noqa: PT018
    assert differences(outputs(reloaded, case.batch()), outputs(model, case.batch())) == []
    training_step(model, case.batch())
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch()), 1e-5) == []


@every_backbone
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_implementations_of_attention_agree(case, implementation):
    model, removed = pruned(case, "a whole attention and one of another")
    model.set_attn_implementation(implementation)
    assert differences(outputs(model, case.batch()), outputs(masked(case, removed), case.batch()), 1e-5) == []


@pytest.mark.parametrize("setting", ["the first of each", "a whole attention", "all"])
@pytest.mark.parametrize(
    "case",
    [case for case in BASELINES if case.native_class.can_generate()],
    ids=lambda case: case.architecture.model_type,
)
def test_it_generates_with_every_cache_as_the_masked_model(case, setting):
    """What is left of the first layer still has to tell a cache how long the text is."""
    model, removed = pruned(case, setting)
    backbone = masked(case, removed)
    inputs = {name: value[:1] for name, value in case.batch().items() if name in ("input_ids", "attention_mask")}
    length = {"max_new_tokens": 7, "do_sample": False, "min_new_tokens": 5}
    for search in ({}, {"num_beams": 3}):
        expected = backbone.generate(**inputs, **length, **search).tolist()
        for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
            assert model.generate(**inputs, **length, **search, **cache).tolist() == expected, (search, cache)


@every_backbone
def test_it_costs_less(case):
    """A head has three matrices of H x D with D biases, or two thirds of a group's share of them, and one of D x H."""
    model, removed = pruned(case, "the first of each")
    backbone = native(case)
    expected = 0
    for name, attention in case.architecture.attentions(backbone.config).items():
        modules = [backbone.base_model.get_submodule(linear) for linear in attention.linears]
        of_output = modules[-1].weight.numel()
        of_inputs = sum(p.numel() for module in modules[:-1] for p in module.parameters())
        heads, group = heads_of(case)[name]
        assert heads % group == 0
        expected += (of_output + of_inputs) * len(removed[name]) // heads
    before, after = count_parameters(backbone), count_parameters(model)
    assert before.total - after.total == expected
    assert before.by_component["attention"].total - after.by_component["attention"].total == expected


@every_backbone
def test_what_is_left_of_a_whole_attention_is_a_bias(case):
    model, _ = pruned(case, "all")
    backbone = native(case)
    biases = 0
    for attention in case.architecture.attentions(backbone.config).values():
        assert isinstance(model.base_model.get_submodule(attention.module), NoAttention)
        bias = backbone.base_model.get_submodule(attention.o).bias
        biases += 0 if bias is None else bias.numel()
    assert count_parameters(model).by_component["attention"].total == biases


@every_backbone
@torch.no_grad()
def test_recorded_weights_have_the_numbers_of_the_layers(case):
    """Also of an attention without heads, whose weights are those of none."""
    model, _ = pruned(case, "a whole attention and one of another")
    model, merged = pickle.loads(pickle.dumps(model)), model.merge()
    for each in (model, merged):
        each.set_attn_implementation("eager")
    recorded, expected = (each.eval()(**case.batch(), output_attentions=True) for each in (model, merged))
    names = [name for name in expected if name.endswith("attentions")]
    assert names
    for name in names:
        for weights, whole in zip(recorded[name], expected[name], strict=True):
            assert (weights.shape[0], *weights.shape[2:]) == (whole.shape[0], *whole.shape[2:])
    assert any(weights.shape[1] == 0 for name in names for weights in recorded[name])


FALCON = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "multi_query": True}
FALCON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
GROUPED |= {"head_dim": 8, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PHI3 = GROUPED | {"hidden_size": 64}  # its heads are read from the config, and its projections are one


@pytest.mark.parametrize(
    ("model_type", "fields", "setting"),
    [
        ("falcon", FALCON, {"heads": {"decoder.1.self": [0, 3, 5]}}),  # one group
        ("falcon", FALCON, {"share": 0.5}),
        ("llama", GROUPED, {"heads": {"decoder.0.self": [1, 6], "decoder.1.self": [0, 1, 2, 3, 5]}}),
        ("phi3", PHI3, {"heads": {"decoder.1.self": [0, 1, 6, 7]}}),
    ],
    ids=["multi-query", "multi-query, half", "grouped", "fused"],
)
@torch.no_grad()
def test_every_group_may_lose_the_same_number_of_heads(model_type, fields, setting, tmp_path):
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    for parameter in backbone.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    model = make_variant(backbone, [HeadPruning(**setting)]).eval()
    ids = torch.tensor([[5, 9, 3, 7, 6], [8, 4, 6, 10, 11]])
    attentions = model.architecture.attentions(backbone.config)
    removed = setting.get("heads") or {}
    for name in attentions if not removed else ():  # by hand: the smallest product of the norms of values and outputs
        output = backbone.base_model.get_submodule(attentions[name].o).weight
        removed[name] = output.unflatten(1, (8, -1)).transpose(0, 1).flatten(1).norm(dim=1).argsort()[:4].tolist()
    for name, heads in removed.items():
        weight = backbone.base_model.get_submodule(attentions[name].o).weight  # (outputs, heads x 8)
        for head in heads:
            weight[:, head * 8 : (head + 1) * 8] = 0
    expected = backbone(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    merged = model.merge()
    assert type(merged) is type(backbone)
    torch.testing.assert_close(merged.eval()(ids).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert count_parameters(model).stored < count_parameters(backbone).stored
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    generated = backbone.generate(ids, **settings)
    assert torch.equal(model.generate(ids, **settings), generated)
    assert torch.equal(model.generate(ids, **settings, use_cache=False), generated)


@torch.no_grad()
def test_thinned_groups_lose_more_heads_by_their_new_numbers():
    config = AutoConfig.for_model("llama", **GROUPED)
    once = make_variant(config, [HeadPruning(heads={"decoder.0.self": [0, 2, 4, 7]})], task="causal-lm")
    again = make_variant(once, [HeadPruning(heads={"decoder.0.self": [0, 3]})]).eval()
    attention = again.base_model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features) == (2 * 8, 2 * 8)
    assert torch.equal(attention.q_proj.weight, once.base_model.layers[0].self_attn.q_proj.weight[8:24])
    ids = torch.tensor([[5, 9, 3]])
    torch.testing.assert_close(again.merge().eval()(ids).logits, again(ids).logits)


@every_backbone
def test_a_share_keeps_the_heads_of_the_largest_magnitude(case):
    """One head, or group of heads, of each attention, picked one by one here."""
    backbone = native(case)
    kept = {}
    for name, attention in case.architecture.attentions(backbone.config).items():
        heads, group = heads_of(case)[name]
        value, output = (backbone.base_model.get_submodule(linear) for linear in (attention.v, attention.o))
        value, output = (
            m.weight.T if isinstance(m, Conv1D) else m.weight for m in (value, output)
        )  # (outputs, inputs)
        size = output.shape[1] // heads
        value = value[-heads // group * size :]
        scores = []
        for first in range(0, heads, group):
            rows = value[first // group * size : (first // group + 1) * size]
            columns = [output[:, head * size : (head + 1) * size] for head in range(first, first + group)]
            scores.append((sum(float(rows.detach().norm() * column.detach().norm()) for column in columns), first))
        best = max(scores)[1]
        kept[name] = [head for head in range(heads) if not best <= head < best + group]
    model = make_variant(native(case), [HeadPruning(share=0.01)])
    assert differences(outputs(model, case.batch()), outputs(masked(case, kept), case.batch()), 1e-5) == []


def test_layers_limits_it():
    model = make_variant(native(MARIAN), [HeadPruning(share=0.5, layers={"decoder": [1]})])
    shapes = {name: p.shape[0] for name, p in model.named_parameters() if name.endswith("q_proj.weight")}
    assert {name for name, rows in shapes.items() if rows == 8} == {
        f"model.decoder.layers.1.{kind}.q_proj.weight" for kind in ("self_attn", "encoder_attn")
    }


def test_a_second_one_uses_the_new_numbers():
    llama = copy.deepcopy(LLAMA.architecture.tiny) | {"num_attention_heads": 4, "num_key_value_heads": 4}
    backbone = perturbed(LLAMA.native_class(type(native(LLAMA).config)(**llama))).eval()
    name = "decoder.0.self"
    once = make_variant(copy.deepcopy(backbone), [HeadPruning(heads={name: [0, 2]})])
    twice = make_variant(make_variant(backbone, [HeadPruning(heads={name: [0]})]), [HeadPruning(heads={name: [1]})])
    assert differences(outputs(twice, LLAMA.batch()), outputs(once, LLAMA.batch())) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"HeadPruning\(heads=None, share=None, penalty=None\): give one of them"),
        ({"heads": {"encoder.0.self": [0]}, "share": 0.5}, "give one of them"),
        ({"heads": {}}, r"heads=\{\}\): must be a dict such as \{'encoder\.0\.self': \[1, 3\]\}"),
        ({"heads": {"encoder.0.self": []}}, "must be a list of different heads, at least one, in ascending order"),
        ({"heads": {"encoder.0.self": [1, 0]}}, "in ascending order"),
        ({"heads": {"encoder.0.self": [True]}}, "must be a list of different heads"),
        ({"heads": {"encoder.0.self": [-1]}}, "must be a list of different heads"),
        ({"heads": {"encoder.0.self": [0]}, "layers": {"encoder": [0]}}, "heads names the attentions already"),
        ({"share": 1.5}, r"HeadPruning\(share=1\.5\): must be a share in 0\.\.1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadPruning(**arguments)


@pytest.mark.parametrize(
    ("case", "methods", "message"),
    [
        (
            MARIAN,
            [HeadPruning(heads={"encoder.0.cross": [0]})],
            r"no attention 'encoder\.0\.cross' in marian; choose from",
        ),
        (MARIAN, [HeadPruning(heads={"encoder.0.self": [2]})], r"head 2 of 'encoder\.0\.self': must be in 0\.\.1"),
        (MARIAN, [HeadPruning(share=0.5, layers={"encoder": [2]})], "no layer 2 in stack 'encoder'"),
        (MARIAN, [HeadPruning(share=0.5, layers={})], "names no layer: leave it out for all"),
        (
            LLAMA,
            [HeadPruning(heads={"decoder.0.self": [1]})],
            r"share keys and values, \[\[0, 1\], \[2, 3\]\], \[1, 2\] would be left; remove whole groups, or the same number",
        ),
        (
            MARIAN,
            [TensorTrain(rank=2, components=["attention"]), HeadPruning(share=0.5)],
            "is a TensorTrainLinear already.*put 'head_pruning' before that method",
        ),
        (
            MARIAN,
            [
                HeadPruning(heads={"encoder.0.self": [0, 1]}),
                LowRank(rank={"encoder.layers.0.self_attn.q_proj": 2}, components=["attention"]),
            ],
            "'low_rank': an earlier method has removed 'encoder.layers.0.self_attn.q_proj'; leave that layer out",
        ),
        (MARIAN, [HeadPruning(heads={"encoder.0.self": [0]}), LayerSharing()], "have different shapes"),
        (
            MARIAN,
            [HeadPruning(heads={"encoder.0.self": [0, 1]}), HeadPruning(heads={"encoder.0.self": [0]})],
            "an earlier method has removed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(case, methods, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_variant(native(case), methods)
    assert "\n" not in str(raised.value)


@every_backbone
def test_what_is_gone_has_no_latency_and_no_rank(case):
    model, _ = pruned(case, "all")
    assert sum(one.count for one in linear_latencies(model, [1])) == len(
        [name for _, _, name in case.architecture.linears(model.config, "ffn")]
    )
    assert multiply_adds(model, length=4).by_component["attention"].forward == 0
    with pytest.raises(ValueError, match="have removed all of these linears"):
        choose_ranks(model, LowRank, energy=0.9, components=["attention"])


def test_layers_that_have_lost_the_same_heads_may_share():
    heads = {f"encoder.{layer}.self": [0, 1] for layer in (0, 1)}
    model = make_variant(native(MARIAN), [HeadPruning(heads=heads), LayerSharing(stacks=["encoder"])])
    assert outputs(model, MARIAN.batch())
    assert build(MARIAN) is not None
