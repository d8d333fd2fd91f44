"""Lexical shortlists: against counts and a dense EM by loops, and `generate` against a mask over all logits."""

import numpy as np
import pytest
import torch
from support.text import words
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel, T5Config, pipeline
from transformers import T5ForConditionalGeneration as T5

from hf_freeze import analysis, make_variant, methods
from hf_freeze.analysis import shortlists

SIZE = 40
SOURCES = ["w5 w6", "w5 w7 w7", "w8", "w6 w9 w5 w5", "", "w9 w10"]
TARGETS = ["w30 w31", "w32 w30", "w33 w33 w34", "w31 w35 w30", "w36", "w35"]
ALIGNMENTS = [[(0, 0), (1, 1)], [(0, 1), (1, 0), (2, 0)], [(0, 0), (0, 1)], [(0, 2), (1, 0), (3, 2)], [], [(0, 0)]]
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}


def numbers(texts):
    return [[int(word[1:]) for word in text.split()] for text in texts]


def marian(**settings):
    return noisy(MarianMTModel(MarianConfig(vocab_size=SIZE, **SIZES, **IDS, **settings)))


def noisy(model):
    """Every weight, and Marian's bias on the logits, as if trained: outputs depend on the inputs."""
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n == "final_logits_bias")]:
            tensor.add_(torch.randn_like(tensor) * 0.5)
    return model.eval()


MODELS = {
    "Marian": marian,
    "Bart": lambda: noisy(BartForConditionalGeneration(BartConfig(vocab_size=SIZE, **SIZES, **IDS))),
    "T5": lambda: noisy(
        T5(T5Config(vocab_size=SIZE, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0))
    ),
    "factorized": lambda: make_variant(marian(), [methods.FactorizedEmbedding(rank=8)]),
    "bands": lambda: make_variant(marian(), [methods.AdaptiveEmbedding(cutoffs=[10, 20], output="dense")]),
    "int8": lambda: make_variant(marian(), [methods.Quantize(scheme="int8", components=["embeddings"])]),
    "bf16": lambda: marian().bfloat16(),
}


