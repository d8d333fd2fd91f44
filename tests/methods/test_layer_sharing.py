"""Layers that share their parameters: what is one, what is counted and stored, what it starts from, and what is refused."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.cases import native_config
from support.models import perturbed
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    MarianConfig,
    MarianMTModel,
    T5Config,
)

from hf_freeze import count_parameters, make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES

MARIAN = ARCHITECTURES["marian"]
CONFIG = MarianConfig(**MARIAN.tiny | {"encoder_layers": 6, "decoder_layers": 3})
BATCH = MARIAN.tiny_inputs("seq2seq-lm")


@pytest.fixture
def backbone():
    return perturbed(MarianMTModel(copy.deepcopy(CONFIG)).eval())


def share(model, **settings):
    return make_variant(model, [methods.LayerSharing(**settings)])


def logits(model):
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def meta(config, *chosen):
    with torch.device("meta"):
        return count_parameters(make_variant(config, list(chosen), task="seq2seq-lm"))


def test_it_computes_as_a_native_model_with_the_same_layer_each_time(backbone):
    variant = share(backbone, start="middle")
    by_hand = copy.deepcopy(backbone)
    for stack, middle in ((by_hand.model.encoder, 3), (by_hand.model.decoder, 1)):
        for layer in stack.layers:
            layer.load_state_dict(copy.deepcopy(stack.layers[middle].state_dict()))
    assert torch.equal(logits(variant), logits(by_hand))
    merged = variant.merge()
    assert torch.equal(logits(merged), logits(by_hand))
    first, second = (merged.model.encoder.layers[i].fc1.weight for i in (0, 1))
    assert first.data_ptr() != second.data_ptr(), "the native model's layers are their own"


def test_the_mean_of_the_layers(backbone):
    variant = share(backbone, stacks=["encoder"])
    weights = torch.stack([layer.fc1.weight for layer in backbone.model.encoder.layers])
    for layer in variant.model.encoder.layers:
        torch.testing.assert_close(layer.fc1.weight, weights.mean(0))
    for mine, theirs in zip(variant.model.decoder.layers, backbone.model.decoder.layers, strict=True):
        assert torch.equal(mine.fc1.weight, theirs.fc1.weight), "a stack that is not named stays as it is"


def test_a_training_step_changes_all_of_them_by_the_sum_of_their_gradients(backbone):
    variant = share(backbone, start="middle")
    apart = variant.merge()
    for model in (variant, apart):
        model.eval()(**BATCH).loss.backward()
    layers = apart.model.encoder.layers
    expected = sum(layer.fc1.weight.grad for layer in layers)
    one = variant.model.encoder.layers[0].fc1.weight
    torch.testing.assert_close(one.grad, expected)
    torch.optim.SGD(variant.parameters(), lr=0.1).step()
    assert all(layer.fc1.weight is one for layer in variant.model.encoder.layers)


@pytest.mark.parametrize(
    "settings", [{}, {"norms": "separate"}, {"groups": 3, "start": "middle"}, {"depth": {"encoder": 9}}]
)
def test_the_file_holds_each_parameter_once_and_loads(backbone, settings, tmp_path):
    variant = share(backbone, **settings)
    variant.save_pretrained(tmp_path)
    assert sum(t.numel() * 4 for t in load_file(tmp_path / "model.safetensors").values()) == stored_bytes(variant)
    torch.manual_seed(7)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(loaded), logits(variant))
    assert count_parameters(loaded) == count_parameters(variant)
    encoder = loaded.model.encoder.layers
    shared = len(encoder) // settings.get("groups", 1)
    assert encoder[0].fc1.weight is encoder[shared - 1].fc1.weight
    separate = settings.get("norms") == "separate"
    assert (encoder[0].final_layer_norm.weight is not encoder[1].final_layer_norm.weight) == separate


def test_fresh_weights_are_one_too():
    variant = make_variant(CONFIG, [methods.LayerSharing()], task="seq2seq-lm", init="marian")
    assert len({id(layer.self_attn.q_proj.weight) for layer in variant.model.decoder.layers}) == 1
    assert variant.model.decoder.layers[2].fc1.weight.std() > 0


def test_parameters_of_a_stack_by_hand():
    d, f = CONFIG.d_model, CONFIG.encoder_ffn_dim
    norms, layer = 2 * 2 * d, 4 * (d * d + d) + 2 * d * f + f + d + 2 * 2 * d
    whole = meta(CONFIG).total
    assert whole - meta(CONFIG, methods.LayerSharing(stacks=["encoder"])).total == 5 * layer
    assert whole - meta(CONFIG, methods.LayerSharing(stacks=["encoder"], groups=2)).total == 4 * layer
    assert whole - meta(CONFIG, methods.LayerSharing(stacks=["encoder"], norms="separate")).total == 5 * (layer - norms)
    deeper = methods.LayerSharing(stacks=["encoder"], depth={"encoder": 12})
    assert whole - meta(CONFIG, deeper).total == 5 * layer, "depth is free"


def test_layers_of_transformer_big():
    """METHODS: "layers 176.2M -> 29.36M" of attention and FFN matrices; here with their biases, without the norms."""
    config = MarianConfig(
        vocab_size=40, decoder_vocab_size=40, d_model=1024, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=4096,
        decoder_ffn_dim=4096, encoder_attention_heads=16, decoder_attention_heads=16, pad_token_id=0,
    )  # fmt: skip
    for shared, layers, millions in (([], 6, 176.2), ([methods.LayerSharing()], 1, 29.36)):
        counts = meta(config, *shared).by_component
        biases = layers * (3 * 4 * 1024 + 2 * (4096 + 1024))
        matrices = counts["attention"].total + counts["ffn"].total - biases
        assert matrices / 1e6 == pytest.approx(millions, rel=1e-3)


def test_bert_with_shared_layers_is_albert():
    """With E = H, ALBERT differs by its projection of the embeddings alone, here the identity."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    shared_settings = sizes | {"hidden_act": "gelu", "max_position_embeddings": 32}
    variant = make_variant(
        BertConfig(**shared_settings), [methods.LayerSharing()], task="feature-extraction", seed=3
    ).eval()
    albert = AlbertModel(AlbertConfig(**shared_settings, embedding_size=16)).eval()
    theirs, layer = albert.encoder.albert_layer_groups[0].albert_layers[0], variant.encoder.layer[1]
    with torch.no_grad():
        albert.encoder.embedding_hidden_mapping_in.weight.copy_(torch.eye(16))
        albert.encoder.embedding_hidden_mapping_in.bias.zero_()
    albert.embeddings.load_state_dict(variant.embeddings.state_dict())
    pairs = {
        "attention.query": layer.attention.self.query,
        "attention.key": layer.attention.self.key,
        "attention.value": layer.attention.self.value,
        "attention.dense": layer.attention.output.dense,
        "attention.LayerNorm": layer.attention.output.LayerNorm,
        "ffn": layer.intermediate.dense,
        "ffn_output": layer.output.dense,
        "full_layer_layer_norm": layer.output.LayerNorm,
    }
    for name, module in pairs.items():
        theirs.get_submodule(name).load_state_dict(module.state_dict())
    batch = ARCHITECTURES["bert"].tiny_inputs("feature-extraction")
    with torch.no_grad():
        torch.testing.assert_close(variant(**batch).last_hidden_state, albert(**batch).last_hidden_state)


