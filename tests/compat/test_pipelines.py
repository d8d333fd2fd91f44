"""The translation and text2text-generation pipelines: what users of transformers 4 know, and `generate` itself."""

import json
import logging
import sys

import pytest
import torch
import transformers.pipelines
from support.processes import printed_by
from support.text import SOURCE, fast_tokenizer, marian_tokenizer, spm_pieces, train_spm
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianModel,
    MarianMTModel,
    MarianTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

from hf_freeze.compat.pipelines import Text2TextGenerationPipeline, TranslationPipeline, register_pipelines

register_pipelines()

TEXTS = [SOURCE[0], "katze", "das haus am see ist heute schön und der hund trinkt milch", "wir", SOURCE[5]]
# Weights large enough, and no token twice (`no_repeat_ngram_size`), so that each text gets its own translation.
TINY = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2} | {
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "init_std": 0.6,
}


def marian_config(tokenizer, **kwargs):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids |= {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    return MarianConfig(vocab_size=len(tokenizer), decoder_vocab_size=len(tokenizer), **TINY | ids | kwargs)


def marian_model(tokenizer, **kwargs):
    torch.manual_seed(5)
    model = MarianMTModel(marian_config(tokenizer, **kwargs)).eval()
    model.generation_config.max_length, model.generation_config.no_repeat_ngram_size = 12, 1
    return model


def direct(model, tokenizer, texts, **kwargs):
    """What `generate` and `decode` give for each text alone."""
    outputs = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        ids = model.generate(encoded["input_ids"], attention_mask=encoded["attention_mask"], **kwargs)
        outputs.append([tokenizer.decode(row, skip_special_tokens=True) for row in ids])
    return outputs


def texts_of(results, key="translation_text"):
    return [result[key] for result in results]


@pytest.fixture(scope="session")
def marian_tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("marian_tokenizer")
    marian_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def marian_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("marian")
    marian_model(marian_tokenizer(directory)).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def fast_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fast")
    marian_model(fast_tokenizer(directory)).save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=["marian_dir", "fast_dir"])
def directory(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def pipe(directory):
    return pipeline("translation", model=directory)


# ---- the same as generate and decode


def test_the_tokenizer_is_the_one_of_the_checkpoint(marian_dir, fast_dir):
    assert isinstance(pipeline("translation", model=marian_dir).tokenizer, MarianTokenizer)
    assert type(pipeline("translation", model=fast_dir).tokenizer) is type(AutoTokenizer.from_pretrained(fast_dir))


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        ("translation", {"num_beams": 3, "max_new_tokens": 9}),
        ("translation_de_to_en", {"max_length": 6}),
        ("translation_tr_to_en", {}),
    ],
)
def test_translation_is_generate_and_decode(directory, task, arguments):
    pipe = pipeline(task, model=directory)
    assert isinstance(pipe, TranslationPipeline)
    assert pipe.task == task
    expected = direct(pipe.model, pipe.tokenizer, TEXTS, **arguments)
    assert texts_of(pipe(TEXTS, **arguments)) == [row[0] for row in expected]
    assert pipe(TEXTS[0], **arguments) == [{"translation_text": expected[0][0]}]
    assert len({row[0] for row in expected}) == len(TEXTS)  # the model does look at its input


def test_text2text_generation_is_generate_and_decode(directory):
    pipe = pipeline("text2text-generation", model=directory)
    assert type(pipe) is Text2TextGenerationPipeline
    expected = direct(pipe.model, pipe.tokenizer, TEXTS)
    assert texts_of(pipe(TEXTS), "generated_text") == [row[0] for row in expected]
    assert pipe(TEXTS[1]) == [{"generated_text": expected[1][0]}]


@pytest.mark.parametrize(
    ("batch_size", "arguments"), [(2, {"num_beams": 3}), (5, {}), (16, {"num_beams": 3, "num_return_sequences": 2})]
)
def test_a_batch_gives_what_each_text_gives_alone(pipe, batch_size, arguments):
    assert pipe(TEXTS, batch_size=batch_size, **arguments) == pipe(TEXTS, **arguments)


def test_left_padding_of_the_tokenizer_does_not_move_positions(fast_dir):
    tokenizer = AutoTokenizer.from_pretrained(fast_dir, padding_side="left")
    pipe = pipeline("translation", model=fast_dir, tokenizer=tokenizer)
    assert pipe(TEXTS, batch_size=5) == pipeline("translation", model=fast_dir)(TEXTS)


