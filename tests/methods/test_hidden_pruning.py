"""HiddenPruning: against models that are thinned by hand, and what it refuses."""

import copy
import math

import pytest
import torch
from support.cases import BASELINES
from support.models import differences, native, outputs
from support.small import small_config
from torch.nn.functional import gelu, layer_norm, softmax
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from hf_freeze import make_variant, surgery
from hf_freeze.architectures.channels import pattern_of
from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.hidden import channels_of
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.methods import AdaptiveEmbedding, Freeze, HiddenPruning, LowRank, TensorTrain

every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])
BERT, LLAMA = (next(c for c in BASELINES if c.architecture.model_type == name) for name in ("bert", "llama"))
KEEP = [0, 2, 3, 7, 8, 9, 11, 15]
WIDTH, NATIVE = len(KEEP), 16


@torch.no_grad()
def by_hand(model, narrow):
    """`narrow`, a native model of the smaller hidden size: each tensor with the channels in KEEP, wherever the shapes differ."""
    for (name, value), (other, target) in zip(model.named_parameters(), narrow.named_parameters(), strict=True):
        assert name == other
        for axis, (old, new) in enumerate(zip(value.shape, target.shape, strict=True)):
            if old != new:
                value = value.index_select(axis, torch.tensor(KEEP))
        target.copy_(value)
    return narrow.eval()