@pytest.fixture
def batch():
    ids = torch.tensor([[5, 6, 7, 8, 1], [9, 10, 1, 0, 0], [11, 5, 5, 1, 0]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture
def some():
    """A shortlist with 12 of 40 tokens for the batch, and other ones for other texts."""
    targets = [[i + 10, i + 11] if i in (5, 6, 7, 9) else [i % SIZE] for i in range(SIZE)]
    starts = np.cumsum([0, *map(len, targets)])
    return analysis.Shortlist(always=np.array([0, 1, 3, 30]), starts=starts, targets=np.concatenate(targets))


# -- computing ---------------------------------------------------------------------------------------------------------------


def dense_model_1(steps):
    """p[source, target], (41, 40), by loops; source 40 is the empty word."""
    p = np.full((SIZE + 1, SIZE), 1 / SIZE)
    for _ in range(steps):
        counts = np.zeros_like(p)
        for source, target in zip(numbers(SOURCES), numbers(TARGETS), strict=True):
            for t in target:
                total = sum(p[s, t] for s in [*source, SIZE])
                for s in [*source, SIZE]:
                    counts[s, t] += p[s, t] / total
        p = counts / np.maximum(counts.sum(1, keepdims=True), 1e-30)
    return p


def expected_best(p, best):
    """source -> its `best` targets of those with p > 0, the most probable first."""
    orders = [sorted(np.flatnonzero(row), key=lambda t, row=row: (-round(row[t], 12), t)) for row in p[:SIZE]]
    return [order[:best] for order in orders]


def lists(shortlist):
    return [list(shortlist.targets[a:b]) for a, b in zip(shortlist.starts, shortlist.starts[1:], strict=False)]


@pytest.mark.parametrize(("best", "steps"), [(2, 1), (2, 7), (50, 4)])
def test_the_best_tokens_are_those_of_a_dense_em(best, steps):
    found = analysis.shortlist(words(SIZE), SOURCES, TARGETS, best=best, steps=steps)
    assert lists(found) == expected_best(dense_model_1(steps), best)


def test_probabilities_are_those_of_a_dense_em():
    ids = [[np.array(each, dtype=np.int64) for each in numbers(texts)] for texts in (SOURCES, TARGETS)]
    source, target, p = shortlists._model_1(*ids, SIZE, 6)
    expected = dense_model_1(6)[:SIZE]
    np.testing.assert_allclose(p, expected[source, target], rtol=1e-9)
    assert len(p) == np.count_nonzero(expected)


def test_given_alignments_are_counted():
    counts = np.zeros((SIZE, SIZE))
    for source, target, links in zip(numbers(SOURCES), numbers(TARGETS), ALIGNMENTS, strict=True):
        for i, j in links:
            counts[source[i], target[j]] += 1
    found = analysis.shortlist(words(SIZE), SOURCES, TARGETS, best=2, alignments=ALIGNMENTS)
    assert lists(found) == expected_best(counts, 2)
    assert lists(found)[5] == [30]
    assert lists(found)[10] == []


def test_special_and_frequent_tokens_are_in_every_list():
    found = analysis.shortlist(words(SIZE), SOURCES, TARGETS, best=1, first=3)
    assert set(found.always) == {0, 1, 2, 30, 31, 33}  # of tokens as frequent as others, those with the lowest ids
    everything = analysis.shortlist(words(SIZE), SOURCES, TARGETS, first=1000)
    assert set(everything.always) == {0, 1, 2, *range(30, 37)}
    assert set(found.tokens([[8, 8], [0, 8]])) == {0, 1, 2, 30, 31, 33} | set(lists(found)[8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best": 0}, r"shortlist\(best=0\): must be an integer of at least 1"),
        ({"first": -1}, r"shortlist\(first=-1\): must be an integer of at least 0"),
        ({"steps": 0}, r"shortlist\(steps=0\): must be an integer of at least 1"),
        ({"targets": TARGETS[:-1]}, "6 texts and 5 targets must be pairs"),
        ({"texts": [], "targets": []}, "0 texts and 0 targets must be pairs, and at least one"),
        ({"texts": "w5"}, "lists of strings, not a string"),
        ({"targets": [""] * 6}, "the targets hold no token"),
        ({"alignments": ALIGNMENTS[1:]}, "5 alignments for 6 pairs of texts"),
        ({"alignments": [[(0, 2)], *ALIGNMENTS[1:]]}, r"alignments\[0\] links 0-2, and the texts have 2 and 2 tokens"),
    ],
)
def test_wrong_texts_and_settings_are_refused(changes, message):
    settings = {"texts": SOURCES, "targets": TARGETS} | changes
    with pytest.raises(ValueError, match=message):
        analysis.shortlist(words(SIZE), **settings)


def test_a_saved_shortlist_is_read_again(some, tmp_path):
    some.save(tmp_path / "shortlist.npz")
    loaded = analysis.Shortlist.load(tmp_path / "shortlist.npz")
    for name in ("always", "starts", "targets"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(some, name))


def test_files_that_are_no_shortlists_are_refused(some, tmp_path):
    (tmp_path / "text.npz").write_text("no array")
    np.savez(tmp_path / "other.npz", always=np.array([1]))
    np.save(tmp_path / "one.npy", np.array([1]))
    for name in ("text.npz", "other.npz", "one.npy", "missing.npz"):
        with pytest.raises(ValueError, match="is no shortlist; write one with"):
            analysis.Shortlist.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": np.array([0, 2, 1])}, "this shortlist is damaged"),
        ({"starts": np.array([0, 3])}, "its 2 starts must rise from 0 to 44"),
        ({"always": np.array([-1])}, "no id may be below 0"),
        ({"always": np.array([0.5])}, "three arrays of int64 with one axis"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(some, change, message):
    if "starts" in change:
        change = {"targets": some.targets, **change}
    with pytest.raises(ValueError, match=message):
        analysis.Shortlist(**{**vars(some), **change})


def test_a_source_token_that_the_shortlist_lacks_is_refused(some):
    with pytest.raises(ValueError, match=r"source tokens 0\.\.39, and not 40"):
        some.tokens([3, 40])
    with pytest.raises(ValueError, match=r"source tokens 0\.\.39, and not -100"):
        some.tokens([3, -100])


# -- translating -------------------------------------------------------------------------------------------------------------


def generated_with_mask(model, tokens, batch, **settings):
    """What `generate` writes if the other logits are set to -inf after all of them are computed."""
    banned = torch.ones(SIZE, dtype=torch.bool)
    banned[torch.as_tensor(tokens)] = False
    hook = model.get_output_embeddings().register_forward_hook(lambda *a: a[2].masked_fill(banned, -torch.inf))
    try:
        return model.generate(**batch, **settings)
    finally:
        hook.remove()


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_generate_writes_what_it_writes_with_a_mask(name, beams, batch, some):
    model, settings = MODELS[name](), {"num_beams": beams, "max_new_tokens": 12, "bad_words_ids": [[30], [15, 16]]}
    settings |= {"output_scores": True, "return_dict_in_generate": True}
    tokens = some.tokens(batch["input_ids"])
    expected = generated_with_mask(model, tokens, batch, **settings)
    with analysis.shortlisted(model, some):
        actual = model.generate(**batch, **settings)
    assert torch.equal(actual.sequences, expected.sequences)
    for one, other in zip(actual.scores, expected.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    plain = model.generate(**batch, **settings).sequences
    assert not torch.equal(actual.sequences, plain)  # the mask changes something
    assert set(actual.sequences.unique().tolist()) <= set(tokens) - {30}


def test_tokens_that_the_settings_of_generation_name_are_in(batch, some):
    model = marian()
    with analysis.shortlisted(model, some):
        forced = model.generate(**batch, forced_bos_token_id=37, eos_token_id=[1, 38], num_beams=2, max_new_tokens=6)
        end = model.generate(
            **batch, min_new_tokens=3, eos_token_id=38, suppress_tokens=[0, *range(2, 38), 39], max_new_tokens=9
        )
    assert (forced[:, 1] == 37).all()
    assert (end == 38).any()


def test_only_the_rows_of_the_shortlist_are_multiplied(batch, some):
    model = marian()

    def products(shortlist):
        with FlopCounterMode(display=False) as counter, analysis.shortlisted(model, shortlist):
            model.generate(**batch, min_new_tokens=4, max_new_tokens=4, num_beams=4)
        return counter.get_total_flops()

    every = analysis.Shortlist(always=np.arange(SIZE), starts=np.zeros(SIZE + 1, np.int64), targets=np.arange(0))
    left_out = SIZE - len(some.tokens(batch["input_ids"]))
    assert products(every) - products(some) == 2 * 12 * 4 * 16 * left_out  # 12 beams, 4 steps, 16 columns


def test_a_pipeline_translates_with_the_shortlist_and_afterwards_without(some):
    model, tokenizer = marian(), words(SIZE)
    translate = pipeline("translation", model=model, tokenizer=tokenizer)
    texts = ["w5 w6 w7 w8", "w9 w10", "w11 w5 w5"]
    before = translate(texts, max_new_tokens=8)
    with analysis.shortlisted(model, some):
        inside = translate(texts, max_new_tokens=8)
    assert inside != before
    assert translate(texts, max_new_tokens=8) == before


def test_an_error_inside_leaves_the_model_as_it_was(batch, some):
    model = marian()
    before = model.generate(**batch, max_new_tokens=8)
    with analysis.shortlisted(model, some):
        with pytest.raises(ValueError, match="no_setting"), analysis.shortlisted(model, some):
            model.generate(**batch, max_new_tokens=8, no_setting=object())
        with pytest.raises(ValueError, match="generate needs input_ids"):
            model.generate(inputs_embeds=torch.zeros(1, 3, 16))
    assert torch.equal(model.generate(**batch, max_new_tokens=8), before)
    assert not {"generate", "forward"} & (vars(model).keys() | vars(model.lm_head).keys())


def test_models_that_cannot_take_a_shortlist_are_refused(batch, some):
    adaptive = make_variant(marian(), [methods.AdaptiveEmbedding(cutoffs=[10, 20])])
    with (
        analysis.shortlisted(adaptive, some),
        pytest.raises(ValueError, match="AdaptiveSoftmax cannot compute the logits of some tokens alone"),
    ):
        adaptive.generate(**batch)
    with pytest.raises(ValueError, match=r"has the token 40, and MarianMTModel has 0\.\.39"):
        analysis.shortlisted(marian(), analysis.Shortlist(**{**vars(some), "always": np.array([40])})).__enter__()
    with pytest.raises(ValueError, match="BartModel must be an encoder-decoder of PyTorch with an output matrix"):
        analysis.shortlisted(MODELS["Bart"]().model, some).__enter__()
    capped = marian()
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="MarianMTModel caps its logits"):
        analysis.shortlisted(capped, some).__enter__()
