"""LiteTransformer: against its formulas, step by step with every cache, what sees what, published sizes, and what it refuses."""

import copy

import pytest
import torch
from support.formulas import by_formulas
from support.models import differences, outputs, perturbed, trainability
from support.training import training_step
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, StaticCache

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.long_short import LongShortAttention
from hf_freeze.layers.masks import token_mask
from hf_freeze.methods import FixedAttention, Freeze, HeadPruning, LiteTransformer, LowRank

TASK = {"marian": "seq2seq-lm", "gpt2": "causal-lm"}
FIELDS = {"marian": {"d_model": 24, "forced_eos_token_id": None}, "gpt2": {"n_embd": 24}}
every_backbone = pytest.mark.parametrize("name", TASK)
every_cache = pytest.mark.parametrize("kind", ["dynamic", "static"])
CHUNKS = ((0, 4), (4, 5), (5, 6), (6, 8), (8, 9))  # a prompt, tokens one by one, two at once


def config_of(name, **fields):
    return AutoConfig.for_model(name, **ARCHITECTURES[name].tiny | FIELDS[name] | fields)


def made(name, *others, fields=(), **settings):
    """A variant as if trained, in eval mode; `others` are applied to it."""
    settings = {"kernels": [3, 5], "heads": 2, "conv_heads": 2} | settings
    config = config_of(name, **dict(fields))
    model = make_variant(config, [LiteTransformer(**settings)], task=TASK[name], init="marian", seed=1)
    torch.manual_seed(2)
    model = perturbed(model)
    return (make_variant(model, list(others)) if others else model).eval()


def batch_of(name):
    return ARCHITECTURES[name].tiny_inputs(TASK[name])


def some_ids(rows=2, tokens=9):
    return torch.randint(2, 40, (rows, tokens), generator=torch.Generator().manual_seed(7))


def cache_of(model, kind):
    one = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=12),
    }[kind]
    return EncoderDecoderCache(one(), DynamicCache()) if model.config.is_encoder_decoder else one()


@torch.no_grad()
def decoded(model, ids, start=0, end=None, cache=None):
    """Logits of tokens start..end of the decoder, whose source has padding."""
    if not model.config.is_encoder_decoder:
        return model(ids[:, start:end], past_key_values=cache).logits
    source = {name: batch_of("marian")[name] for name in ("input_ids", "attention_mask")}
    return model(**source, decoder_input_ids=ids[:, start:end], past_key_values=cache).logits


def check_steps(model, kind, ids=None):
    ids = some_ids() if ids is None else ids
    expected, cache = decoded(model, ids), cache_of(model, kind)
    for start, end in CHUNKS:
        found = decoded(model, ids, start, end, cache)
        torch.testing.assert_close(found, expected[:, start:end], rtol=1e-5, atol=1e-5)


def branches(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LongShortAttention)}


# -- sizes -------------------------------------------------------------------------------------------------------------------


def marian_config(d, layers=6, vocabulary=1000):
    stacks = {f"{stack}_layers": layers for stack in ("encoder", "decoder")}
    stacks |= {f"{stack}_attention_heads": 8 for stack in ("encoder", "decoder")}
    return config_of(
        "marian", d_model=d, **stacks, vocab_size=vocabulary, decoder_vocab_size=vocabulary, encoder_ffn_dim=64
    )


@pytest.mark.parametrize("conv", ["dynamic", "lightweight"])
@pytest.mark.parametrize(("d", "millions"), [(200, 2.884), (408, 11.740), (496, 17.284)])
def test_published_numbers_of_parameters(d, millions, conv):
    with torch.device("meta"):
        model = make_variant(marian_config(d), [LiteTransformer(conv=conv)], task="seq2seq-lm")
    found = count_parameters(model)
    h, taps = d // 2, 2 * (3 + 7 + 15 + 31 + 31 + 31)
    of_kernels = h * 4 * taps if conv == "dynamic" else 4 * taps
    of_expanding = 2 * (h * h + h) if conv == "dynamic" else h * h + h
    expected = {
        "attention": 12 * (4 * (h * h + h) + of_expanding + h * h + h) + of_kernels + 6 * 4 * (d * d + d),
        "ffn": 12 * 2 * (d * d + d),
        "norm": (6 * 2 + 6 * 3) * 2 * d,
        "embeddings": 1000 * d,
        "head": 0,
    }
    assert {name: count.total for name, count in found.by_component.items()} == expected
    if conv == "dynamic":
        assert round((found.total - 1000 * d) / 1e6, 3) == millions


