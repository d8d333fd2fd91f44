"""Longer chains of methods, as a search for a small model makes them: from a trained model, in several orders, and once more on
the variant. Each works like a pair (CONTRIBUTING.md, 7), and pruned factors are the rows of the dense product."""

from dataclasses import replace

import pytest
import torch
from support.cases import ALL, ARCHITECTURES, native_config, plain
from support.models import (
    add_noise,
    build,
    build_anew,
    differences,
    file_sizes,
    native,
    outputs,
    reload,
    reload_problems,
    trainability,
    trainability_before_training,
)
from support.training import training_step
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import stored_bytes
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers import LowRankLinear, QuantizedLowRankLinear
from hf_freeze.layers.schemes import Scheme
from hf_freeze.methods import (
    FactorizedEmbedding,
    FFNPruning,
    Freeze,
    HeadMask,
    HeadPruning,
    LayerSelection,
    LayerSharing,
    LowRank,
    Quantize,
    VocabularyTrimming,
)

LINEARS = ["ffn", "attention"]
TRIMMING, TABLE, LAYERS = (
    VocabularyTrimming(keep=[*range(26), 31, 39]),
    FactorizedEmbedding(rank=4),
    LayerSelection(share=0.5),
)
HEADS, NEURONS, SHARING = HeadPruning(share=0.5), FFNPruning(width=10), LayerSharing()
FACTORS, FEWER = LowRank(rank=4, components=LINEARS), LowRank(rank=2, components=LINEARS)
INT8 = Quantize(scheme="int8", components=[*LINEARS, "embeddings"])
NF4 = Quantize(scheme="nf4", components=[*LINEARS, "embeddings"])

CHAINS = {
    "all": [TRIMMING, TABLE, LAYERS, HEADS, NEURONS, FACTORS, SHARING, INT8],
    "all, factors first": [FACTORS, TABLE, HEADS, NEURONS, TRIMMING, SHARING, LAYERS, NF4],
    "all, int8 before pruning": [TABLE, FACTORS, SHARING, INT8, LAYERS, TRIMMING, HEADS, NEURONS],
    "ranks twice": [FACTORS, HEADS, FEWER, TABLE, FactorizedEmbedding(rank=3), INT8],
    "gates, then heads": [HeadMask(), HEADS, LowRank(rank=4)],
    "int8 alone, then pruning": [INT8, HEADS, NEURONS, TRIMMING],
}


def numbered(architecture, config):
    """Chains in which a setting names layers, of which some are removed later."""
    names = [name for component in LINEARS for _, _, name in architecture.linears(config, component)]
    ranks = LowRank(rank={name: 1 + number % 2 for number, name in enumerate(names)}, components=LINEARS)
    attentions = architecture.attentions(config)
    group = {name: list(range(attention.group_size(config))) for name, attention in attentions.items()}
    last = {stack: [depth - 1] for stack, depth in architecture.depths(config).items()}
    first, *_ = attentions
    whole = HeadPruning(heads={first: list(range(attentions[first].head_count(config)))})
    pruned = [HeadPruning(heads=group), FFNPruning(keep={block: [0, 2, 3] for block in architecture.ffns(config)})]
    keep_last = LayerSelection(keep=last)
    return {
        "heads, neurons and ranks by layer": [*pruned, ranks, keep_last, INT8],
        "layers": [
            LowRank(rank=4, layers=last),
            Quantize(scheme="int8", components=["attention"], layers=last),
            keep_last,
        ],
        "layers that go": [
            LowRank(rank=4, layers=last),
            Freeze(attention="random", layers=last),
            LayerSelection(keep={stack: [0] for stack in last}),
        ],
        "a seed before": [Freeze(ffn="random", layers=last, seed=3), keep_last],
        "an attention without heads": [FACTORS, whole, HEADS, INT8],
        "without heads first": [whole, HEADS, FACTORS, INT8],
    }


