"""Tokens removed from a model: logits, configs, generation, and what is refused. The tokenizers: test_trim_tokenizer.py."""

import copy
import json

import pytest
import torch
from support import cases
from torch.nn import functional
from transformers import AutoConfig, AutoModel, GenerationConfig, MarianConfig, MarianMTModel
from typer.testing import CliRunner

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.base import canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.cli import app
from hf_freeze.model.token_ids import renumber_token_ids

KEEP = [0, 1, *range(2, 20, 2), 21, 25, 33, 39]  # 0 pads and 1 ends, in the tiny configs
NUMBERS = {old: new for new, old in enumerate(KEEP)}
LOGITS = [("marian", "seq2seq-lm"), ("bert", "masked-lm"), ("gpt2", "causal-lm"), ("llama", "causal-lm")]


def config_of(model_type, **changes):
    config = AutoConfig.for_model(model_type, **ARCHITECTURES[model_type].tiny | changes)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def native(model_type, task, **changes):
    torch.manual_seed(0)
    model = AUTO_CLASSES[task].from_config(config_of(model_type, **changes)).eval()
    with torch.no_grad():
        for name, parameter in canonical_parameters(model):
            if ARCHITECTURES[model_type].component(name.removeprefix(f"{model.base_model_prefix}.")) != "constant":
                parameter += 0.3 * torch.randn_like(parameter)
        if model_type == "marian" and task == "seq2seq-lm":
            model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    return model


def marian(**changes):
    return native("marian", "seq2seq-lm", **changes)


def trim(model, keep=KEEP, **arguments):
    return make_variant(model, [methods.VocabularyTrimming(keep=keep)], **arguments)