def test_parts_follow_albert():
    """ALBERT's own rule: group = int(layer / (layers / groups))."""
    for depth, groups in ((12, 1), (12, 4), (7, 3), (6, 6)):
        expected = [[layer for layer in range(depth) if int(layer / (depth / groups)) == g] for g in range(groups)]
        assert methods.layer_sharing._groups(depth, groups) == expected


def test_other_depths(backbone):
    deeper = share(backbone, stacks=["encoder"], norms="separate", start="middle", depth={"encoder": 12})
    assert deeper.config.encoder_layers == len(deeper.model.encoder.layers) == 12
    for place, layer in enumerate(deeper.model.encoder.layers):
        like = backbone.model.encoder.layers[place // 2]
        assert torch.equal(layer.final_layer_norm.weight, like.final_layer_norm.weight)
    shallow = share(backbone, depth={"encoder": 2, "decoder": 1})
    assert logits(shallow).shape == logits(backbone).shape
    assert shallow.merge().config.decoder_layers == 1


def test_generate_with_cache_in_a_deeper_decoder(backbone):
    variant = share(backbone, depth={"decoder": 5})
    settings = {"max_new_tokens": 6, "forced_eos_token_id": None, "eos_token_id": None, "num_beams": 2}
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    cached, plain = (variant.generate(**inputs, **settings, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, plain)


def test_fused_and_transposed_linears_of_gpt2_are_shared():
    """Their weight is (inputs, outputs): nothing may stretch the bias to the wrong side."""
    config = GPT2Config(**ARCHITECTURES["gpt2"].tiny)
    variant = make_variant(config, [methods.LayerSharing()], task="causal-lm")
    for name, parameter in variant.transformer.h[0].named_parameters():
        assert parameter.shape == variant.transformer.h[1].get_parameter(name).shape
        assert parameter is variant.transformer.h[1].get_parameter(name)
    assert variant.transformer.h[0].attn.c_attn.bias.shape == (3 * config.n_embd,)


def test_other_methods_give_the_shared_layer_another_form(backbone):
    variant = make_variant(
        backbone, [methods.LayerSharing(), methods.LowRank(rank=3), methods.Freeze(attention="random")]
    )
    first, other = variant.model.encoder.layers[0], variant.model.encoder.layers[4]
    assert first.fc1.down is other.fc1.down
    assert first.self_attn.q_proj.weight is other.self_attn.q_proj.weight
    assert sorted({name.split(".layers.")[1].split(".")[0] for name in variant.seeded_tensors}) == ["0"]
    untied = MarianConfig(
        **CONFIG.to_dict() | {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}
    )
    model = make_variant(untied, [methods.LayerSharing()], task="seq2seq-lm")
    model.tie_weights()
    assert model.model.encoder.layers[0].fc1.weight is model.model.encoder.layers[1].fc1.weight


def test_resizing_the_vocabulary_keeps_the_layers_one(backbone):
    variant = share(backbone)
    variant.resize_token_embeddings(50)
    assert variant.model.encoder.layers[0].fc1.weight is variant.model.encoder.layers[5].fc1.weight
    assert logits(variant).shape[-1] == 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stacks": "encoder"}, r"LayerSharing\(stacks='encoder'\): must be None or a list"),
        ({"stacks": []}, r"LayerSharing\(stacks=\[\]\): must be None or a list"),
        (
            {"stacks": ["middle"]},
            r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]",
        ),
        ({"groups": 0}, r"LayerSharing\(groups=0\): must be an integer of at least 1"),
        ({"groups": 4}, r"LayerSharing\(groups=4\): must be in 1\.\.3, the layers of stack 'decoder'"),
        (
            {"groups": 2, "depth": {"encoder": 1}},
            r"LayerSharing\(groups=2\): must be in 1\.\.1, the layers of stack 'encoder'",
        ),
        ({"norms": "own"}, r"LayerSharing\(norms='own'\): choose from \['shared', 'separate'\]"),
        ({"start": "first"}, r"LayerSharing\(start='first'\): choose from \['mean', 'middle'\]"),
        ({"depth": 12}, r"LayerSharing\(depth=12\): must be None or a dict"),
        ({"depth": {"encoder": 0}}, r"LayerSharing\(depth\['encoder'\]=0\): must be an integer of at least 1"),
        (
            {"stacks": ["encoder"], "depth": {"decoder": 4}},
            r"the layers of stack 'decoder' are not shared; choose from",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(CONFIG, [methods.LayerSharing(**settings)], task="seq2seq-lm")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            [methods.LowRank(rank=2, layers={"encoder": [0]}), methods.LayerSharing(start="middle")],
            "have different shapes: 'fc1",
        ),
        ([methods.LayerSharing(), methods.FFNPruning(keep={"encoder.1.ffn": [0, 1]})], "have different shapes: 'fc1"),
        (
            [methods.LayerSharing(), methods.MagnitudePruning(sparsity=0.5)],
            "MagnitudePruning after 'layer_sharing': layers that share .* cannot keep a mask or score each",
        ),
        (
            [methods.LayerSharing(), methods.Freeze(ffn="frozen", layers={"encoder": [1]})],
            r"'freeze' of layers \[1\] of stack",
        ),
        ([methods.HeadMask(), methods.LayerSharing()], "the mean of the tensors in a GatedLinear"),
        (
            [methods.LayerSharing(groups=2), methods.LayerSelection(share=0.5)],
            "after 'layer_sharing', which names layers",
        ),
    ],
)
def test_methods_that_do_not_go_with_it(chosen, message, backbone):
    with pytest.raises(ValueError, match=message):
        make_variant(backbone, chosen)


