"""RecurrentDecoder: sizes, caches and searches against forwards without them, padding, what sees what, training, refusals."""

import pytest
import torch
from support.models import perturbed
from support.training import training_step
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, StaticCache

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.recurrent import RecurrentAttention, StateLayer
from hf_freeze.methods import HeadPruning, LayerSelection, RecurrentDecoder, Theseus

BART = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32} | {
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
TASK = {"marian": "seq2seq-lm", "gpt2": "causal-lm", "llama": "causal-lm", "bart": "seq2seq-lm"}
KINDS = {
    "ssru": {"kind": "ssru"},
    "aan": {"kind": "aan"},
    "aan, FFN": {"kind": "aan", "ffn_width": 24},
    "mean": {"kind": "aan", "gate": False},
    "lstm": {"kind": "lstm"},
}
CHUNKS = ((0, 4), (4, 5), (5, 6), (6, 8), (8, 9))  # a prompt, tokens one by one, two at once
every_backbone = pytest.mark.parametrize("name", TASK)
every_kind = pytest.mark.parametrize("kind", KINDS)


def config_of(name, **fields):
    tiny = BART if name == "bart" else ARCHITECTURES[name].tiny
    plain = {"forced_eos_token_id": None} if TASK[name] == "seq2seq-lm" else {}
    return AutoConfig.for_model(name, **tiny | plain | fields)


def made(name, kind="ssru", layers=None, **fields):
    """A variant as if trained, in eval mode."""
    method = RecurrentDecoder(**KINDS[kind], layers=layers)
    model = make_variant(config_of(name, **fields), [method], task=TASK[name], init="marian", seed=1)
    torch.manual_seed(2)
    return perturbed(model).eval()


def some_ids(rows=2, tokens=9):
    return torch.randint(2, 40, (rows, tokens), generator=torch.Generator().manual_seed(7))


SOURCE = {
    "input_ids": torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


@torch.no_grad()
def decoded(model, ids, cache=None, mask=None):
    """Logits of the tokens `ids` of the decoder, whose source has padding."""
    if not model.config.is_encoder_decoder:
        return model(ids, past_key_values=cache, attention_mask=mask).logits
    return model(**SOURCE, decoder_input_ids=ids, past_key_values=cache, decoder_attention_mask=mask).logits


def units(model):
    return [name for name, module in model.named_modules() if isinstance(module, RecurrentAttention)]


# -- sizes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ssru", lambda h: 2 * h * h + h),
        ("aan", lambda h: 4 * h * h + 2 * h),
        ("aan, FFN", lambda h: 4 * h * h + 2 * h + 2 * 24 * h + 24 + h),
        ("mean", lambda h: 0),
        ("lstm", lambda h: 8 * h * h + 4 * h),
    ],
)
@every_backbone
def test_numbers_of_parameters(name, kind, expected):
    with torch.device("meta"):
        plain = make_variant(config_of(name), [], task=TASK[name])
        model = make_variant(config_of(name), [RecurrentDecoder(**KINDS[kind])], task=TASK[name])
    h = 16
    attention = 2 * h * h + 2 * h * 8 if name == "llama" else 4 * h * h + 4 * h
    before, after = (count_parameters(each).by_component for each in (plain, model))
    assert after["attention"].total - before["attention"].total == 2 * (expected(h) - attention)
    assert all(after[part].total == before[part].total for part in before if part != "attention")


def test_only_the_layers_named_are_replaced():
    model = made("marian", layers={"decoder": [1]})
    assert units(model) == ["model.decoder.layers.1.self_attn"]
    assert "decoder.1.self" not in model.architecture.attentions(model.config)
    assert "decoder.0.self" in model.architecture.attentions(model.config)
    linears = [name for _, _, name in model.architecture.linears(model.config, "attention") if ".unit." in name]
    assert linears == ["decoder.layers.1.self_attn.unit.forget", "decoder.layers.1.self_attn.unit.input"]


# -- generation --------------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [*((kind, None) for kind in KINDS), ("ssru", {"decoder": [0]}), ("lstm", {"decoder": [1]})],
    ids=str,
)
def test_every_step_with_a_cache_is_that_of_the_whole(name, static, kind, layers):
    model, ids = made(name, kind, layers), some_ids()
    cache = StaticCache(config=model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
    expected = decoded(model, ids)
    for start, end in CHUNKS:
        found = decoded(model, ids[:, start:end], cache)
        torch.testing.assert_close(found, expected[:, start:end], rtol=1e-5, atol=1e-5)
    assert cache.get_seq_length() == 9


@every_kind
def test_the_cache_has_one_size_at_every_length(kind):
    model, sizes = made("gpt2", kind), []
    for tokens in (3, 30):
        cache = DynamicCache()
        decoded(model, some_ids(2, tokens), cache)
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        sizes.append(sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values)))
    assert sizes[0] == sizes[1]


