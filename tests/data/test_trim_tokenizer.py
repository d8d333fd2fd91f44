"""Tokenizers of fewer tokens, and which tokens a corpus needs."""

import copy
import json
import pickle

import pytest
import sentencepiece
import torch
from support.text import SOURCE, TARGET, marian_tokenizer
from support.tokenizers_of_each_kind import (
    byte_fallback,
    byte_level,
    character_bpe,
    unigram,
    word_level,
    wordpiece,
)
from transformers import AutoTokenizer, ByT5Tokenizer, MarianConfig, MarianMTModel

from hf_freeze import make_variant
from hf_freeze.analysis import choose_vocabulary
from hf_freeze.analysis.vocabulary import count_tokens
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.data.sentencepiece_model import keep_pieces
from hf_freeze.lab.data import builtin_corpus, train_tokenizer, trim_tokenizer

TEXTS = SOURCE + TARGET
SOME = SOURCE[:2] + TARGET[:2]


FAST = [character_bpe, unigram, byte_level, wordpiece, word_level, byte_fallback]
ALL = [*FAST, marian_tokenizer]
every_fast = pytest.mark.parametrize("make", FAST, ids=lambda make: make.__name__)
every_kind = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)


def pieces(tokenizer, text, **settings):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **settings)["input_ids"])


def choose(tokenizer, texts=SOME, **settings):
    return choose_vocabulary(tokenizer, texts, **(settings or {"coverage": 1.0})).keep


@every_kind
def test_text_of_kept_pieces_is_split_as_before(make, tmp_path):
    tokenizer = make(tmp_path / "whole")
    before = [tokenizer(text)["input_ids"] for text in TEXTS]
    keep = choose(tokenizer)
    assert len(keep) < len(tokenizer)
    trimmed = trim_tokenizer(tokenizer, keep)
    trimmed.save_pretrained(tmp_path / "trimmed")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "trimmed")
    for new in (trimmed, loaded, copy.deepcopy(trimmed), pickle.loads(pickle.dumps(trimmed))):
        assert type(new) is type(tokenizer)
        assert len(new) == len(keep)
        assert sorted(new.get_vocab().values()) == list(range(len(keep)))
        assert new.special_tokens_map == tokenizer.special_tokens_map
        assert new.model_max_length == tokenizer.model_max_length
        for text in SOME:
            old_ids, new_ids = tokenizer(text)["input_ids"], new(text)["input_ids"]
            assert [keep[number] for number in new_ids] == old_ids, "the template too"
            assert pieces(new, text) == pieces(tokenizer, text)
            assert new.decode(new_ids) == tokenizer.decode(old_ids)
            assert new.decode(new_ids, skip_special_tokens=True) == tokenizer.decode(old_ids, skip_special_tokens=True)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == before, "the old one is as it was"
    for path in (tmp_path / "trimmed").glob("*.json"):
        assert "hf_freeze" not in path.read_text(encoding="utf-8"), "a name of the place where it was made"


@every_kind
def test_padding_and_truncation(make, tmp_path):
    tokenizer = make(tmp_path / "whole")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    keep = choose(tokenizer)
    trimmed = trim_tokenizer(tokenizer, keep)
    settings = {"padding": True, "truncation": True, "max_length": 6, "return_tensors": "pt"}
    short = [SOME[0], "der"]
    old, new = tokenizer(short, **settings), trimmed(short, **settings)
    assert torch.equal(torch.tensor(keep)[new["input_ids"]], old["input_ids"])
    assert torch.equal(new["attention_mask"], old["attention_mask"])
    assert not old["attention_mask"].all()
    # What the backend pads and truncates by itself is in its file as well.
    again = trim_tokenizer(trimmed, list(range(len(keep))))
    assert torch.equal(again(short, **settings)["input_ids"], new["input_ids"])


@every_fast
def test_pairs_and_special_tokens(make, tmp_path):
    tokenizer = make(tmp_path)
    keep = choose(tokenizer)
    trimmed = trim_tokenizer(tokenizer, keep)
    assert [keep[number] for number in trimmed.all_special_ids] == tokenizer.all_special_ids
    assert set(tokenizer.added_tokens_decoder) <= set(keep)
    old, new = tokenizer(SOME[0], SOME[1]), trimmed(SOME[0], SOME[1])
    assert [keep[number] for number in new["input_ids"]] == old["input_ids"]
    assert new.get("token_type_ids") == old.get("token_type_ids")
    text = f"der{tokenizer.all_special_tokens[0]}hund"
    assert [keep[number] for number in trimmed(text)["input_ids"]] == tokenizer(text)["input_ids"]