def kept_batch(model_type):
    """Ids before and after, of tokens that are kept; 0 pads."""
    old = torch.tensor([[10, 8, 4, 33, 1], [39, 4, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    decoder = torch.tensor([[0, 6, 2, 21], [0, 8, 1, 0]])
    both = []
    for number in (lambda token: token, NUMBERS.__getitem__):
        batch = {"input_ids": old.clone().apply_(number), "attention_mask": mask}
        if model_type == "marian":
            batch["decoder_input_ids"] = decoder.clone().apply_(number)
        both.append(batch)
    return both


@torch.no_grad()
def logits(model, batch):
    return model.eval()(**batch).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_type", "task"), LOGITS, ids=[model_type for model_type, _ in LOGITS])
def test_logits_of_kept_tokens_are_those_of_the_whole_model(model_type, task, tied, tmp_path):
    backbone = native(model_type, task, tie_word_embeddings=tied)
    variant = trim(backbone)
    before, after = kept_batch(model_type)
    expected = logits(backbone, before)[..., KEEP]
    torch.testing.assert_close(logits(variant, after), expected, rtol=0, atol=1e-6)
    merged = variant.merge()
    assert merged.config.vocab_size == len(KEEP)
    assert torch.equal(logits(merged, after), logits(variant, after))
    output = variant.get_output_embeddings()
    assert (output.weight is variant.get_input_embeddings().weight) == tied
    assert output.out_features == variant.get_input_embeddings().num_embeddings == len(KEEP)
    variant.save_pretrained(tmp_path)
    loaded, info = AUTO_CLASSES[task].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded, after), logits(variant, after))
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


def test_a_table_for_each_side_keeps_the_same_tokens():
    backbone = marian(share_encoder_decoder_embeddings=False)
    variant = trim(backbone)
    before, after = kept_batch("marian")
    torch.testing.assert_close(logits(variant, after), logits(backbone, before)[..., KEEP], rtol=0, atol=1e-6)
    tables = variant.model.encoder.embed_tokens.weight, variant.model.decoder.embed_tokens.weight
    assert tables[0].shape == tables[1].shape == (len(KEEP), 16)
    assert not torch.equal(*tables)
    assert variant.lm_head.weight is tables[1]
    with pytest.raises(ValueError, match=r"keeps the same tokens in .*, and only one would be resized; merge"):
        variant.resize_token_embeddings(30)
    with pytest.raises(ValueError, match=r"and only one would be resized; merge"):
        variant.resize_decoder_token_embeddings(30)
    variant.merge().resize_token_embeddings(30)


def test_the_loss_is_that_of_the_kept_tokens_alone():
    """-log p(y) / Σ p(kept): the softmax of the whole model, renormalised."""
    backbone = marian()
    before, after = kept_batch("marian")
    labels = torch.tensor([[6, 2, 21, 1], [8, 1, -100, -100]])
    everything = logits(backbone, before).log_softmax(-1)
    kept = everything[..., KEEP] - everything[..., KEEP].logsumexp(-1, keepdim=True)
    new = labels.clone().apply_(lambda token: NUMBERS.get(token, token))
    expected = functional.nll_loss(kept.flatten(0, 1), new.flatten())
    torch.testing.assert_close(trim(backbone)(**after, labels=new).loss, expected)


def test_the_same_text_is_generated_where_only_kept_tokens_can_be():
    backbone = marian()
    removed = sorted(set(range(40)) - set(KEEP))
    before, after = ({n: v for n, v in batch.items() if "decoder" not in n} for batch in kept_batch("marian"))
    for settings in ({"num_beams": 1}, {"num_beams": 3}, {"num_beams": 2, "use_cache": False}):
        settings |= {"max_new_tokens": 8, "do_sample": False, "renormalize_logits": True}
        expected = backbone.generate(**before, **settings, bad_words_ids=[[token] for token in [*removed, 0]])
        variant = trim(backbone)
        variant.generation_config.bad_words_ids = [[0]]
        assert torch.equal(variant.generate(**after, **settings), expected.clone().apply_(NUMBERS.__getitem__))


def test_rows_by_hand():
    backbone, variant = marian(), trim(marian())
    assert torch.equal(variant.model.shared.weight, backbone.model.shared.weight[KEEP])
    assert torch.equal(variant.final_logits_bias, backbone.final_logits_bias[:, KEEP])
    assert "final_logits_bias" in variant._buffers
    fresh = make_variant(config_of("marian"), [methods.VocabularyTrimming(keep=KEEP)], task="seq2seq-lm", init="marian")
    assert fresh.final_logits_bias.shape == (1, len(KEEP))
    assert isinstance(fresh.final_logits_bias, torch.nn.Parameter)
    assert fresh.model.shared.weight.abs().max() <= (3 / 16) ** 0.5
    difference = count_parameters(backbone).total - count_parameters(variant).total
    assert difference == (40 - len(KEEP)) * 16


# -- token ids in the configs ------------------------------------------------------------------------------------------------

SPECIAL = {
    "pad_token_id": 39,
    "eos_token_id": 4,
    "decoder_start_token_id": 39,
    "forced_eos_token_id": 4,
    "bos_token_id": None,
}


def test_token_ids_of_both_configs_are_numbered_anew(tmp_path):
    backbone = marian(**SPECIAL)
    backbone.generation_config = GenerationConfig(
        pad_token_id=39,
        eos_token_id=[4, 10],
        decoder_start_token_id=39,
        forced_eos_token_id=4,
        bad_words_ids=[[39], [33, 35], [33, 21]],
        suppress_tokens=[3, 6],
        sequence_bias=[[[8], -1.0], [[9], -2.0]],
        num_beams=5,
    )
    before = backbone.config.to_dict(), backbone.generation_config.to_dict()
    variant = trim(backbone)
    pad, eos = NUMBERS[39], NUMBERS[4]
    for model in (variant, variant.merge()):
        config, generation = model.config, model.generation_config
        assert (config.vocab_size, config.decoder_vocab_size) == (len(KEEP), len(KEEP))
        assert (config.pad_token_id, config.eos_token_id) == (pad, eos)
        assert (config.decoder_start_token_id, config.forced_eos_token_id) == (pad, eos)
        assert config.bos_token_id is None
        assert (generation.pad_token_id, generation.eos_token_id) == (pad, [eos, NUMBERS[10]])
        assert (generation.decoder_start_token_id, generation.forced_eos_token_id) == (pad, eos)
        assert generation.bad_words_ids == [[pad], [NUMBERS[33], NUMBERS[21]]]
        assert generation.suppress_tokens == [NUMBERS[6]]
        assert generation.sequence_bias == [[[NUMBERS[8]], -1.0]]
        assert generation.num_beams == 5
        for table in (model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
            assert table.padding_idx == pad
    assert (backbone.config.to_dict(), backbone.generation_config.to_dict()) == before
    variant.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert loaded.model.shared.padding_idx == pad
    assert loaded.generation_config.to_dict() == variant.generation_config.to_dict()
    again = make_variant(loaded, [methods.Freeze(ffn="frozen")])
    assert again.config.pad_token_id == again.generation_config.pad_token_id == pad, "numbered anew once"
    fresh = trim(config_of("marian", **SPECIAL), task="seq2seq-lm")
    assert fresh.generation_config.decoder_start_token_id == pad


def test_the_padding_row_of_fresh_weights_is_zero():
    fresh = trim(config_of("marian", **SPECIAL), task="seq2seq-lm")
    rows = fresh.model.shared.weight.abs().sum(1)
    assert (rows == 0).nonzero().flatten().tolist() == [NUMBERS[39]]


def test_token_ids_may_be_changed_later(tmp_path):
    """As the Trainer does, which takes those of the tokenizer."""
    variant = trim(native("gpt2", "causal-lm"))
    variant.config.pad_token_id, variant.config.eos_token_id = 3, [4, 5]
    variant.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES["causal-lm"].from_pretrained(tmp_path)
    assert (loaded.config.pad_token_id, loaded.config.eos_token_id) == (3, [4, 5])
    assert make_variant(loaded, [methods.Freeze(norm="frozen")]).config.pad_token_id == 3


def test_an_id_outside_the_vocabulary_stays():
    config = config_of("gpt2", bos_token_id=50256, eos_token_id=50256, pad_token_id=None)
    variant = trim(config, task="causal-lm")
    assert (variant.config.bos_token_id, variant.config.pad_token_id) == (50256, None)


def test_twice_is_one_after_the_other(tmp_path):
    backbone = marian()
    second = [0, 1, 3, 5, 8]
    twice = make_variant(backbone, [methods.VocabularyTrimming(keep=keep) for keep in (KEEP, second)])
    assert torch.equal(twice.model.shared.weight, backbone.model.shared.weight[[KEEP[token] for token in second]])
    assert twice.config.original_fields == {"vocab_size": 40, "decoder_vocab_size": 40}
    twice.save_pretrained(tmp_path)
    assert AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path).config.to_dict()["methods"] == twice.config.methods
    with pytest.raises(ValueError, match=r"keep has the id 15; the vocabulary has 0\.\.14"):
        trim(trim(backbone), [0, 1, 15])


def test_a_config_is_plain_data(tmp_path):
    variant = trim(marian())
    variant.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["methods"] == [{"method": "vocabulary_trimming", "keep": KEEP}]
    assert (data["vocab_size"], data["original_fields"]) == (15, {"vocab_size": 40, "decoder_vocab_size": 40})
    with pytest.raises(ValueError, match="it was changed by hand"):
        AutoConfig.for_model(**copy.deepcopy(data) | {"vocab_size": 16})


# -- resizing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "task", "times", "sizes"),
    [
        (*model, times, sizes)
        for i, model in enumerate(LOGITS)
        for j, sizes in enumerate(([20], [10], [17, 12, 19]))
        for times in (1, 2)
        if cases.ALL or (i + j + times) % 2 == 1
    ],
)
def test_resizing_afterwards(model_type, task, times, sizes, tmp_path):
    steps = [methods.VocabularyTrimming(keep=KEEP), methods.VocabularyTrimming(keep=[*range(13)])][:times]
    variant = make_variant(native(model_type, task), steps)
    for size in sizes:
        common = min(size, variant.config.vocab_size)
        table = variant.get_input_embeddings().weight.detach().clone()
        variant.resize_token_embeddings(size, mean_resizing=False)
        assert torch.equal(variant.get_input_embeddings().weight[:common], table[:common])
    batch = {n: v.clamp(max=9) for n, v in ARCHITECTURES[model_type].tiny_inputs(task).items() if n != "labels"}
    if model_type == "marian":
        batch["decoder_input_ids"] = batch["input_ids"]
    found = logits(variant, batch)
    assert found.shape[-1] == sizes[-1]
    variant.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES[task].from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, batch), found)
    assert torch.equal(logits(make_variant(loaded, [methods.Freeze(norm="frozen")]), batch), found)
    assert torch.equal(logits(loaded.merge(), batch), found)