def test_several_sequences_for_each_text(pipe):
    arguments = {"num_beams": 4, "num_return_sequences": 3}
    expected = direct(pipe.model, pipe.tokenizer, TEXTS, **arguments)
    results = pipe(TEXTS, **arguments)
    assert [texts_of(rows) for rows in results] == expected
    assert texts_of(pipe(TEXTS[0], **arguments)) == expected[0]


def test_arguments_of_construction_hold_until_the_call_says_otherwise(directory):
    pipe = pipeline("translation", model=directory, num_beams=3, max_new_tokens=4, batch_size=2)
    plain = pipeline("translation", model=directory)
    assert pipe(TEXTS) == plain(TEXTS, num_beams=3, max_new_tokens=4)
    assert pipe(TEXTS, max_new_tokens=7) == plain(TEXTS, num_beams=3, max_new_tokens=7)
    config = GenerationConfig(max_length=5, num_beams=2, **{k: v for k, v in ids_of(plain.model).items() if v})
    assert plain(TEXTS, generation_config=config) == plain(TEXTS, max_length=5, num_beams=2)


def ids_of(model):
    names = ("pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
    return {name: getattr(model.generation_config, name) for name in names}


def test_sampling_and_model_output(pipe):
    torch.manual_seed(0)
    first = pipe(TEXTS[0], do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    assert pipe(TEXTS[0], do_sample=True, num_return_sequences=3, return_dict_in_generate=True) == first
    assert len(first) == 3


def test_stop_sequence(pipe):
    text = pipe(TEXTS[2])[0]["translation_text"]
    stop = next(character for character in text[2:-2] if character != " ")
    stopped = pipe(TEXTS[2], stop_sequence=stop)[0]["translation_text"]
    assert text.startswith(stopped.strip())
    assert stop in stopped
    assert len(stopped) < len(text)


def test_an_assistant_does_not_change_the_greedy_result(pipe):
    assisted = pipeline("translation", model=pipe.model, tokenizer=pipe.tokenizer, assistant_model=pipe.model)
    assert assisted(TEXTS[:2]) == pipe(TEXTS[:2])


def test_token_type_ids_of_a_tokenizer_do_not_reach_the_model(tmp_path):
    tokenizer = fast_tokenizer(tmp_path)
    pipe = pipeline("translation", model=marian_model(tokenizer), tokenizer=tokenizer)
    expected = pipe(TEXTS)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer(TEXTS[0])
    assert pipe(TEXTS, batch_size=2) == expected


# ---- lengths


@pytest.mark.parametrize(("positions", "new_tokens"), [(64, 63), (512, 256)])
def test_a_model_that_sets_no_length_gets_room_for_a_sentence(marian_tokenizer_dir, positions, new_tokens):
    tokenizer = AutoTokenizer.from_pretrained(marian_tokenizer_dir)
    model = marian_model(tokenizer, max_position_embeddings=positions)
    pad = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(pad_token_id=pad, decoder_start_token_id=pad)  # and nothing ends it
    pipe = pipeline("translation", model=model, tokenizer=tokenizer)
    for arguments, length in (({}, 1 + new_tokens), ({"max_length": 7}, 7), ({"max_new_tokens": 7}, 8)):
        assert pipe("hund", return_tensors=True, **arguments)[0]["translation_token_ids"].shape == (length,)


@pytest.mark.parametrize(("own", "length"), [({"max_new_tokens": 9}, 10), ({"max_length": 9}, 9)])
def test_the_length_that_a_model_sets_is_above_the_default(own, length, marian_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(marian_tokenizer_dir)
    model, pad = marian_model(tokenizer), tokenizer.pad_token_id
    model.generation_config = GenerationConfig(pad_token_id=pad, decoder_start_token_id=pad, **own)
    pipe = pipeline("translation", model=model, tokenizer=tokenizer)
    for arguments, expected in (({}, length), ({"max_new_tokens": 7}, 8)):
        assert pipe("hund", return_tensors=True, **arguments)[0]["translation_token_ids"].shape == (expected,)


def test_a_text_longer_than_the_positions_is_warned_about_and_can_be_cut(pipe, caplog):
    long = " ".join(TEXTS * 4)
    with (
        caplog.at_level(logging.WARNING, logger="hf_freeze.compat.pipelines"),
        pytest.raises((IndexError, RuntimeError)),
    ):
        pipe(long)
    length = len(pipe.tokenizer(long)["input_ids"])
    assert f"a text of {length} tokens is longer than the 64 positions of MarianMTModel" in caplog.text
    caplog.clear()
    cut = pipe(long, truncation=True)
    assert not caplog.records
    ids = pipe.tokenizer(long, truncation=True, max_length=64, return_tensors="pt")
    assert ids["input_ids"].shape[1] == 64
    expected = pipe.model.generate(**{name: ids[name] for name in ("input_ids", "attention_mask")})
    assert cut == [{"translation_text": pipe.tokenizer.decode(expected[0], skip_special_tokens=True)}]


# ---- what goes in


def test_containers_give_lists(pipe):
    datasets = pytest.importorskip("datasets")
    expected = pipe(TEXTS)
    assert expected == [pipe(text)[0] for text in TEXTS]
    column = datasets.Dataset.from_dict({"text": TEXTS})["text"]
    for inputs in (tuple(TEXTS), column, dict.fromkeys(TEXTS).keys()):
        assert pipe(inputs, batch_size=2) == expected
    assert pipe([]) == []
    assert pipe(TEXTS[:1]) == expected[:1]


def test_generators_and_datasets_stream(pipe):
    expected = [[result] for result in pipe(TEXTS)]
    taken = []

    def endless():
        while True:
            for text in TEXTS:
                taken.append(text)
                yield text

    stream = iter(pipe(endless(), batch_size=2))
    assert not isinstance(stream, list)
    assert [next(stream) for _ in range(5)] == expected
    assert len(taken) < 12
    assert list(pipe(map(str, TEXTS), batch_size=2)) == expected
    assert list(pipe(text for text in TEXTS)) == expected
    assert list(pipe(text for text in [])) == []

    class Rows(Dataset):
        def __len__(self):
            return len(TEXTS)

        def __getitem__(self, index):
            return {"text": TEXTS[index]}

    assert list(pipe(KeyDataset(Rows(), "text"), batch_size=3)) == expected


def test_an_empty_text_is_its_end_of_sentence(pipe):
    ids = torch.tensor([[pipe.tokenizer.eos_token_id]])
    expected = pipe.tokenizer.decode(pipe.model.generate(ids)[0], skip_special_tokens=True)
    assert pipe("") == [{"translation_text": expected}]
    assert pipe([TEXTS[0], ""], batch_size=2) == [*pipe(TEXTS[0]), {"translation_text": expected}]


def test_an_empty_text_for_a_tokenizer_that_adds_nothing(tmp_path):
    tokenizer = fast_tokenizer(tmp_path, end_of_text=False)
    assert tokenizer("")["input_ids"] == []
    pipe = pipeline("translation", model=marian_model(tokenizer), tokenizer=tokenizer)
    assert pipe([TEXTS[0], ""], batch_size=2) == [*pipe(TEXTS[0]), *pipe("</s>")]


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (3, r"'translation' takes text \(str\), not int: 3"),
        (None, "not NoneType: None"),
        (b"hund", "not bytes: b'hund'"),
        ({"text": "hund"}, r"not dict: .*pass one column"),
        (["hund", 4], r"takes text \(str\), not int at index 1: 4"),
        (["hund", ["katze"]], r"not list at index 1: \['katze'\]"),
        ([{"role": "user", "content": "hund"}], r"not dict at index 0: .*pass one column"),
    ],
)
def test_what_is_not_text_is_refused_by_its_type(pipe, inputs, match):
    with pytest.raises(ValueError, match=match):
        pipe(inputs)


def test_what_is_not_text_is_refused_in_a_stream(pipe):
    stream = pipe(item for item in ["hund", 4])
    with pytest.raises(ValueError, match="not int: 4"):
        list(stream)


def test_an_unknown_argument_is_refused(pipe):
    with pytest.raises(ValueError, match="beam_count"):
        pipe("hund", beam_count=3)


# ---- what comes out


@pytest.mark.parametrize("batch_size", [1, 5])
def test_return_tensors_gives_token_ids_without_padding(pipe, batch_size):
    results = pipe(TEXTS, return_tensors=True, batch_size=batch_size)
    for text, result in zip(TEXTS, results, strict=True):
        assert list(result) == ["translation_token_ids"]
        ids = result["translation_token_ids"]
        encoded = pipe.tokenizer(text, return_tensors="pt")
        expected = pipe.model.generate(encoded["input_ids"], attention_mask=encoded["attention_mask"])[0]
        assert torch.equal(ids, expected[: len(ids)])
        assert (expected[len(ids) :] == pipe.tokenizer.pad_token_id).all()


def test_token_ids_where_padding_is_the_end_of_text(pipe):
    pipe.tokenizer.pad_token = pipe.tokenizer.eos_token
    eos = pipe.tokenizer.eos_token_id
    assert pipe._strip_padding(torch.tensor([9, 8, eos, eos, eos])).tolist() == [9, 8, eos]
    assert pipe._strip_padding(torch.tensor([9, 8, 7])).tolist() == [9, 8, 7]


def test_clean_up_tokenization_spaces_reaches_decode(pipe, monkeypatch):
    seen = []
    monkeypatch.setattr(pipe.tokenizer, "decode", lambda ids, **kwargs: seen.append(kwargs) or "")
    pipe("hund", clean_up_tokenization_spaces=True)
    pipe("hund")
    assert [kwargs["clean_up_tokenization_spaces"] for kwargs in seen] == [True, None]


def test_a_saved_pipeline_is_an_ordinary_checkpoint(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("*.py"))
    assert pipeline("translation", model=str(tmp_path))(TEXTS) == pipe(TEXTS)


# ---- languages


@pytest.mark.parametrize(
    ("task", "pair"),
    [
        ("translation_tr_to_en", ("tr", "en")),
        ("translation_to_to_en", ("to", "en")),  # Tongan
        ("translation_en_to_to", ("en", "to")),
        ("translation_eng_Latn_to_fra_Latn", ("eng_Latn", "fra_Latn")),
        ("translation_XX_to_YY", ("XX", "YY")),
    ],
)
def test_every_pair_of_languages_is_a_task(task, pair):
    name, description, options = transformers.pipelines.check_task(task)
    assert name == "translation_XX_to_YY"
    assert description["impl"] is TranslationPipeline
    assert options == pair


@pytest.mark.parametrize("task", ["translation_", "translation_de", "translation_de_en", "translation_de_to_"])
def test_a_task_without_a_pair_is_refused(task):
    with pytest.raises(ValueError, match=f"unknown task '{task}'; name a pair of languages as in"):
        pipeline(task, model="nobody/nothing", config=MarianConfig())


@pytest.fixture(scope="session")
def multilingual_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("m2m")
    path = train_spm(SOURCE, directory / "m2m.spm")
    pieces = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *spm_pieces(path)])
    (directory / "m2m.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    tokenizer = M2M100Tokenizer(str(directory / "m2m.json"), str(path))
    vocab_size = len(pieces) + 100 + 8  # languages, and made-up words that fill the table
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=vocab_size, **TINY | ids))
    model.generation_config.max_length = 10
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def multilingual_direct(pipe, texts, source, target):
    pipe.tokenizer.src_lang = source
    outputs = []
    for text in texts:
        forced = {"forced_bos_token_id": pipe.tokenizer.get_lang_id(target)}
        ids = pipe.model.generate(**pipe.tokenizer(text, return_tensors="pt"), **forced)
        assert ids[0, 1] == forced["forced_bos_token_id"]
        outputs.append({"translation_text": pipe.tokenizer.decode(ids[0], skip_special_tokens=True)})
    return outputs