# -- parts of layers ---------------------------------------------------------------------------------------------------------


def shared_names(variant):
    """The parameters of decoder layer 1 that are those of layer 0."""
    first, second = (dict(variant.model.decoder.layers[number].named_parameters()) for number in (0, 1))
    return {name.rpartition(".")[0] for name, parameter in second.items() if parameter is first[name]}


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        (["attention"], {f"{kind}.{p}" for kind in ("self_attn", "encoder_attn") for p in PROJECTIONS}),
        (["ffn"], {"fc1", "fc2"}),
        (["norm"], {"self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"}),
        (["self"], {f"self_attn.{p}" for p in PROJECTIONS}),
        (["cross", "ffn"], {"fc1", "fc2"} | {f"encoder_attn.{p}" for p in PROJECTIONS}),
        (["q", "cross.v"], {"self_attn.q_proj", "encoder_attn.q_proj", "encoder_attn.v_proj"}),
    ],
)
def test_only_these_components_are_shared(backbone, components, expected, tmp_path):
    variant = share(backbone, components=components)
    assert shared_names(variant) == expected
    for name, parameter in variant.model.decoder.named_parameters(remove_duplicate=False):
        if name.startswith("layers.2.") and name.removeprefix("layers.2.").rpartition(".")[0] not in expected:
            assert torch.equal(parameter, backbone.model.decoder.get_parameter(name)), (
                "a layer keeps its other parameters"
            )
    variant.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(variant))
    assert shared_names(loaded) == expected
    torch.testing.assert_close(logits(variant.merge()), logits(variant))