def test_resizing_a_random_table_that_was_trimmed_before(tmp_path):
    both = [methods.VocabularyTrimming(keep=KEEP), methods.Freeze(embeddings="random", seed=5)]
    variant = make_variant(marian(), both)
    table = variant.model.shared.weight.detach().clone()
    variant.resize_token_embeddings(20)
    assert torch.equal(variant.model.shared.weight[:15], table)
    variant.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert torch.equal(loaded.model.shared.weight, variant.model.shared.weight)


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([], r"VocabularyTrimming\(keep=\[\]\): must be a list of token ids, at least one"),
        ((0, 1), r"VocabularyTrimming\(keep=\(0, 1\)\): must be a list of token ids"),
        ([0, 1, 2.0], r"keep=\[0, 1, 2\.0\]\): must be a list of token ids, at least one, as integers"),
        ([*range(50), "a"], r"keep=\[0, 1, 2, .*\.\.\.\): must be a list"),
        ([True], "as integers"),
        ([0, 1, 1], "keep has the id 1 twice; it must hold different ids in ascending order"),
        ([0, 5, 3], "keep has the id 3 after 5; it must hold different ids in ascending order"),
        ([-1, 0], "keep has the id -1; ids are at least 0"),
        ([0, 1, 40, 41], r"keep has the id 40; the vocabulary has 0\.\.39"),
        ([0, 2, 3], "method 'vocabulary_trimming': the token 1, eos_token_id of the model, is not kept"),
        ([1, 2, 3], "the token 0, (decoder_start|pad)_token_id of the model, is not kept"),
    ],
)
def test_ids_that_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        trim(config_of("marian"), keep, task="seq2seq-lm")
    with pytest.raises(ValueError, match=message):
        trim(marian(), keep)