@pytest.mark.parametrize("batch_size", [1, 3])
def test_languages_of_a_multilingual_model(multilingual_dir, batch_size):
    pipe = pipeline("translation_de_to_en", model=multilingual_dir, batch_size=batch_size)
    expected = multilingual_direct(pipe, TEXTS, "de", "en")
    assert pipe(TEXTS) == expected
    other = multilingual_direct(pipe, TEXTS, "tr", "fr")
    assert other != expected
    assert pipe(TEXTS, src_lang="tr", tgt_lang="fr") == other  # above the names in the task
    assert pipe(TEXTS) == expected  # and for that call only
    plain = pipeline("translation", model=multilingual_dir, src_lang="tr", tgt_lang="fr")
    assert plain(TEXTS, batch_size=batch_size) == other


@pytest.mark.parametrize(
    ("languages", "match"),
    [
        ({}, r"M2M100Tokenizer needs src_lang= and tgt_lang="),
        ({"src_lang": "de"}, r"needs src_lang= and tgt_lang="),
        ({"src_lang": "de", "tgt_lang": "klingon"}, r"unknown language 'klingon'; choose from \['af'.*'zu'\]"),
        ({"src_lang": "klingon", "tgt_lang": "de"}, r"unknown language 'klingon'"),
    ],
)
def test_languages_that_are_missing_or_unknown(multilingual_dir, languages, match):
    with pytest.raises(ValueError, match=match):
        pipeline("translation", model=multilingual_dir)("hund", **languages)