def test_all_components_are_the_whole_layer(backbone):
    whole, listed = share(backbone), share(backbone, components=["attention", "ffn", "norm"])
    assert torch.equal(logits(whole), logits(listed))
    assert count_parameters(whole) == count_parameters(listed)


@pytest.mark.parametrize(
    ("rank", "millions"),
    [(None, {"attention": 83, "ffn": 57, None: 31}), (128, {"attention": 64, "ffn": 38, None: 12})],
)
def test_sizes_of_albert(rank, millions):
    """Lan et al. (2020), table 4: shared-attention, shared-FFN and all-shared, with E = 768 and E = 128. ALBERT's vocabulary is
    30,000."""
    for component, expected in millions.items():
        chosen = [methods.LayerSharing(components=None if component is None else [component])]
        chosen += [methods.FactorizedEmbedding(rank=rank)] if rank else []
        with torch.device("meta"):
            model = make_variant(BertConfig(vocab_size=30000), chosen, task="feature-extraction")
        assert count_parameters(model).total / 1e6 == pytest.approx(expected, abs=0.75)


def test_what_is_not_shared_may_differ_between_layers(backbone):
    pruned = methods.FFNPruning(keep={"encoder.0.ffn": [0, 1, 2]})
    variant = make_variant(backbone, [pruned, methods.LayerSharing(components=["attention"])])
    assert variant.model.encoder.layers[0].fc1.out_features == 3
    factors = methods.LowRank(rank=3, components=["ffn"], layers={"encoder": [0]})
    make_variant(backbone, [factors, methods.LayerSharing(components=["attention"])])
    with pytest.raises(ValueError, match=r"have different shapes: 'fc1\.bias'"):
        make_variant(backbone, [pruned, methods.LayerSharing(components=["ffn"])])