@every_kind
def test_other_text_is_split_into_what_is_kept(make, tmp_path):
    """Whatever the characters of the corpus spell is known, even where its pieces are rare."""
    tokenizer = make(tmp_path)
    smallest = len(choose(tokenizer, coverage=1e-9))
    trimmed = trim_tokenizer(tokenizer, choose(tokenizer, size=smallest + 2))
    for text in SOME:
        ids = trimmed(text)["input_ids"]
        if make is not word_level:
            assert trimmed.unk_token_id not in ids or trimmed.unk_token == trimmed.eos_token
            assert trimmed.decode(ids, skip_special_tokens=True) == tokenizer.decode(
                tokenizer(text)["input_ids"], skip_special_tokens=True
            )


def test_bytes_spell_any_text(tmp_path):
    for make in (byte_level, byte_fallback):
        tokenizer = make(tmp_path)
        trimmed = trim_tokenizer(tokenizer, choose(tokenizer, coverage=0.5))
        ids = trimmed("日本 Ωß")["input_ids"]
        assert trimmed.decode(ids, skip_special_tokens=True) == "日本 Ωß"


# -- choosing ------------------------------------------------------------------------------------------------------------------


def test_the_most_frequent_come_first_and_bring_what_merges_into_them():
    tokenizer = character_bpe(None)
    vocabulary = tokenizer.get_vocab()
    texts = ["garten"] * 9 + ["der hund"]
    everything = choose(tokenizer, texts)
    found = {token for text in texts for token in tokenizer(text)["input_ids"]}
    assert found <= set(everything)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = {token for token, number in vocabulary.items() if number in everything}
    for left, right in model["merges"]:
        assert left + right not in tokens or {left, right} <= tokens
    part = choose(tokenizer, texts, coverage=0.7)
    assert set(part) < set(everything)
    assert set(tokenizer("garten")["input_ids"]) <= set(part)
    assert choose(tokenizer, texts, size=len(everything)) == everything
    assert set(choose(tokenizer, texts, size=len(everything) - 1)) < set(everything)
    assert choose(tokenizer, texts, size=len(tokenizer)) == everything


def test_coverage_is_the_share_of_occurrences():
    tokenizer = unigram(None)
    counted = [token for text in TEXTS for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    sizes = []
    for coverage in (0.5, 0.8, 0.95, 1):
        keep = set(choose(tokenizer, TEXTS, coverage=coverage))
        assert sum(token in keep for token in counted) / len(counted) >= coverage
        sizes.append(len(keep))
    assert sizes == sorted(sizes)


def test_both_sides_of_a_marian_tokenizer_count(tmp_path):
    tokenizer = marian_tokenizer(tmp_path, codes=(">>fr<<", ">>es<<"))
    vocabulary = tokenizer.get_vocab()
    keep = choose_vocabulary(tokenizer, SOURCE, targets=TARGET, coverage=1).keep
    counts = count_tokens(tokenizer, SOURCE, targets=TARGET)
    assert choose_vocabulary(tokenizer, (), counts=counts, coverage=1).keep == keep
    size = len(keep) - 2
    counted = choose_vocabulary(tokenizer, (), counts=counts, size=size)
    assert counted == choose_vocabulary(tokenizer, SOURCE, targets=TARGET, size=size)
    used = set(tokenizer(SOURCE)["input_ids"][0]) | set(tokenizer(text_target=TARGET)["input_ids"][0])
    assert used <= set(keep)
    assert {vocabulary[token] for token in (">>fr<<", ">>es<<", "<pad>", "</s>", "<unk>")} <= set(keep)
    assert set(choose(tokenizer, SOURCE, coverage=1)) < set(keep)
    trimmed = trim_tokenizer(tokenizer, keep)
    assert trimmed.supported_language_codes == [">>fr<<", ">>es<<"]
    assert pieces(trimmed, f">>fr<< {SOURCE[0]}") == pieces(tokenizer, f">>fr<< {SOURCE[0]}")
    for text in TARGET:
        ids = trimmed(text_target=text)["input_ids"]
        assert [keep[number] for number in ids] == tokenizer(text_target=text)["input_ids"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"choose_vocabulary\(size=None, coverage=None\): give one of them"),
        ({"size": 50, "coverage": 0.5}, r"\(size=50, coverage=0\.5\): give one of them"),
        ({"coverage": 0}, r"coverage=0\): must be a share in \(0, 1\]"),
        ({"coverage": 1.1}, r"coverage=1\.1\): must be a share in \(0, 1\]"),
        ({"coverage": True}, r"coverage=True\): must be a share in \(0, 1\]"),
        (
            {"size": 5},
            r"size=5\): must be in \d+\.\.120: special tokens and characters need \d+, and the tokenizer has 120",
        ),
        ({"size": 121}, r"size=121\): must be in \d+\.\.120"),
        ({"size": 50.0}, r"size=50\.0\): must be in"),
        ({"texts": [], "size": 50}, "the texts hold no token"),
        ({"texts": "der hund", "size": 50}, "are lists of strings, not a string"),
    ],
)
def test_choices_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        choose_vocabulary(character_bpe(None), settings.pop("texts", SOME), **settings)


# -- what is refused -----------------------------------------------------------------------------------------------------------


