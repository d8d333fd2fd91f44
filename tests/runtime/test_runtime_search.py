"""Translations and continuations without PyTorch are those of `generate`, token by token, and samples have its probabilities."""

import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from support.text import SOURCE
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline
from transformers.generation import logits_process

from hf_freeze import runtime
from hf_freeze.runtime.scores import softmax, warped
from hf_freeze.runtime.settings import NEW_TOKENS, Settings, settings_of

ENGINE = {"intra_op_num_threads": 1}
TEXTS = [*SOURCE, "katze", "wir"]
# Each is used in about a third of the draws.
CHOICES = {
    "no_repeat_ngram_size": [1, 2, 3],
    "repetition_penalty": [1.3, 0.7],
    "min_new_tokens": [4],
    "min_length": [5],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [None, 9],
    "eos_token_id": [[1, 9, 12]],
    "bad_words_ids": [[[5], [8, 9], [1]], [[3, 4, 5]]],
    "suppress_tokens": [[4, 6]],
    "begin_suppress_tokens": [[3, 10]],
}
OF_BEAMS = {
    "length_penalty": [0.0, 2.0, -0.5],
    "early_stopping": [True, "never"],
    "renormalize_logits": [True],
}


def drawn(random: random.Random, beams: int) -> dict:
    settings = {"num_beams": beams, "max_new_tokens": random.choice([1, 3, 8, 12])}
    if beams > 1:
        settings["num_return_sequences"] = random.choice([1, beams])
    for name, values in (CHOICES | (OF_BEAMS if beams > 1 else {})).items():
        if random.random() < 0.35:
            settings[name] = random.choice(values)
    return settings


def check_equal(expected: torch.Tensor, found: list, settings: dict) -> None:
    """`expected` (B * R, T): new tokens with padding; `found`: B lists of R lists, with the end token."""
    rows = [ids for returned in found for ids in returned]
    assert len(rows) == len(expected)
    ends = settings.get("eos_token_id", 1)
    for row, ids in zip(expected.tolist(), rows, strict=True):
        assert row[: len(ids)] == ids, settings
        assert {*row[len(ids) :]} <= {0, *(ends if isinstance(ends, list) else [ends])}, settings


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_translations_have_the_tokens_of_generate_whatever_the_settings(translator, beams):
    model = AutoModelForSeq2SeqLM.from_pretrained(translator, engine=ENGINE)
    tokenizer, found = AutoTokenizer.from_pretrained(translator), runtime.open(translator, threads=1)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    for settings in [{"num_beams": beams}, *(drawn(random.Random(seed), beams) for seed in range(25))]:
        check_equal(
            model.generate(**encoded, **settings)[:, 1:], found.ids(found.token_ids(TEXTS), **settings), settings
        )


@pytest.mark.parametrize("beams", [1, 4])
def test_continuations_have_the_tokens_of_generate_also_with_prompts_of_several_lengths(generator, beams):
    model = AutoModelForCausalLM.from_pretrained(generator, engine=ENGINE)
    tokenizer, found = AutoTokenizer.from_pretrained(generator, padding_side="left"), runtime.open(generator, threads=1)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    for seed in range(12):
        settings = drawn(random.Random(seed), beams)
        for name in ("min_length", "no_repeat_ngram_size"):  # where `generate` counts the padding
            settings.pop(name, None)
        new = model.generate(**encoded, **settings)[:, encoded["input_ids"].shape[1] :]
        check_equal(new, found.ids(found.token_ids(TEXTS), **settings), settings)
    alone = {"min_length": 19, "no_repeat_ngram_size": 2, "max_length": 23, "num_beams": beams}
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        new = model.generate(**encoded, **alone, max_new_tokens=None)[:, encoded["input_ids"].shape[1] :]
        check_equal(new, found.ids(found.token_ids([text]), **alone), alone)