def cases():
    """Each chain on one of the architectures by turns, or on each, in `make test-all`."""
    for number, architecture in enumerate(ARCHITECTURES.values()):
        for config in architecture.tiny_configs if ALL else list(architecture.tiny_configs)[number % 2 :][:1]:
            place = replace(plain(architecture), config=config)
            chains = CHAINS | numbered(architecture, native_config(architecture, config))
            for position, (name, chain) in enumerate(chains.items()):
                if not ALL and (number + position) % len(ARCHITECTURES):
                    continue
                if architecture.normed_embeddings is not None and name != "all":
                    # It could be factorised only once, and not be merged.
                    chain = [method for method in chain if not isinstance(method, FactorizedEmbedding)]
                yield pytest.param(
                    replace(place, methods=tuple(chain)), id=f"{architecture.model_type}-{config}-{name}"
                )


@pytest.mark.parametrize("case", list(cases()))
def test_a_chain_works(case, tmp_path):
    batch = case.batch()
    model, in_turn = build_anew(case), native(replace(case, methods=()))
    for method in case.methods:
        in_turn = make_variant(in_turn, [method])
    assert in_turn.config.methods == model.config.methods
    assert differences(outputs(in_turn, batch), outputs(model, batch)) == []
    with torch.device("meta"):  # the structure follows from the config
        empty = make_variant(native_config(case.architecture, case.config), list(case.methods), task=case.task)
    assert shapes(empty) == shapes(model)
    if case.architecture.normed_embeddings is None or TABLE not in case.methods:
        assert differences(outputs(model.merge(), batch), outputs(model, batch), 1e-5) == []
    if any(trainability(model).values()):
        training_step(model, batch)
    model.save_pretrained(tmp_path)
    assert file_sizes(tmp_path)[0] == stored_bytes(model)
    reloaded, info = reload(case, tmp_path)
    grads = trainability_before_training(model)
    assert reload_problems(reloaded, info, outputs(model, batch), grads, batch) == []


def shapes(model):
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("prunes", ["heads", "neurons"])
def test_pruned_factors_are_rows_and_columns_of_their_product(architecture, prunes):
    """Pruning factors, and pruning the dense model that merging them gives, leave the same model."""
    place = plain(architecture)
    factors = build(replace(place, methods=(FACTORS,)))
    if prunes == "heads":
        config = factors.config
        heads = {name: list(range(a.group_size(config))) for name, a in architecture.attentions(config).items()}
        pruning = HeadPruning(heads=heads)
    else:
        pruning = FFNPruning(keep={block: [0, 3, 5] for block in architecture.ffns(factors.config)})
    pruned, expected = make_variant(factors, [pruning]), make_variant(factors.merge(), [pruning])
    assert differences(outputs(pruned, place.batch()), outputs(expected, place.batch()), 1e-5) == []
    assert stored_bytes(pruned) < stored_bytes(factors)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_removing_layers_after_settings_by_layer_is_removing_them_before(architecture):
    """LayerSelection and then the settings of the layers that stay, by their new numbers, give the same model."""
    place = plain(architecture)
    backbone = native(place)
    depths = architecture.depths(backbone.config)
    last = {stack: [depth - 1] for stack, depth in depths.items()}
    per_layer = {
        (stack, layer): FFNPruning(keep={f"{stack}.{layer}.ffn": [0, 3 + layer]})
        for stack, depth in depths.items()
        for layer in range(depth)
    }
    keep = LayerSelection(keep=last)
    after = make_variant(backbone, [*per_layer.values(), keep])
    new = [FFNPruning(keep={f"{stack}.0.ffn": [0, 3 + layer]}) for stack, (layer,) in last.items()]
    before = make_variant(backbone, [keep, *new])
    assert differences(outputs(after, place.batch()), outputs(before, place.batch())) == []
    assert [m["method"] for m in after.config.methods[:-1]] == ["ffn_pruning"] * len(per_layer)


def test_quantised_tables_keep_the_rows_of_kept_tokens():
    place = plain(ARCHITECTURES["marian"])
    for before in ([INT8], [TABLE, INT8], [TABLE, Quantize(scheme="int8", components=["embeddings"])]):
        whole = make_variant(native(place), before)
        trimmed = make_variant(whole, [TRIMMING])
        ids = torch.tensor(TRIMMING.keep)
        expected = whole.get_input_embeddings()(ids)
        torch.testing.assert_close(trimmed.get_input_embeddings()(torch.arange(len(ids))), expected, rtol=0, atol=0)