# -- the formulas ------------------------------------------------------------------------------------------------------------


def attended(attention, x, heads, seen):
    """Multi-head attention, head by head; GPT-2's has its projections in one."""
    if hasattr(attention, "c_attn"):
        q, k, v = attention.c_attn(x).chunk(3, -1)
    else:
        q, k, v = (linear(x) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    parts = []
    for qh, kh, vh in zip(*(each.chunk(heads, -1) for each in (q, k, v)), strict=True):
        scores = qh @ kh.transpose(1, 2) / qh.shape[-1] ** 0.5
        parts.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ vh)
    return (attention.c_proj if hasattr(attention, "c_attn") else attention.out_proj)(torch.cat(parts, -1))


@every_backbone
@pytest.mark.parametrize("conv", ["dynamic", "lightweight"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_half_attends_and_half_is_convolved(name, conv, implementation):
    model = made(name, conv=conv, heads=3, kernels=[3, 7])
    model.set_attn_implementation(implementation)
    calls = []
    for place, module in branches(model).items():
        module.register_forward_hook(lambda module, x, y, place=place: calls.append((place, module, x[0], y[0])))
    model(**batch_of(name))
    assert len(calls) == (4 if name == "marian" else 2)
    described = [each for n, each in model.architecture.attentions(model.config).items() if n.endswith(".self")]
    assert {(each.head_count(model.config), each.head_size(model.config)) for each in described} == {(3, 4)}
    for place, module, x, found in calls:
        causal, tokens = "encoder" not in place, x.shape[1]
        mask = batch_of(name)["attention_mask"].bool() if tokens == 5 else torch.ones(2, tokens, dtype=torch.bool)
        seen = mask[:, None] & (torch.ones(tokens, tokens).tril().bool() if causal else True)
        assert module.conv.causal == causal
        assert module.conv.taps == [3, 7][int(place.split(".")[3 if name == "marian" else 2])]
        halves = [attended(module.attention, x[..., :12], 3, seen), by_formulas(module.conv, x[..., 12:], mask)]
        torch.testing.assert_close(found[mask], torch.cat(halves, -1)[mask], rtol=1e-4, atol=1e-5)


def test_scores_are_scaled_as_the_backbone_scales_them():
    model = made("gpt2", fields={"scale_attn_by_inverse_layer_idx": True}, heads=3)
    scales = [module.attention.scaling for module in branches(model).values()]
    assert scales == pytest.approx([4**-0.5, 4**-0.5 / 2])


@every_backbone
@pytest.mark.parametrize("gone", [[], [0, 1]], ids=str)
def test_dropout_of_the_backbone_falls_on_both_halves(name, gone):
    """Marian's comes after; GPT-2's is within, and stays for the convolution where the heads beside are gone."""
    others = [HeadPruning(heads={"decoder.1.self": gone})] if gone else []
    model = made(name, *others, fields={"dropout" if name == "marian" else "resid_pdrop": 0.5}).train()
    module = list(branches(model).values())[-1]
    x = torch.randn(1, 50, 24)
    both = [module(x)[0].chunk(2, dim=-1) for _ in range(2)]
    for half, other in list(zip(*both, strict=True))[bool(gone) :]:
        assert torch.equal(half, other) == (name == "marian")


def test_taps_are_dropped_in_training_alone():
    model = made("gpt2", conv_dropout=0.5)
    assert {module.conv.dropout for module in branches(model).values()} == {0.5}
    assert differences(outputs(model, batch_of("gpt2")), outputs(made("gpt2"), batch_of("gpt2"))) == []
    model.train()
    assert not torch.equal(model(**batch_of("gpt2")).logits, model(**batch_of("gpt2")).logits)


# -- generating --------------------------------------------------------------------------------------------------------------


@every_backbone
@every_cache
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"heads": 1, "kernels": [31, 15]},  # longer than the text
        {"heads": 3, "conv_heads": 4, "conv": "lightweight"},
        {"heads": 4, "kernels": [1, 7]},
        {"heads": 12, "conv_heads": 12, "kernels": [9, 11]},
    ],
    ids=str,
)
def test_every_step_is_that_of_the_whole(name, kind, settings):
    check_steps(made(name, **settings), kind)