def test_what_is_not_shared_may_be_frozen_in_some_layers(backbone):
    shared, some = methods.LayerSharing(components=["attention"]), {"encoder": [0]}
    variant = make_variant(backbone, [shared, methods.Freeze(ffn="frozen", layers=some)])
    first, second = variant.model.encoder.layers[:2]
    assert [first.fc1.weight.requires_grad, second.fc1.weight.requires_grad] == [False, True]
    with pytest.raises(ValueError, match=r"layers \[0, 1\] share their parameters; name all of them or none"):
        make_variant(backbone, [shared, methods.Freeze(attention="frozen", layers=some)])


def test_two_of_them_share_other_parts_of_other_stacks(backbone):
    chosen = [methods.LayerSharing(stacks=["encoder"], components=["ffn"]), methods.LayerSharing(stacks=["decoder"])]
    variant = make_variant(backbone, chosen)
    first, second = variant.model.encoder.layers[:2]
    assert first.fc1.weight is second.fc1.weight
    assert first.self_attn.q_proj.weight is not second.self_attn.q_proj.weight
    assert len(shared_names(variant)) == 13


def test_projections_in_one_matrix_are_shared_together():
    config = GPT2Config(**ARCHITECTURES["gpt2"].tiny)

    def build(components):
        return make_variant(config, [methods.LayerSharing(components=components)], task="causal-lm").transformer.h

    first, second = build(["q", "k", "v"])
    assert first.attn.c_attn.weight is second.attn.c_attn.weight
    assert first.attn.c_proj.weight is not second.attn.c_proj.weight
    with pytest.raises(
        ValueError, match=r"components=\['q'\]\): q, k, v of 'self' are one matrix in gpt2, 'attn.c_attn'"
    ):
        build(["q"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": "attention"}, r"components='attention'\): must be None or a list such as \['attention'\]"),
        ({"components": []}, r"components=\[\]\): must be None or a list"),
        (
            {"components": ["embeddings"]},
            r"no part 'embeddings' in the layers of marian; choose from \['attention', 'ffn', 'norm', 'self', 'cross', 'q',",
        ),
        (
            {"components": ["cross"], "stacks": ["encoder"]},
            r"no part 'cross' in the layers of marian; choose from .*'self'",
        ),
        ({"components": ["self.x"]}, r"no part 'self.x' .* or a kind with a projection such as 'self.q'"),
        ({"components": ["self", "q"]}, r"'self' and 'q' both name 'self.q'; leave one of them out"),
        ({"components": ["norm"], "norms": "separate"}, r"shares the norms and does not; leave one out"),
    ],
)
def test_components_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_variant(CONFIG, [methods.LayerSharing(**settings)], task="seq2seq-lm")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", [*ARCHITECTURES, "t5"])
@pytest.mark.parametrize("component", ["attention", "ffn"])
def test_every_family_reloads_bit_equal(family, component, tmp_path):
    """T5 is described by derivation: it has one layer for each attention and FFN inside a layer, and biases of positions in the
    first layer."""
    if family == "t5":
        sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
        config, task = T5Config(**sizes, decoder_start_token_id=0), "seq2seq-lm"
        batch = BATCH
    else:
        architecture = ARCHITECTURES[family]
        task = architecture.tasks[0]
        config, batch = native_config(architecture), architecture.tiny_inputs(task)
    native = perturbed(AUTO_CLASSES[task].from_config(config).eval())
    variant = make_variant(native, [methods.LayerSharing(components=[component])])
    assert count_parameters(variant).total < count_parameters(native).total
    variant.save_pretrained(tmp_path)
    loaded, info = AUTO_CLASSES[task].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        expected = variant.eval()(**batch).logits
        assert torch.equal(loaded.eval()(**batch).logits, expected)
        torch.testing.assert_close(variant.merge().eval()(**batch).logits, expected)