@pytest.mark.parametrize("before", [[NF4], [FactorizedEmbedding(rank=64), NF4]], ids=["table", "factors"])
def test_tables_of_four_bits_with_whole_blocks_can_be_trimmed(before, tmp_path):
    config = AutoConfig.for_model(
        "gpt2", vocab_size=40, n_embd=128, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    whole = make_variant(AutoModelForCausalLM.from_config(config), before).eval()
    trimmed = make_variant(whole, [TRIMMING]).eval()
    ids = torch.tensor([[3, 25, 26, 27]])
    expected = whole(torch.tensor(TRIMMING.keep)[ids]).logits[..., TRIMMING.keep]
    torch.testing.assert_close(trimmed(ids).logits, expected, rtol=1e-5, atol=1e-5)
    trimmed.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reloaded(ids).logits, trimmed(ids).logits, rtol=0, atol=0)


def test_four_bits_across_rows_cannot_be_trimmed():
    message = "'model.shared' is a QuantizedEmbedding already.*put 'vocabulary_trimming' before that one"
    with pytest.raises(ValueError, match=message):
        make_variant(native(plain(ARCHITECTURES["marian"])), [NF4, TRIMMING])


def test_a_larger_rank_is_refused():
    with pytest.raises(ValueError, match=r"rank=5: must be in 1\.\.4, the rank that it has already"):
        make_variant(native(plain(ARCHITECTURES["marian"])), [FACTORS, LowRank(rank=5)])


def test_the_mean_of_shared_factors_is_that_of_their_products():
    """At full rank nothing is lost, so that the order does not matter."""
    place = plain(ARCHITECTURES["gpt2"])
    full = LowRank(rank=16, components=["ffn"])
    one, other = (make_variant(native(place), chain) for chain in ([full, SHARING], [SHARING, full]))
    assert differences(outputs(one, place.batch()), outputs(other, place.batch()), 1e-5) == []


# What is refused of the methods that a search combines, with the settings above, on a model with trained weights. A row is the
# first method, and what may not follow it.
REFUSED = {
    # Quantise last: decompositions, and means of layers, need the weights themselves. One scheme for each weight.
    "quantize": {"factorized_embedding", "low_rank", "layer_sharing", "quantize"},
    # The setting keeps ids that are gone.
    "vocabulary_trimming": {"vocabulary_trimming"},
}


def test_what_a_search_cannot_combine():
    place = plain(ARCHITECTURES["gpt2"])
    methods = (TRIMMING, TABLE, LAYERS, HEADS, NEURONS, FACTORS, SHARING, INT8)
    backbone, refused = native(place), {}
    for first in methods:
        model = make_variant(backbone, [first])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for second in methods:
            try:
                variant = make_variant(model, [second])
            except ValueError:
                refused.setdefault(first.name, set()).add(second.name)
                continue
            after = model.state_dict()
            assert [name for name in before if not torch.equal(before[name], after[name])] == []
            assert not memory(model) & memory(variant)
    assert refused == REFUSED


def memory(model):
    return {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values() if tensor.numel()}


def test_pruned_factors_may_have_more_than_the_full_rank():
    """The mean of shared layers is then of full rank, with zeros in the rest of the factors."""
    place = plain(ARCHITECTURES["gpt2"])
    pruned = make_variant(native(place), [LowRank(rank=16, components=["attention"]), HeadPruning(share=0.5)])
    assert pruned.base_model.h[0].attn.c_proj.in_features < 16
    shared = make_variant(pruned, [LayerSharing()])
    expected = make_variant(make_variant(pruned.merge(), [HeadPruning(share=0.5)]), [LayerSharing()])
    assert differences(outputs(shared, place.batch()), outputs(expected, place.batch()), 1e-5) == []