def best_beams(model, prompts, beams, steps):
    """The scores of the best `beams` sentences of each prompt: beam search in a plain loop, every forward without a cache."""
    results = []
    for row, prompt in enumerate(prompts):
        source = {name: value[row : row + 1] for name, value in SOURCE.items()}
        hypotheses = [(0.0, prompt)]
        for _ in range(steps):
            further = []
            for score, ids in hypotheses:
                inputs = (
                    {"decoder_input_ids": ids[None]} | source
                    if model.config.is_encoder_decoder
                    else {"input_ids": ids[None]}
                )
                with torch.no_grad():
                    scores = model(**inputs, use_cache=False).logits[0, -1].double().log_softmax(-1)
                scores[1] = -torch.inf  # no sentence ends
                further += [
                    (score + float(s), torch.cat([ids, torch.tensor([token])])) for token, s in enumerate(scores)
                ]
            hypotheses = sorted(further, key=lambda pair: -pair[0])[:beams]
        results.append(hypotheses)
    return results


@every_backbone
@pytest.mark.parametrize("kind", ["ssru", "aan", "lstm"])
def test_beams_are_those_of_a_search_without_cache(name, kind):
    model, steps, beams = made(name, kind), 5, 3
    prompts = torch.zeros(2, 1, dtype=torch.long) if model.config.is_encoder_decoder else some_ids(2, 4)
    inputs = SOURCE if model.config.is_encoder_decoder else {"input_ids": prompts}
    found = model.generate(
        **inputs,
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = [hypothesis for row in best_beams(model, prompts, beams, steps) for hypothesis in row]
    assert [ids.tolist() for ids in found.sequences] == [ids.tolist() for _, ids in expected]
    scores = torch.tensor([score for score, _ in expected])
    torch.testing.assert_close(found.sequences_scores, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@every_kind
def test_padding_on_the_left_changes_no_generated_token(name, kind):
    model, ids = made(name, kind), some_ids(1, 6)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "pad_token_id": 0}
    alone = model.generate(ids[:, 3:], **settings)
    rows = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[:, 3:]], dim=1), ids])
    mask = (rows != 0).long()
    padded = model.generate(rows, attention_mask=mask, **settings)
    assert torch.equal(padded.sequences[0, 6:], alone.sequences[0, 3:])
    torch.testing.assert_close(torch.stack(padded.logits)[:, 0], torch.stack(alone.logits)[:, 0], rtol=1e-5, atol=1e-5)


def test_assisted_generation_is_refused():
    model = made("gpt2")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(some_ids(1, 4), prompt_lookup_num_tokens=2, max_new_tokens=4)


# -- what sees what ----------------------------------------------------------------------------------------------------------


@every_backbone
@every_kind
def test_a_later_token_changes_no_earlier_logits(name, kind):
    model, ids = made(name, kind), some_ids()
    other = ids.clone()
    other[:, 5] = 2 + (ids[:, 5] - 1) % 38
    logits, changed = decoded(model, ids), decoded(model, other)
    assert torch.equal(changed[:, :5], logits[:, :5])
    assert (changed[:, 8] != logits[:, 8]).any()  # three tokens later it is still seen


@every_backbone
@every_kind
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_right_changes_no_logits(name, kind, attention):
    model, ids = made(name, kind), some_ids()
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    expected = decoded(model, ids[:, :6])
    torch.testing.assert_close(decoded(model, ids, mask=mask)[1, :6], expected[1], rtol=1e-5, atol=1e-5)


# -- training ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("marian", "ssru"), ("gpt2", "ssru"), ("gpt2", "aan"), ("gpt2", "lstm")])
def test_it_learns_to_say_whether_a_token_has_occurred(name, kind):
    """Of texts that are new in each step, in one layer, of which nothing but the unit sees the past."""
    depth = {"marian": "decoder_layers", "gpt2": "n_layer"}[name]
    model = make_variant(
        config_of(name, **{depth: 1}), [RecurrentDecoder(**KINDS[kind])], task=TASK[name], seed=0
    ).eval()
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=0.02), torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(2, 12, (32, 10), generator=generator)
        labels = (ids == 2).cumsum(1).bool().long()
        source = {"input_ids": torch.ones(32, 1, dtype=torch.long)} if model.config.is_encoder_decoder else {}
        logits = model(**source, **{"decoder_input_ids" if source else "input_ids": ids}).logits[..., :2]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1  # 0.6 by the number of tokens so far