def test_the_target_language_of_a_marian_model_with_several(tmp_path):
    tokenizer = marian_tokenizer(tmp_path, codes=(">>fr<<", ">>es<<"))
    pipe = pipeline("translation", model=marian_model(tokenizer), tokenizer=tokenizer)
    french = pipe(">>fr<< hund")
    assert french != pipe(">>es<< hund")
    assert pipe("hund", tgt_lang="fr") == french
    assert pipe(">>fr<< hund", tgt_lang="es") == french
    named = pipeline("translation_de_to_fr", model=pipe.model, tokenizer=tokenizer)
    assert named("hund") == french


def test_languages_for_a_model_without_are_ignored_aloud(pipe, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_freeze.compat.pipelines"):
        assert pipe("hund", tgt_lang="fr") == pipe("hund")
    assert "knows no languages: {'tgt_lang': 'fr'} ignored" in caplog.text


def test_the_prefix_and_defaults_that_t5_keeps_for_a_task(tmp_path):
    tokenizer = fast_tokenizer(tmp_path)
    specific = {"translation_en_to_de": {"prefix": "katze hund: ", "max_length": 9, "num_beams": 3}}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": len(tokenizer)}
    config = T5Config(**sizes, task_specific_params=specific, decoder_start_token_id=0, initializer_factor=5.0)
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    pipe = pipeline("translation_en_to_de", model=str(tmp_path))
    texts = ["katze hund: " + text for text in TEXTS]
    expected = direct(pipe.model, pipe.tokenizer, texts, max_length=9, num_beams=3)
    assert texts_of(pipe(TEXTS, batch_size=5)) == [row[0] for row in expected]
    plain = pipeline("translation", model=str(tmp_path))
    assert pipe(TEXTS, max_length=7) == plain(texts, max_length=7, num_beams=3)


# ---- registration


def test_registering_again_changes_nothing(monkeypatch):
    before, check = dict(PIPELINE_REGISTRY.supported_tasks), PIPELINE_REGISTRY.check_task
    register_pipelines()
    assert before == PIPELINE_REGISTRY.supported_tasks
    assert PIPELINE_REGISTRY.check_task is check
    monkeypatch.setattr(transformers.pipelines, "REMOVED_TASKS", {}, raising=False)  # older: none
    register_pipelines()
    assert transformers.pipelines.check_task("text-generation")[0] == "text-generation"
    assert {"translation", "text2text-generation"} <= set(transformers.pipelines.get_supported_tasks())


def test_a_task_that_someone_else_registered_is_left_alone(monkeypatch):
    theirs = {"impl": object, "pt": ()}
    monkeypatch.setitem(PIPELINE_REGISTRY.supported_tasks, "translation", theirs)
    monkeypatch.setitem(PIPELINE_REGISTRY.supported_tasks, "translation_ab_to_cd", theirs)
    register_pipelines()
    assert PIPELINE_REGISTRY.supported_tasks["translation"] is theirs
    assert PIPELINE_REGISTRY.check_task("translation_ab_to_cd") == ("translation_ab_to_cd", theirs, None)


def test_no_model_is_a_clear_error():
    with pytest.raises(ValueError, match=r"does not provide any default models for options \('tr', 'en'\)"):
        pipeline("translation_tr_to_en")
    with pytest.raises(ValueError, match="The task defaults can't be correctly selected"):
        pipeline("translation")
    assert PIPELINE_REGISTRY.supported_tasks["translation"]["default"]["en", "de"]["model"][0] == "google-t5/t5-base"


@pytest.mark.parametrize("task", ["translation", "translation_de_to_en", "text2text-generation"])
def test_a_model_that_cannot_is_refused(task, marian_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(marian_tokenizer_dir)
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(tokenizer)))
    with pytest.raises(ValueError, match=f"'{task}' needs an encoder-decoder model .*, not GPT2LMHeadModel"):
        pipeline(task, model=decoder, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="not MarianModel"):
        pipeline(task, model=MarianModel(marian_config(tokenizer)), tokenizer=tokenizer)


def test_the_import_loads_no_model_code():
    file = sys.modules[TranslationPipeline.__module__].__file__  # run alone, without the package around it
    code = "import runpy, sys, transformers.pipelines; before = set(sys.modules)\n"
    code += f"runpy.run_path({file!r}); print(*(name for name in set(sys.modules) - before if '.models.' in name))"
    assert printed_by(code).split() == []


def test_before_generate_arguments_were_set_aside(directory, monkeypatch):
    """The path for transformers 5.10, whose pipelines keep one `generation_config`."""
    pipe = pipeline("translation", model=directory)
    expected = pipe(TEXTS), pipe(TEXTS, max_length=6)
    if hasattr(transformers.pipelines.base.Pipeline, "_prepare_generate_kwargs"):
        config = pipe.model.generation_config
        monkeypatch.delattr(transformers.pipelines.base.Pipeline, "_prepare_generate_kwargs")
        pipe.generation_config = GenerationConfig(**config.to_diff_dict() | {"max_new_tokens": 11})
    assert (pipe(TEXTS), pipe(TEXTS, max_length=6)) == expected