def test_a_random_layer_is_that_of_the_definition_after_other_layers_are_gone():
    place = plain(ARCHITECTURES["marian"])
    last = {"encoder": [1], "decoder": [1]}
    random = make_variant(native(place), [Freeze(ffn="random", layers=last, seed=3)])
    fewer = make_variant(random, [FFNPruning(keep={"encoder.1.ffn": [2, 5]}), LayerSelection(keep=last)])
    assert "model.encoder.layers.0.fc1.weight" in fewer.seeded_tensors
    expected = random.base_model.encoder.layers[1].fc1.weight[[2, 5]]
    torch.testing.assert_close(fewer.base_model.encoder.layers[0].fc1.weight, expected, rtol=0, atol=0)
    expected = random.base_model.decoder.layers[1].fc2.weight
    torch.testing.assert_close(fewer.base_model.decoder.layers[0].fc2.weight, expected, rtol=0, atol=0)


def test_a_setting_by_layer_holds_for_the_copies_of_the_layer():
    """LayerSharing(depth=) repeats layers. Freeze has always meant the layers that there are then."""
    factors = LowRank(rank=4, layers={"encoder": [1]})
    sharing = LayerSharing(stacks=["encoder"], groups=2, depth={"encoder": 4})
    place = plain(ARCHITECTURES["marian"])
    model = make_variant(native(place), [factors, Freeze(ffn="frozen", layers={"encoder": [0, 1]}), sharing])
    assert differences(outputs(model.merge(), place.batch()), outputs(model, place.batch()), 1e-5) == []
    frozen = [not layer.fc1.bias.requires_grad for layer in model.base_model.encoder.layers]
    assert frozen == [True, True, False, False]


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_quantised_factors_are_close_to_the_factors(scheme):
    """Columns of unlike size, as those of a truncated decomposition, do not lose the small ones."""
    torch.manual_seed(0)
    down, up = torch.randn(8, 64), torch.randn(64, 8) * 10.0 ** -torch.arange(8)
    factors = LowRankLinear(torch.nn.Linear(64, 64), 8, std=0.1)
    factors.set_factors(up, down)
    layer = QuantizedLowRankLinear(factors, Scheme(scheme))
    layer.set_parts(factors.balanced())
    allowed = {"int8": 0.02, "nf4": 0.2}[scheme]
    for rank in range(8):  # each term of the product is as exact as the first
        term = torch.outer(up[:, rank], down[rank])
        own = torch.outer(layer.up.dense_weight()[:, rank], layer.down.dense_weight()[rank])
        assert (own - term).norm() < allowed * term.norm()


def test_an_adapter_on_quantised_factors_is_one_adapter():
    peft = pytest.importorskip("peft")
    model = make_variant(native(plain(ARCHITECTURES["marian"])), [FACTORS, INT8])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    names = {name for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    assert names
    assert not any(".up." in name or ".down." in name for name in names)


DERIVED = {
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
    ),
    "qwen3": (
        AutoModelForCausalLM,
        {
            "hidden_size": 16,
            "head_dim": 8,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}


@pytest.mark.parametrize("model_type", DERIVED if ALL else ["t5"])
def test_chains_on_derived_families(model_type, tmp_path):
    auto_class, sizes = DERIVED[model_type]
    config = AutoConfig.for_model(
        model_type, vocab_size=40, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0, **sizes
    )
    torch.manual_seed(1)
    backbone = auto_class.from_config(config)
    backbone = add_noise(backbone, architecture_for(backbone)).eval()
    ids = torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, 2, 6]])
    batch = {"input_ids": ids, "labels": ids}
    for name in ("all, factors first", "all, int8 before pruning"):
        chain = [LayerSharing(stacks=["decoder"]) if method is SHARING else method for method in CHAINS[name]]
        model = make_variant(backbone, chain).eval()
        assert differences(outputs(model.merge(), batch), outputs(model, batch), 1e-5) == []
        model.save_pretrained(tmp_path / name)
        reloaded, info = auto_class.from_pretrained(tmp_path / name, output_loading_info=True)
        assert reload_problems(reloaded, info, outputs(model, batch), trainability(model), batch) == []