def noisy(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def test_llama_is_that_of_a_smaller_hidden_size():
    model = native(LLAMA)
    config = copy.deepcopy(model.config)
    config.hidden_size, config.head_dim = WIDTH, NATIVE // config.num_attention_heads
    expected = outputs(by_hand(model, LlamaForCausalLM(config)), LLAMA.batch())
    variant = make_variant(model, [HiddenPruning(keep=KEEP)]).eval()
    assert differences(outputs(variant, LLAMA.batch()), expected, 1e-6) == []
    merged = variant.merge()
    assert type(merged) is LlamaForCausalLM
    assert merged.config.hidden_size == WIDTH
    assert differences(outputs(merged, LLAMA.batch()), expected, 1e-6) == []


def test_t5_scales_its_logits_as_before():
    """Logits are scaled by the native hidden size; a merged model, whose class would scale by the new one, makes up for it."""
    config = small_config("t5", tie_word_embeddings=True)
    model = noisy(T5ForConditionalGeneration(config))
    other = copy.deepcopy(config)
    other.d_model = WIDTH
    keep = list(range(0, 32, 4))
    narrow = T5ForConditionalGeneration(other)
    with torch.no_grad():
        for value, target in zip(model.parameters(), narrow.parameters(), strict=True):
            for axis in range(value.ndim):
                if value.shape[axis] != target.shape[axis]:
                    value = value.index_select(axis, torch.tensor(keep))
            target.copy_(value)
    batch = {"input_ids": torch.tensor([[5, 9, 3, 7, 1]]), "decoder_input_ids": torch.tensor([[0, 6, 3]])}
    logits = narrow.eval()(**batch).logits * math.sqrt(WIDTH / 32)
    variant = make_variant(model, [HiddenPruning(keep=keep)]).eval()
    torch.testing.assert_close(variant(**batch).logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variant.merge().eval()(**batch).logits, logits, rtol=1e-5, atol=1e-5)


def test_gemma_scales_its_tables_as_before():
    """The table that a merged model looks up is also its output matrix; the norm before it makes up for that."""
    model = noisy(AutoModelForCausalLM.from_config(small_config("gemma")))
    variant = make_variant(model, [HiddenPruning(width=20)]).eval()
    merged = variant.merge().eval()
    ids = torch.tensor([[5, 9, 3, 7, 1]])
    torch.testing.assert_close(merged(input_ids=ids).logits, variant(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_bert_by_hand():
    """A dense forward, written anew, of a BERT whose heads and poolers stay as they are."""
    model = noisy(AutoModel.from_config(native(BERT).config))
    variant = make_variant(model, [HiddenPruning(keep=KEEP)]).eval()
    weights = dict(model.named_parameters())
    ids = torch.tensor([[5, 9, 3, 7, 1]])

    def linear(name, x, inputs=None, outs=None):
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        weight = weight if inputs is None else weight[:, inputs]
        return x @ (weight if outs is None else weight[outs]).T + (bias if outs is None else bias[outs])

    def norm(name, x):
        return layer_norm(x, (WIDTH,), weights[f"{name}.weight"][KEEP], weights[f"{name}.bias"][KEEP], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][:5]
    x = norm("embeddings.LayerNorm", (x + weights["embeddings.token_type_embeddings.weight"][0])[..., KEEP])
    for number in range(2):
        layer = f"encoder.layer.{number}"
        q, k, v = (
            linear(f"{layer}.attention.self.{name}", x, KEEP).unflatten(-1, (2, 8)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        heads = softmax(q @ k.transpose(2, 3) / math.sqrt(8), -1) @ v
        attended = linear(f"{layer}.attention.output.dense", heads.transpose(1, 2).flatten(2), None, KEEP)
        x = norm(f"{layer}.attention.output.LayerNorm", x + attended)
        inner = gelu(linear(f"{layer}.intermediate.dense", x, KEEP))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner, None, KEEP))
    pooled = torch.tanh(linear("pooler.dense", x[:, 0], KEEP))
    result = variant(input_ids=ids)
    torch.testing.assert_close(result.last_hidden_state, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.pooler_output, pooled, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"'hidden_pruning' cannot be merged on bert: .*size of a head"):
        variant.merge()


@every_backbone
def test_all_channels_are_no_change(case):
    model = native(case)
    with pytest.warns(UserWarning, match="keeps all hidden channels"):
        variant = make_variant(model, [HiddenPruning(width=NATIVE)]).eval()
    assert differences(outputs(variant, case.batch()), outputs(model, case.batch())) == []


@torch.no_grad()
def reordered(model, order):
    model = copy.deepcopy(model)
    done = set()
    for place in surgery.channels_in(model, "test"):
        for name, axes in place.axes.items():
            tensor = getattr(model.get_submodule(place.name), name)
            for axis in axes if tensor.data_ptr() not in done else ():
                tensor.copy_(tensor.index_select(axis, order).clone())
            done.add(tensor.data_ptr())
    return model


@every_backbone
def test_channels_may_be_in_any_order(case):
    """The backbone computes the same, and the channels that are chosen are the same ones."""
    model, order = native(case), torch.randperm(NATIVE, generator=torch.Generator().manual_seed(1))
    other = reordered(model, order)
    torch.testing.assert_close(
        outputs(other, case.batch())["logits"], outputs(model, case.batch())["logits"], rtol=2e-5, atol=2e-5
    )
    chosen, of_other = (make_variant(m, [HiddenPruning(width=12)]).config.methods[0]["keep"] for m in (model, other))
    assert sorted(order[of_other].tolist()) == chosen


def test_channels_that_are_zero_count_for_the_mean_square_alone():
    """Llama's norms divide by the root of the mean over all channels: of fewer, zeros left out, it is larger."""
    model = native(LLAMA)
    gone = [channel for channel in range(NATIVE) if channel not in KEEP]
    model.config.rms_norm_eps = 0.0
    with torch.no_grad():
        for place in surgery.channels_in(model, "test"):
            module = model.get_submodule(place.name)
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.0
            for name, axes in place.axes.items():
                if place.writes:
                    getattr(module, name).index_fill_(axes[0], torch.tensor(gone), 0.0)
        variant = make_variant(model, [HiddenPruning(width=WIDTH)]).eval()
        assert variant.config.methods[0]["keep"] == KEEP
        for module in variant.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.0
                module.weight.mul_(math.sqrt(NATIVE / WIDTH))
    assert differences(outputs(variant, LLAMA.batch()), outputs(model, LLAMA.batch()), 1e-4) == []


def test_readers_writers_and_their_norms():
    places = {place.name: place for place in surgery.channels_in(native(LLAMA), "test")}
    first = "model.layers.1"
    assert {name for name, place in places.items() if place.reads and name.startswith(first)} == {
        f"{first}.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert {name for name, place in places.items() if place.writes and not name.startswith("model.layers.0")} == {
        "model.embed_tokens",
        "model.norm",
        *(
            f"{first}.{name}"
            for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
        ),
    }
    assert places[f"{first}.self_attn.q_proj"].norm == f"{first}.input_layernorm"
    assert places[f"{first}.mlp.up_proj"].norm == f"{first}.post_attention_layernorm"
    assert places["lm_head"].norm == "model.norm"


@every_backbone
def test_random_parts_stay_random(case, tmp_path):
    """What a seed regenerates are slices of the native tensors."""
    freeze = Freeze(ffn="random", attention="random", embeddings="random", seed=5)
    model = make_variant(native(case), [freeze])
    variant = make_variant(model, [HiddenPruning(keep=KEEP)]).eval()
    name = next(
        name
        for name in variant.seeded_tensors
        if name.endswith(("fc2.weight", "down_proj.weight", "c_proj.weight", "output.dense.weight"))
    )
    axis = 1 if case.architecture.model_type == "gpt2" else 0
    assert torch.equal(variant.get_parameter(name), model.get_parameter(name).index_select(axis, torch.tensor(KEEP)))
    variant.save_pretrained(tmp_path)
    reloaded = case.auto_class.from_pretrained(tmp_path).eval()
    assert differences(outputs(reloaded, case.batch()), outputs(variant, case.batch())) == []


def test_low_rank_keeps_the_rank():
    model = make_variant(native(LLAMA), [LowRank(rank=4, components=["ffn", "attention"])]).eval()
    variant = make_variant(model, [HiddenPruning(keep=KEEP)]).eval()
    layer = variant.model.layers[0]
    assert layer.mlp.down_proj.up.shape == (WIDTH, 4)
    assert layer.mlp.up_proj.down.shape == (4, WIDTH)
    assert torch.equal(layer.mlp.down_proj.up, model.model.layers[0].mlp.down_proj.up[KEEP])


def test_bad_settings():
    for settings in ({}, {"width": 4, "keep": [1]}):
        with pytest.raises(ValueError, match="HiddenPruning"):
            HiddenPruning(**settings)
    for keep in ([], [3, 1], [1, 1], [-1, 2], [1.5], "all"):
        with pytest.raises(ValueError, match="must be a list of different channels, at least one, in ascending order"):
            HiddenPruning(keep=keep)
    with pytest.raises(ValueError, match=r"HiddenPruning.*width"):
        HiddenPruning(width=0)
    model = native(LLAMA)
    with pytest.raises(ValueError, match=r"HiddenPruning\(width=17\): must be in 1..16, the hidden size"):
        make_variant(model, [HiddenPruning(width=17)])
    with pytest.raises(ValueError, match=r"HiddenPruning: channel 16: must be in 0..15"):
        make_variant(model, [HiddenPruning(keep=[0, 1, 2, 16])])
    with pytest.raises(ValueError, match=r"HiddenPruning\(width=13\): transformers refuses this hidden size: "):
        make_variant(model, [HiddenPruning(width=13)])
    with pytest.raises(
        ValueError, match=r"'hidden_pruning': 'model.layers.0.mlp.gate_proj' is a TensorTrainLinear already"
    ):
        make_variant(model, [TensorTrain(rank=4), HiddenPruning(width=12)])
    for output in ("dense", "adaptive"):
        bands = AdaptiveEmbedding(cutoffs=[12], factor=2, width=8, output=output)
        with pytest.raises(ValueError, match=r"'model.embed_tokens' is a AdaptiveInputEmbedding already"):
            make_variant(model, [bands, HiddenPruning(width=12)])
    with pytest.raises(ValueError, match="it can be applied only once"):
        make_variant(model, [HiddenPruning(width=12), HiddenPruning(width=8)])


def test_a_family_without_proof_is_refused():
    config = small_config("longformer")
    reason = architecture_of(config).refusals["hidden"]
    assert reason.endswith("query_global.weight' does not matter for the outputs on small inputs")
    with pytest.raises(
        ValueError, match=r"'hidden_pruning' does not support 'longformer'; .*does not matter for the outputs"
    ):
        make_variant(AutoModel.from_config(config), [HiddenPruning(width=8)])
    # The base model of this one is proved; its head divides by the width.
    scaled = AutoModelForCausalLM.from_config(small_config("minicpm3"))
    with pytest.raises(ValueError, match="the forward of MiniCPM3ForCausalLM reads hidden_size from the config"):
        make_variant(scaled, [HiddenPruning(width=8)])
    pooled = architecture_of(small_config("siglip_vision_model")).refusals["hidden"]
    assert pooled == "what follows another order of its hidden channels was not found"


@pytest.mark.parametrize(
    "model_type",
    [
        "opt",  # its table may be narrower, and its width has a config field of its own
        "roformer",  # so has that of its table; positions are as wide as a head
        "granitemoe",  # the module around the experts knows the hidden size
        "ernie4_5_moe",  # so does its, with an expert that all tokens reach beside them
        "dinov2",  # what stands for masked patches does not matter for others
    ],
)
@torch.no_grad()
def test_one_of_two_equal_channels_is_enough(model_type, tmp_path):
    """The second half of the channels is as the first, and nothing reads it: without it all outputs stay."""
    model = noisy(AutoModel.from_config(small_config(model_type)))
    half = surgery.hidden_channels(model) // 2
    known = channels_of(model).reads
    for place in surgery.channels_in(model, "test"):
        for name, axes in place.axes.items():
            tensor = getattr(model.get_submodule(place.name), name)
            router = tensor.ndim == 2 and place.name.endswith(("gate", "router"))
            for axis in axes:
                read = router or (pattern_of(model, f"{place.name}.{name}"), axis) in known
                tensor.narrow(axis, half, half).copy_(tensor.narrow(axis, 0, half) * (0 if read else 1))
    batch = probe_inputs(model.config, model)
    variant = make_variant(model, [HiddenPruning(keep=list(range(half)))]).eval()
    found = outputs(variant, batch)
    expected = {name: value[..., : found[name].shape[-1]] for name, value in outputs(model, batch).items()}
    assert differences(found, expected, 1e-5) == []
    variant.save_pretrained(tmp_path)
    assert differences(outputs(type(variant).from_pretrained(tmp_path).eval(), batch), found) == []
    if model_type in ("granitemoe", "ernie4_5_moe"):
        assert differences(outputs(variant.merge().eval(), batch), found, 1e-6) == []
    else:
        with pytest.raises(
            ValueError, match=f"'hidden_pruning' cannot be merged on {model_type}: .*derives other sizes"
        ):
            variant.merge()


def test_an_encoder_decoder_has_one_width():
    model = noisy(AutoModelForSeq2SeqLM.from_config(small_config("bart")))
    variant = make_variant(model, [HiddenPruning(width=20)]).eval()
    assert (
        variant.model.encoder.layernorm_embedding.weight.shape
        == variant.model.decoder.layernorm_embedding.weight.shape
        == (20,)
    )
    assert variant.model.decoder.layers[0].encoder_attn.k_proj.weight.shape == (32, 20)
    assert variant.model.decoder.embed_positions.weight.shape[1] == variant.lm_head.weight.shape[1] == 20
    assert variant.config.d_model == 20


@pytest.mark.parametrize("case", [BERT, LLAMA], ids=["bert", "llama"])
def test_norms_are_refitted_with_a_calibration(case, monkeypatch):
    """Scales follow the mean square of fewer channels: outputs are nearer on other texts; without texts, norms are slices."""
    model, method = native(case), HiddenPruning(keep=KEEP)
    batch = {
        "input_ids": torch.randint(3, model.config.vocab_size, (64, 8), generator=torch.Generator().manual_seed(0))
    }
    fitted = make_variant(model, [method], calibration=[batch])
    monkeypatch.setattr("hf_freeze.methods.hidden_pruning._norms", lambda *_: [])
    without = make_variant(model, [method], calibration=[batch])
    name = "bert.encoder.layer.0.output.LayerNorm" if case is BERT else "model.layers.0.input_layernorm"
    assert torch.equal(without.get_parameter(f"{name}.weight"), model.get_parameter(f"{name}.weight")[KEEP])

    def error(variant):
        """Of the outputs of the norm."""
        outputs = []
        for one in (model, variant):
            handle = one.get_submodule(name).register_forward_hook(lambda _, args, output: outputs.append(output))
            with torch.no_grad():
                one.eval()(**batch)
            handle.remove()
        return float((outputs[0][..., KEEP] - outputs[1]).square().mean())

    assert error(fitted) < 0.99 * error(without)


def test_later_blocks_correct_what_earlier_ones_lack(monkeypatch):
    """The states that leave the last layer are nearer than if each linear only gives what the old one gave."""
    model = noisy(native(LLAMA))
    ids = torch.randint(3, model.config.vocab_size, (64, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}

    def error():
        variant = make_variant(model, [HiddenPruning(keep=KEEP)], calibration=[batch]).eval()
        with torch.no_grad():
            # The last ones of Llama's are those after the last norm.
            old, new = (one(**batch, output_hidden_states=True).hidden_states[-1] for one in (model, variant))
        return float((old[..., KEEP] - new).square().mean())

    together = error()
    monkeypatch.setattr("hf_freeze.model.streams.Streams.joins", lambda *_: None)
    assert together < 0.99 * error()