def test_logits_after_each_token_are_those_of_the_engines_class(generator):
    model, found = AutoModelForCausalLM.from_pretrained(generator, engine=ENGINE), runtime.open(generator, threads=1)
    for ids, outputs in zip(found.token_ids(TEXTS), found.outputs(TEXTS, batch_size=3), strict=True):
        expected = model(input_ids=torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(outputs["logits"], expected, atol=2e-5)


def test_answers_are_those_of_the_pipelines(translator, generator):
    expected, found = pipeline("translation", model=str(translator)), runtime.open(translator, threads=1)
    for settings in ({}, {"num_beams": 3}, {"max_new_tokens": 4}):
        texts = [one["translation_text"] for one in expected(TEXTS, **settings)]
        assert len({*texts}) > 2
        assert found(TEXTS, batch_size=3, **settings) == texts, settings
        assert found(TEXTS[0], **settings) == texts[0]
    several = found(TEXTS[:2], num_beams=4, num_return_sequences=2)
    assert several == [
        [x["translation_text"] for x in one] for one in expected(TEXTS[:2], num_beams=4, num_return_sequences=2)
    ]
    assert found([]) == []
    short = found.ids(found.token_ids(TEXTS), max_length=6)  # above max_new_tokens of the folder
    assert max(len(ids) for (ids,) in short) == 5


def test_continuations_are_the_decoded_tokens_with_the_space_before_the_first_new_one(generator):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(generator), AutoTokenizer.from_pretrained(generator)
    found, settings = runtime.open(generator, threads=1), {"do_sample": False, "max_new_tokens": 9}
    for text in TEXTS:
        ids = model.generate(**tokenizer(text, return_tensors="pt", return_token_type_ids=False), **settings)[0]
        assert found(text, **settings) == tokenizer.decode(ids, skip_special_tokens=True)
        assert text + found(text, **settings, return_full_text=False) == found(text, **settings)
    assert found(TEXTS, **settings) == [found(text, **settings) for text in TEXTS]


def test_samples_have_the_probabilities_of_the_model(generator):
    """The first token, against the closed form from the logits; 99.99 % of such chi-squared values are smaller."""
    found, count = runtime.open(generator, threads=1), 4000
    logits = _logits(generator)
    for settings in ({"top_k": 0}, {"temperature": 0.5, "top_k": 0}, {"top_k": 4}, {"top_k": 0, "top_p": 0.6}):
        ids = found.ids(
            found.token_ids([TEXTS[0]]), do_sample=True, max_new_tokens=1, num_return_sequences=count, **settings
        )
        tokens = np.bincount([one[0] for one in ids[0]], minlength=len(logits))
        scores = logits.astype(np.float64) / settings.get("temperature", 1)
        order = np.argsort(-scores)
        kept = len(order)
        if settings["top_k"]:
            kept = settings["top_k"]
        elif "top_p" in settings:
            kept = int((softmax(scores)[order].cumsum() < settings["top_p"]).sum()) + 1
        expected = np.zeros_like(scores)
        expected[order[:kept]] = softmax(scores[order[:kept]])
        assert not tokens[expected == 0].any()
        likely = expected * count >= 5
        rest = max(expected[~likely].sum() * count, 1e-9)
        squares = ((tokens[likely] - expected[likely] * count) ** 2 / (expected[likely] * count)).sum()
        squares += (tokens[~likely].sum() - rest) ** 2 / rest if rest > 5 else 0
        free = likely.sum() + (rest > 5) - 1
        assert squares < free + 4 * np.sqrt(2 * max(free, 1)) + 10, settings


def _logits(folder) -> np.ndarray:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, engine=ENGINE),
        AutoTokenizer.from_pretrained(folder),
    )
    encoded = tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    return model(**encoded).logits[0, -1].numpy()


def test_filters_of_sampling_are_those_of_transformers():
    scores = np.random.default_rng(0).normal(size=(7, 30)).astype(np.float32) * 3
    for temperature, top_k, top_p in ((1.0, 5, 1.0), (0.7, 0, 0.8), (2.0, 9, 0.5), (1.0, 50, 0.01)):
        expected = torch.from_numpy(scores / temperature)
        if top_k:
            expected = logits_process.TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = logits_process.TopPLogitsWarper(top_p)(None, expected)
        found = warped(scores, Settings(temperature=temperature, top_k=top_k, top_p=top_p))
        np.testing.assert_allclose(found, expected.softmax(-1), atol=1e-6)


def test_a_sample_depends_on_the_seed_and_the_place_of_the_text_alone(generator):
    found = runtime.open(generator, threads=1)
    settings = {"do_sample": True, "max_new_tokens": 6}
    first = found(TEXTS, seed=1, **settings)
    assert found(TEXTS, seed=1, batch_size=3, **settings) == first
    assert found(TEXTS, seed=2, **settings) != first


def test_settings_that_are_wrong_or_not_followed_are_named(translator):
    found = runtime.open(translator, threads=1)
    for settings, message in (
        ({"beams": 4}, "unknown setting 'beams'; choose from max_new_tokens, max_length"),
        ({"num_beams": 0}, "num_beams=0: must be a whole number of at least 1"),
        ({"temperature": 0}, "temperature=0: must be a number above 0"),
        ({"top_p": 1.5}, "top_p=1.5: must be a number above 0 and at most 1"),
        ({"early_stopping": "often"}, "early_stopping='often': choose from True, False, 'never'"),
        ({"do_sample": True, "num_beams": 2}, "do_sample=True with num_beams=2: choose one of them"),
        ({"num_return_sequences": 2}, "num_return_sequences=2: must be at most num_beams=1"),
        ({"bad_words_ids": "no"}, "bad_words_ids='no': must be ids of tokens"),
        ({"max_length": 1}, "a prompt of 1 tokens leaves no new token: .* max_length is 1"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            found(TEXTS, **settings)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"place sets guidance_scale=2.0, which this runtime does not do"):
        settings_of({"guidance_scale": 2.0}, "place")


def test_defaults_are_those_of_generate():
    theirs = GenerationConfig._get_default_generation_params() | {"max_length": None}
    for one in fields(Settings):
        if theirs.get(one.name) is not None:
            assert getattr(Settings(), one.name) == theirs[one.name], one.name
    assert settings_of(theirs | {"transformers_version": "5"}, "place") == Settings()
    assert Settings().new_tokens(5, None, True) == NEW_TOKENS
