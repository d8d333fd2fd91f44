"""Variants in the pipelines for image classification and speech recognition: saved, opened by name and asked, as users do."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.cases import ALL
from support.small import small_config
from transformers import (
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)

from hf_freeze import make_variant, methods
from hf_freeze.analysis.answers import compare_answers
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import answers, opened

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
METHODS = {
    "low_rank": methods.LowRank(rank=4),
    "head_pruning": methods.HeadPruning(heads={"encoder.0.self": [0, 2], "encoder.1.self": [1]}),
    "frozen": methods.Freeze(ffn="random"),
}
SOUND = np.random.default_rng(3).standard_normal(8000).astype(np.float32)


def ctc_config(letters, layers=2):
    return Wav2Vec2Config(
        **SMALL | {"num_hidden_layers": layers},
        vocab_size=letters,
        conv_dim=[16, 16, 16],
        conv_kernel=[10, 3, 3],
        conv_stride=[5, 4, 4],
        num_feat_extract_layers=3,
        num_conv_pos_embedding_groups=4,
        num_conv_pos_embeddings=16,
        initializer_range=0.5,
    )


def saved(model, method, folder, *processors):
    """The folder of a variant with its processors, as a user pushes it."""
    variant = make_variant(model.eval(), [method]).eval()
    variant.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    return variant


@pytest.mark.parametrize("name", METHODS)
def test_images_are_classified(name, tmp_path):
    torch.manual_seed(0)
    config = ViTConfig(**SMALL, image_size=16, patch_size=8, id2label={0: "cat", 1: "dog", 2: "house"}, num_labels=3)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    variant = saved(ViTForImageClassification(config), METHODS[name], tmp_path, processor)

    generator = np.random.default_rng(1)
    images = [Image.fromarray(generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(2)]
    answers = pipeline("image-classification", model=str(tmp_path))(images, top_k=3)

    with torch.no_grad():
        shares = variant(**processor(images, return_tensors="pt")).logits.softmax(-1)
    for answer, share in zip(answers, shares, strict=True):
        expected = {config.id2label[place]: float(value) for place, value in enumerate(share)}
        assert {entry["label"]: entry["score"] for entry in answer} == pytest.approx(expected, abs=1e-6)
        assert [entry["label"] for entry in answer] == sorted(expected, key=lambda label: -expected[label])


@pytest.mark.parametrize("name", METHODS)
def test_speech_is_recognised_by_ctc(name, tmp_path):
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    tokenizer = Wav2Vec2CTCTokenizer(tmp_path / "vocab.json")
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=False)
    torch.manual_seed(2)
    exports = ALL and name == "low_rank"  # which takes seconds for each layer; by default, Whisper is exported below
    config = ctc_config(len(letters), 1 if exports else 2)
    variant = saved(Wav2Vec2ForCTC(config), METHODS[name], tmp_path, extractor, tokenizer)

    answer = pipeline("automatic-speech-recognition", model=str(tmp_path))(SOUND)

    with torch.no_grad():
        best = variant(**extractor(SOUND, sampling_rate=16000, return_tensors="pt")).logits[0].argmax(-1)
    assert answer["text"] == tokenizer.decode(best)
    assert set(answer["text"]) & set("abcdefgh")  # it heard something
    if exports:
        exported = pipeline(
            "automatic-speech-recognition", model=str(export_model(tmp_path, "onnx", out=tmp_path / "onnx"))
        )
        assert exported(SOUND) == answer


@pytest.fixture
def whisper(tmp_path):
    return whisper_of(2, tmp_path)


def whisper_of(layers, tmp_path):
    """(model, tokenizer, feature extractor); the model, of so many layers on each side, prefers letters to timestamps, so that it
    says something."""
    letters = [*"abcdefgh", "Ġa", "Ġb"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    names = (
        "startoftranscript",
        "en",
        "translate",
        "transcribe",
        "startoflm",
        "startofprev",
        "nospeech",
        "notimestamps",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    start, english, translate, transcribe, _, _, _, plain = map(
        tokenizer.convert_tokens_to_ids, (f"<|{name}|>" for name in names)
    )
    end = tokenizer.eos_token_id
    tokens = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": 4}
    config = WhisperConfig(
        **sizes,
        **tokens,
        vocab_size=len(tokenizer),
        max_source_positions=50,
        max_target_positions=40,
        init_std=0.3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[: len(letters)] *= 6
    model.generation_config = GenerationConfig(
        **tokens,
        max_length=16,
        is_multilingual=True,
        lang_to_id={"<|en|>": english},
        task_to_id={"transcribe": transcribe, "translate": translate},
        no_timestamps_token_id=plain,
        max_initial_timestamp_index=50,
        alignment_heads=[[0, 0], [layers - 1, 1]],
    )
    return model, tokenizer, WhisperFeatureExtractor(feature_size=8, chunk_length=1)


WHISPER_METHODS = METHODS | {"shallow_encoder": methods.LayerSelection(keep={"encoder": [0]})}


@pytest.mark.parametrize("name", WHISPER_METHODS)
def test_whisper_tells_what_it_heard_and_when(name, whisper, tmp_path):
    model, tokenizer, extractor = whisper
    folder = tmp_path / "variant"
    variant = saved(model, WHISPER_METHODS[name], folder, tokenizer, extractor)
    ours = pipeline("automatic-speech-recognition", model=str(folder))
    assert type(ours.model) is type(variant)
    parts = {"tokenizer": tokenizer, "feature_extractor": extractor}
    native = pipeline("automatic-speech-recognition", model=variant.merge().eval(), **parts)
    assert ours.type == native.type == "seq2seq_whisper"

    plain = ours(SOUND)
    assert plain == native(SOUND)
    assert set(plain["text"]) & set("abcdefgh")
    timed = ours([SOUND, SOUND[:5000]], return_timestamps=True)
    assert timed == native([SOUND, SOUND[:5000]], return_timestamps=True)
    assert all(answer["chunks"] for answer in timed)
    assert pipeline("automatic-speech-recognition", model=variant, **parts, return_timestamps=True)(SOUND) == timed[0]
    if name == "low_rank":  # the others lack some of the heads or layers that the words are aligned by
        words = ours(SOUND, return_timestamps="word")
        assert words == native(SOUND, return_timestamps="word")
        assert words["chunks"][0]["timestamp"][1] > 0


def test_an_exported_whisper_tells_the_same(tmp_path):
    model, *processors = whisper_of(1, tmp_path)
    saved(model, METHODS["low_rank"], tmp_path / "variant", *processors)
    ours, exported = (
        pipeline("automatic-speech-recognition", model=str(folder))
        for folder in (tmp_path / "variant", export_model(tmp_path / "variant", "onnx"))
    )
    assert exported.type == "seq2seq_whisper"
    plain = exported(SOUND)
    assert plain == ours(SOUND)
    assert set(plain["text"]) & set("abcdefgh")
    timed = exported([SOUND, SOUND[:5000]], return_timestamps=True)
    assert timed == ours([SOUND, SOUND[:5000]], return_timestamps=True)
    assert all(answer["chunks"] for answer in timed)
    assert exported(SOUND, generate_kwargs={"num_beams": 3}) == ours(SOUND, generate_kwargs={"num_beams": 3})
    with pytest.raises(ValueError, match="an exported model has no output_attentions: turn off the times of words"):
        exported(SOUND, return_timestamps="word")


def test_other_models_with_a_decoder_are_taken_for_such(whisper):
    """Told by the name of their class, and without timestamps."""
    _, tokenizer, extractor = whisper
    model = AutoModelForSpeechSeq2Seq.from_config(small_config("granite_speech"))
    variant = make_variant(model, [methods.LowRank(rank=4)])
    for each in (model, variant):
        parts = {"tokenizer": tokenizer, "feature_extractor": extractor}
        speech = pipeline("automatic-speech-recognition", model=each, **parts)
        assert speech.type == "seq2seq"
        with pytest.raises(ValueError, match="apart from Whisper"):
            speech(SOUND, return_timestamps=True)


# -- how faithful a served model is ------------------------------------------------------------------------------------------


def fidelity_to_itself_and_a_broken_one(folder, items, layer):
    """(of the model in `folder`, of the same with one layer times two), as PyTorch serves them."""
    original = opened(folder)
    expected = answers(original, items)
    same = compare_answers(expected, answers(original, items, like=expected))
    with torch.no_grad():
        original.model.get_parameter(layer).mul_(2)
    return same, compare_answers(expected, answers(original, items, like=expected))


def test_fidelity_of_images(tmp_path):
    torch.manual_seed(0)
    config = ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=3)
    saved(
        ViTForImageClassification(config),
        METHODS["frozen"],
        tmp_path,
        ViTImageProcessor(size={"height": 16, "width": 16}),
    )
    generator = np.random.default_rng(1)
    images = [Image.fromarray(generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(20)]
    same, broken = fidelity_to_itself_and_a_broken_one(tmp_path, images, "classifier.weight")
    assert (same.score, same.kl, same.compared) == (1, 0, 20)
    assert broken.kl > 1e-4


def test_fidelity_of_ctc(tmp_path):
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    parts = Wav2Vec2CTCTokenizer(tmp_path / "vocab.json"), Wav2Vec2FeatureExtractor(return_attention_mask=False)
    torch.manual_seed(2)
    saved(Wav2Vec2ForCTC(ctc_config(len(letters))), METHODS["frozen"], tmp_path, *parts)
    sounds = [SOUND, SOUND[:5000], SOUND[1000:7000]]
    same, broken = fidelity_to_itself_and_a_broken_one(tmp_path, sounds, "lm_head.weight")
    assert (same.score, same.kl, same.agreement) == (1, 0, 1)
    assert broken.kl > 0.01


def test_fidelity_of_whisper(whisper, tmp_path):
    model, *processors = whisper
    saved(model, METHODS["frozen"], tmp_path / "model", *processors)
    same, broken = fidelity_to_itself_and_a_broken_one(
        tmp_path / "model", [SOUND, SOUND[:5000]], "model.encoder.layers.0.fc2.weight"
    )
    assert (same.score, same.agreement) == (1, 1)
    assert broken.kl > 1e-4