def test_a_token_that_generation_needs_is_named():
    backbone = marian()
    backbone.generation_config.eos_token_id = [1, 3]
    with pytest.raises(ValueError, match="the token 3, eos_token_id of the model, is not kept"):
        trim(backbone)


SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SMALL |= {"max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "roberta",
            r"roberta computes with the number 5 of pad_token_id, .* lacks \[1, 3\]",
        ),
        ("mpnet", r"mpnet computes with the number 1 of its code, .*; it lacks \[1\]"),
        ("clip_text_model", r"clip_text_model computes with the number 2 of eos_token_id, .* it lacks \[1\]"),
        ("bert", None),
    ],
)
@torch.no_grad()
def test_a_number_that_the_model_computes_with_stays(model_type, message):
    """RoBERTa counts positions from the number of the padding; BERT does not."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **SMALL | {"pad_token_id": 5})).eval()
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    without = [0, 2, 4, 5, *range(7, 40)]
    with_all = [*range(6), *range(7, 40)]
    old = torch.tensor([[8, 9, 30, 2], [11, 2, 5, 5]])
    if message is not None:
        with pytest.raises(ValueError, match=message):
            trim(model, without)
    for keep in (with_all, *([without] if message is None else [])):
        new = old.clone().apply_(keep.index)
        expected, actual = (
            each(
                ids, attention_mask=old != 5, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
            )[0]
            for each, ids in ((model, old), (trim(model, keep).eval(), new))
        )
        assert torch.equal(actual[old != 5], expected[old != 5])


def test_token_ids_of_configs_inside_and_of_tables_of_languages_are_numbered_anew():
    config = AutoConfig.for_model("gemma3")
    config.boi_token_index, config.image_token_id, config.text_config.pad_token_id = 6, 8, 4
    config.text_config.eos_token_id = [1, 8]
    settings = GenerationConfig(lang_to_id={"<|en|>": 8, "<|fr|>": 9}, task_to_id={"translate": 6}, pad_token_id=4)
    settings.forced_decoder_ids, settings.force_words_ids = [[1, 8], [2, None]], [[[6, 8], [4]], [[9]]]
    for each in (config, settings):
        renumber_token_ids(each, [methods.VocabularyTrimming(keep=[*range(3), 4, 6, 8])], 40)
    assert (config.boi_token_index, config.image_token_id, config.text_config.pad_token_id) == (4, 5, 3)
    assert config.text_config.eos_token_id == [1, 5]
    assert (settings.lang_to_id, settings.task_to_id, settings.pad_token_id) == ({"<|en|>": 5}, {"translate": 4}, 3)
    assert (settings.forced_decoder_ids, settings.force_words_ids) == ([[1, 5], [2, None]], [[[4, 5], [3]]])


def test_two_vocabularies_are_refused():
    config = MarianConfig(
        **ARCHITECTURES["marian"].tiny | {"share_encoder_decoder_embeddings": False, "vocab_size": 44}
    )
    with pytest.raises(
        ValueError,
        match=r"\{'vocab_size': 44, 'decoder_vocab_size': 40\} are two vocabularies; only a vocabulary of both",
    ):
        trim(MarianMTModel(config))


@pytest.mark.parametrize(
    "method",
    [
        methods.FactorizedEmbedding(rank=4),
        methods.DeFINE(map_dim=4, depth=2, width=8, groups=2),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_type", "task"), LOGITS, ids=[model_type for model_type, _ in LOGITS])
def test_small_tables_are_trimmed(model_type, task, tied, method, tmp_path):
    """The logits of the kept tokens stay, and it opens again."""
    small = make_variant(native(model_type, task, tie_word_embeddings=tied), [method])
    trimmed = trim(small)
    before, after = kept_batch(model_type)
    found = logits(trimmed, after)
    assert torch.allclose(found, logits(small, before)[..., KEEP], atol=1e-5)
    less = count_parameters(small).total - count_parameters(trimmed).total
    assert less >= 4 * (small.config.vocab_size - len(KEEP))
    trimmed.save_pretrained(tmp_path)
    assert torch.equal(logits(AUTO_CLASSES[task].from_pretrained(tmp_path), after), found)


def test_bands_must_come_after():
    adaptive = methods.AdaptiveEmbedding(cutoffs=[10, 20])
    with pytest.raises(ValueError, match=r"which another method made; put 'vocabulary_trimming' before"):
        make_variant(marian(), [adaptive, methods.VocabularyTrimming(keep=KEEP)])


def test_replaced_embeddings_must_come_after():
    variant = make_variant(marian(), [])
    variant.model.shared = torch.nn.EmbeddingBag(40, 16)
    with pytest.raises(
        ValueError, match=r"'model\.shared' is a EmbeddingBag already.*put 'vocabulary_trimming' before"
    ):
        methods.VocabularyTrimming(keep=KEEP).restructure(variant, variant.architecture)


def test_inspect_shows_the_ends_of_a_long_list(tmp_path):
    trim(native("gpt2", "causal-lm"), list(range(30))).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "[0, 1, 2, ..., 29] (30 in all)" in " ".join(result.output.split())