@every_kind
def test_units_succeed_trained_attentions(kind):
    """In Theseus: the old layers keep their attentions until they are gone."""
    trained = AUTO_CLASSES["seq2seq-lm"].from_config(config_of("marian"))
    theseus = Theseus(successor={"encoder": 2, "decoder": 2}, schedule=("linear", 0.5), steps=0.5)
    model = make_variant(trained, [theseus, RecurrentDecoder(**KINDS[kind])])
    training_step(model, ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm"))
    model.finalize()
    assert len(units(model)) == 2
    model.eval()
    cache, ids = EncoderDecoderCache(DynamicCache(), DynamicCache()), some_ids()
    found = torch.cat([decoded(model, token, cache) for token in ids.split(1, dim=1)], dim=1)
    torch.testing.assert_close(found, decoded(model, ids), rtol=1e-5, atol=1e-5)


# -- other methods, and refusals ---------------------------------------------------------------------------------------------


def test_layers_named_follow_a_later_selection(tmp_path):
    config = config_of("marian", decoder_layers=3)
    methods = [RecurrentDecoder(layers={"decoder": [0, 2]}), LayerSelection(keep={"decoder": [1, 2]})]
    model = make_variant(config, methods, task="seq2seq-lm")
    assert units(model) == ["model.decoder.layers.1.self_attn"]
    model.save_pretrained(tmp_path)
    reloaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert torch.equal(decoded(reloaded.eval(), some_ids()), decoded(model.eval(), some_ids()))


def test_trained_weights_are_refused():
    trained = AUTO_CLASSES["causal-lm"].from_config(config_of("gpt2"))
    with pytest.raises(ValueError, match="recurrent_decoder"):
        make_variant(trained, [RecurrentDecoder()])


def test_it_cannot_be_merged():
    with pytest.raises(
        ValueError, match="no native model has recurrent units beside its attentions; it cannot be merged"
    ):
        made("gpt2").merge()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gru"}, r"RecurrentDecoder\(kind='gru'\): choose from \['ssru', 'aan', 'lstm'\]"),
        ({"ffn_width": 24}, r"RecurrentDecoder\(kind='ssru', ffn_width=24\): only kind='aan' has ffn_width"),
        ({"kind": "lstm", "gate": False}, r"RecurrentDecoder\(kind='lstm', gate=False\): only kind='aan' has gate"),
        ({"kind": "aan", "ffn_width": 0}, r"RecurrentDecoder\(ffn_width=0\): must be an integer of at least 1"),
        (
            {"kind": "aan", "ffn_width": 257},
            r"RecurrentDecoder\(ffn_width=257\): must be at most 16 times the hidden size 16",
        ),
        ({"kind": "aan", "gate": 1}, r"RecurrentDecoder\(gate=1\): must be True or False"),
        ({"layers": [1]}, r"layers=\[1\]: must be None or a dict"),
        ({"layers": {"decoder": [2]}}, r"no layer 2 in stack 'decoder' of marian: it has layers 0..1"),
        ({"layers": {"decoder": []}}, r"RecurrentDecoder\(layers={'decoder': \[\]}\) names no layer"),
        ({"layers": {"encoder": [0]}}, r"the attentions of stack 'encoder' are not causal; choose layers of 'decoder'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(config_of("marian"), [RecurrentDecoder(**settings)], task="seq2seq-lm")


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (AutoConfig.for_model("bert"), "masked-lm", "method 'recurrent_decoder' does not support 'bert'; it supports"),
        (config_of("gpt2", add_cross_attention=True), "causal-lm", "this gpt2 has cross-attentions"),
        (config_of("llama", sliding_window=4), "causal-lm", "the masks of a sliding window do not tell padding"),
    ],
    ids=["bert", "cross-attention", "sliding window"],
)
def test_backbones_without_a_plain_decoder_are_refused(config, task, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        make_variant(config, [RecurrentDecoder()], task=task)


def test_heads_of_a_unit_cannot_be_pruned():
    with pytest.raises(ValueError, match=r"no attention 'decoder.0.self' in marian; choose from \['encoder.0.self'"):
        make_variant(made("marian"), [HeadPruning(heads={"decoder.0.self": [0]})])