def test_tokenizers_that_cannot_be_trimmed(tmp_path):
    marian_tokenizer(tmp_path)
    (tmp_path / "target_vocab.json").write_text((tmp_path / "vocab.json").read_text())
    two = AutoTokenizer.from_pretrained(tmp_path, separate_vocabs=True)
    for tokenizer, name in (
        (ByT5Tokenizer(), "a ByT5Tokenizer"),
        (two, "a MarianTokenizer with two vocabularies"),
        (None, "a NoneType"),
    ):
        message = (
            f"{name} cannot be trimmed; fast tokenizers of BPE, Unigram, WordPiece, WordLevel can, and MarianTokenizer"
        )
        with pytest.raises(ValueError, match=message):
            trim_tokenizer(tokenizer, [0, 1])
        with pytest.raises(ValueError, match=message):
            choose_vocabulary(tokenizer, SOME, coverage=1)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([], "keep must list at least one id, as distinct integers in ascending order"),
        ([0, 1, 2, 2], "keep must list at least one id, as distinct integers"),
        ([0, 1, 2.0], "keep must list at least one id, as distinct integers"),
        ([0, 1, 2, 200], r"keep has the id 200; the tokenizer has 0\.\.119"),
        ([-1, 0, 1, 2], "keep has the id -1"),
        ([0, 1, 5], "keep lacks the id 2 of the special token '<unk>'"),
        ([1, 2, 5], "keep lacks the id 0 of the special token '<pad>'"),
    ],
)
def test_ids_that_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        trim_tokenizer(character_bpe(None), keep)


def test_a_token_of_the_template_is_needed():
    """Even where the tokenizer does not call it special."""
    tokenizer = word_level(None)
    with pytest.raises(ValueError, match="keep lacks the id 1 of the special token '<s>'"):
        trim_tokenizer(tokenizer, [0, 2, 3, 4])


def test_sentencepiece_models(tmp_path):
    tokenizer = marian_tokenizer(tmp_path)
    whole = (tmp_path / "source.spm").read_bytes()
    before = tokenizer.spm_source
    names = [before.id_to_piece(number) for number in range(len(before))]
    assert keep_pieces(whole, set(names)) == whole
    short = {name for name in names if len(name) == 1}
    after = sentencepiece.SentencePieceProcessor(model_proto=keep_pieces(whole, short))
    assert {after.id_to_piece(number) for number in range(len(after))} == short | {"<unk>", "</s>"}
    assert after.encode("der hund", out_type=str) == ["▁", "d", "e", "r", "▁", "h", "u", "n", "d"]
    for damaged in (whole[:-1], whole[:7], b"\xff", b"\x0b\x00"):
        with pytest.raises(ValueError, match="not a sentencepiece model"):
            keep_pieces(damaged, short)
    path = tmp_path / "bpe.spm"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SOURCE), model_writer=file, vocab_size=60, model_type="bpe", minloglevel=2
        )
    with pytest.raises(ValueError, match=r"of type 2 cannot be trimmed; Unigram models \(type 1\) can"):
        keep_pieces(path.read_bytes(), short)


# -- with a model --------------------------------------------------------------------------------------------------------------


def test_a_trimmed_translator_writes_the_same_text(tmp_path):
    tokenizer = marian_tokenizer(tmp_path)
    special = {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": tokenizer.pad_token_id}
    special |= {"eos_token_id": tokenizer.eos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = MarianMTModel(MarianConfig(**ARCHITECTURES["marian"].tiny | special | sizes)).eval()
    trimming = choose_vocabulary(tokenizer, SOURCE[:3], targets=TARGET[:3], coverage=1)
    removed = [[number] for number in range(len(tokenizer)) if number not in trimming.keep]
    settings = {"max_new_tokens": 12, "num_beams": 2, "renormalize_logits": True}
    old = model.generate(**tokenizer(SOURCE[:3], padding=True, return_tensors="pt"), **settings, bad_words_ids=removed)
    variant, trimmed = make_variant(model, [trimming]), trim_tokenizer(tokenizer, trimming.keep)
    assert variant.config.pad_token_id == trimmed.pad_token_id
    new = variant.generate(**trimmed(SOURCE[:3], padding=True, return_tensors="pt"), **settings)
    assert trimmed.batch_decode(new) == tokenizer.batch_decode(old)
    assert any(trimmed.batch_decode(new, skip_special_tokens=True))


def test_on_the_builtin_corpus():
    corpus = builtin_corpus(train=400, dev=20, test=20)
    texts = corpus["train"]["source"][:]
    for kind in ("bpe", "unigram"):
        tokenizer = train_tokenizer(texts, 300, kind)
        keep = choose(tokenizer, texts[:50])
        trimmed = trim_tokenizer(tokenizer, keep)
        assert len(trimmed) < len(tokenizer)
        for text in texts[:50]:
            assert [keep[number] for number in trimmed(text)["input_ids"]] == tokenizer(text)["input_ids"]