@every_backbone
def test_a_static_cache_may_be_used_again(name):
    model, ids = made(name), some_ids()
    cache = cache_of(model, "static")
    first = [decoded(model, ids, start, end, cache) for start, end in CHUNKS]
    cache.reset()
    torch.testing.assert_close([decoded(model, ids, start, end, cache) for start, end in CHUNKS], first)


@every_backbone
def test_generating_with_a_static_cache(name):
    model = made(name)
    inputs = {k: v[:1] for k, v in batch_of(name).items() if k in ("input_ids", "attention_mask")}
    inputs |= {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    found, expected = (
        model.generate(**inputs, output_logits=True, **cache)
        for cache in ({"cache_implementation": "static"}, {"use_cache": False})
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


@every_cache
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_to_the_left_moves_nothing(kind, implementation):
    """Of a prompt and of every step after it, in GPT-2; whatever token it is."""
    model = made("gpt2", kernels=[3, 7])
    model.set_attn_implementation(implementation)
    ids = some_ids()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone = decoded(model, ids[1:, 3:])
    found = []
    for padding in (0, 17):
        padded, cache = ids.masked_fill(mask == 0, padding), cache_of(model, kind)
        for start, end in CHUNKS:
            with torch.no_grad():
                step = model(
                    padded[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                ).logits
            found.append(step[1])
        torch.testing.assert_close(torch.cat(found[-5:])[3:], alone[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat(found[:5])[3:], torch.cat(found[5:])[3:])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(whole[1, 3:], alone[0], rtol=1e-5, atol=1e-5)


@every_backbone
@pytest.mark.parametrize("heads", [1, 3])
def test_beams_with_a_cache_are_those_without(name, heads):
    model = made(name, heads=heads, kernels=[7, 5])
    inputs = {k: v for k, v in batch_of(name).items() if k in ("input_ids", "attention_mask")}
    if name == "gpt2":
        inputs = {k: v.flip(1) for k, v in inputs.items()}  # padded to the left
    search = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "min_new_tokens": 8}
    search |= {"return_dict_in_generate": True, "output_scores": True}
    cached, plain = (model.generate(**inputs, **search, use_cache=use) for use in (True, False))
    assert len({tuple(row) for row in cached.sequences.tolist()}) == 6
    assert cached.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=1e-4, atol=1e-5)


@every_backbone
def test_a_cropped_cache_goes_on(name):
    model, ids, cache = made(name, kernels=[7, 5]), some_ids(), cache_of(made(name), "dynamic")
    decoded(model, ids, 0, 7, cache)
    (cache.self_attention_cache if name == "marian" else cache).crop(-4)
    other = torch.cat([ids[:, :3], ids[:, 3:].flip(1)], dim=1)
    expected = decoded(model, other)
    for start, end in ((3, 5), (5, 6), (6, 9)):
        found = decoded(model, other, start, end, cache)
        torch.testing.assert_close(found, expected[:, start:end], rtol=1e-5, atol=1e-5)


# -- what sees what ----------------------------------------------------------------------------------------------------------


@every_backbone
@torch.no_grad()
def test_each_half_sees_what_it_may(name):
    """By moving one embedding: 3 taps reach one token to each side in an encoder, the two before in a decoder, which never
    sees what comes; and nobody sees padding."""
    depth = {"n_layer": 1} if name == "gpt2" else {"encoder_layers": 1, "decoder_layers": 1}
    model = made(name, fields=depth, kernels=[3]).double()
    tokens, mask = 8, torch.ones(1, 8, dtype=torch.long)
    mask[0, 6:] = 0
    source, target = 0.2 * torch.randn(2, 1, tokens, 24, dtype=torch.float64)  # Marian multiplies by √24
    for place, module in branches(model).items():
        kept = []
        hook = module.register_forward_hook(lambda module, x, y, kept=kept: kept.append(y[0][0]))

        def forward(x, of_encoder="encoder" in place):
            if name == "gpt2":
                return model(inputs_embeds=x, attention_mask=mask)
            source_mask, x, other = (mask, x, target) if of_encoder else (torch.ones_like(mask), source, x)
            given = {} if of_encoder else {"decoder_attention_mask": mask}
            return model(inputs_embeds=x, attention_mask=source_mask, decoder_inputs_embeds=other, **given)

        x = source if "encoder" in place else target
        forward(x)
        for moved in range(tokens):
            forward(x.index_add(1, torch.tensor([moved]), 0.2 * torch.randn(1, 1, 24).double()))
            moves = (kept[-1] - kept[0])[:6].abs().chunk(2, 1)
            changed = [(half.amax(1) > 1e-12).nonzero().flatten().tolist() for half in moves]
            if moved >= 6:
                assert changed == [[], []]
            elif "encoder" in place:
                assert changed == [list(range(6)), list(range(max(moved - 1, 0), min(moved + 2, 6)))]
            else:
                assert changed == [list(range(moved, 6)), list(range(moved, min(moved + 3, 6)))]
        hook.remove()


def test_a_mask_of_another_kind_is_refused():
    for mask in ("block mask", torch.ones(2, 5, 5)):
        with pytest.raises(
            ValueError,
            match=r"cannot read a mask of (str|Tensor): choose .* 'eager', 'sdpa' or",
        ):
            token_mask(mask, 0, torch.zeros(2, 5, 8), "LiteTransformer")
    flat = torch.tensor([[0, 1, 1, 1]])
    assert token_mask(flat, 1, torch.zeros(2, 2, 8), "LiteTransformer").tolist() == [[True, True]] * 2
    assert token_mask(flat, 0, torch.zeros(1, 2, 8), "LiteTransformer").tolist() == [[False, True]]


# -- with other methods ------------------------------------------------------------------------------------------------------


@every_backbone
@every_cache
@pytest.mark.parametrize("gone", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_the_half_that_attends_may_lose_heads(name, kind, gone):
    model, attention = made(name, heads=3), "decoder.0.self"
    pruned = make_variant(model, [HeadPruning(heads={attention: gone})])
    masked = copy.deepcopy(model)
    found = masked.architecture.attentions(masked.config)[attention]
    output = masked.base_model.get_submodule(found.o).weight
    output = output if name == "gpt2" else output.T
    with torch.no_grad():
        for head in gone:
            output[4 * head : 4 * head + 4] = 0
    torch.testing.assert_close(decoded(pruned, some_ids()), decoded(masked, some_ids()), rtol=1e-5, atol=1e-5)
    check_steps(pruned, kind)


def test_fixed_heads_go_into_the_encoder():
    model = made("marian", FixedAttention(patterns=[2]), heads=3)
    attentions = [module.attention for place, module in branches(model).items() if "encoder" in place]
    assert [type(each).__name__ for each in attentions] == ["FixedHeads"] * 2
    check_steps(model, "dynamic")
    alone = {name: value[1:, :3] if name != "labels" else value[1:] for name, value in batch_of("marian").items()}
    found = outputs(model, batch_of("marian"))["logits"][1:, :2]
    torch.testing.assert_close(found, outputs(model, alone)["logits"][:, :2], rtol=1e-5, atol=1e-5)


@every_backbone
def test_random_attention_is_a_random_convolution(name, tmp_path):
    freeze = Freeze(attention="random", seed=4)
    model = make_variant(config_of(name), [LiteTransformer(kernels=[3, 5], conv_heads=2), freeze], task=TASK[name])
    convolutions = {n for n, _ in model.named_parameters() if ".conv." in n}
    assert convolutions
    assert convolutions <= set(model.seeded_tensors)
    training_step(model, batch_of(name))
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES[TASK[name]].from_pretrained(tmp_path)
    assert differences(outputs(reloaded, batch_of(name)), outputs(model, batch_of(name))) == []
    assert trainability(reloaded) == trainability(model)
    with pytest.raises(
        ValueError, match=r"\AFreeze\(attention='random'\): '.*conv' is a KernelConvolution, and only.*\Z"
    ):
        made(name, freeze, conv="lightweight")


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernels": [3, 4]}, r"LiteTransformer\(kernels=\[3, 4\]\): 4 must be odd and below 1024"),
        ({"kernels": [1025]}, "1025 must be odd and below 1024"),
        ({"kernels": []}, r"LiteTransformer\(kernels=\[\]\): must be a list of integers"),
        ({"kernels": 3}, r"kernels=3\): must be a list"),
        ({"kernels": [3, 0]}, r"kernels\[1\]=0\): must be an integer of at least 1"),
        ({"conv": "static"}, r"LiteTransformer\(conv='static'\): choose from \['dynamic', 'lightweight'\]"),
        ({"heads": 0}, r"LiteTransformer\(heads=0\): must be an integer of at least 1"),
        ({"conv_heads": True}, r"LiteTransformer\(conv_heads=True\): must be an integer"),
        ({"conv_dropout": 1.0}, r"conv_dropout=1\.0\): must be a share of at least 0 and below 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LiteTransformer(**arguments)


LITE = LiteTransformer(kernels=[3, 5], heads=2, conv_heads=2)


@pytest.mark.parametrize(
    ("name", "applied", "message"),
    [
        ("gpt2", [LiteTransformer(kernels=[3])], r"kernels=\[3\]\): 1 kernels for the 2 layers of stack 'decoder'"),
        ("marian", [LiteTransformer(heads=5)], r"LiteTransformer\(heads=5\): must divide half of the hidden size 24"),
        ("marian", [LiteTransformer(heads=8)], r"LiteTransformer\(heads=8\): must divide half"),
        ("gpt2", [LiteTransformer(conv_heads=5)], r"LiteTransformer\(conv_heads=5\): must divide half"),
        (
            "gpt2",
            [LITE, LITE],
            "LiteTransformer after 'lite_transformer', which has put in other blocks; leave one of the two out",
        ),
        ("marian", [LowRank(rank=2), LITE], "'lite_transformer': 'encoder.layers.0.fc1' is a LowRankLinear already"),
    ],
)
def test_what_does_not_fit_is_refused(name, applied, message):
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        make_variant(config_of(name), applied, task=TASK[name])


def test_refusals_of_backbones(tmp_path):
    config = config_of("gpt2", add_cross_attention=True)
    with pytest.raises(ValueError, match=r"LiteTransformer: this gpt2 has cross-attentions; set add_cross_att"):
        make_variant(config, [LITE], task="causal-lm")
    trained = AUTO_CLASSES["causal-lm"].from_config(config_of("gpt2"))
    trained.save_pretrained(tmp_path)
    for backbone in (trained, tmp_path):
        with pytest.raises(
            ValueError, match=r"\Amethod 'lite_transformer': its blocks train from scratch.*pass the config.*\Z"
        ):
            make_variant(backbone, [LITE], task="causal-lm")
    with pytest.raises(ValueError, match="does not support 'bert'; it supports"):
        make_variant(AutoConfig.for_model("bert", **ARCHITECTURES["bert"].tiny), [LITE], task="masked-lm")
    with pytest.raises(ValueError, match="lite_transformer: no native model has convolutions beside its attentions"):
        made("gpt2").merge()


def test_surplus_kernels_are_not_used():
    model = made("marian", kernels=[3, 5, 9, 31], fields={"decoder_layers": 1})
    assert [module.conv.taps for module in branches(model).values()] == [3, 5, 3]


@pytest.mark.parametrize("scaled", [True, False])
def test_scores_are_scaled_by_the_new_size_of_a_head_unless_the_backbone_scales_none(scaled):
    model = made("gpt2", fields={"scale_attn_weights": scaled})
    assert model.transformer.h[0].attn.attention.scaling == pytest.approx((24 / 2 / 2) ** -0.5 if scaled else 1.0)
