"""Variants in the pipelines for image classification and speech recognition: saved, opened by name and asked, as users do."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    pipeline,
)

from hf_freeze import make_variant, methods

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
METHODS = {
    "low_rank": methods.LowRank(rank=4),
    "head_pruning": methods.HeadPruning(heads={"encoder.0.self": [0, 2], "encoder.1.self": [1]}),
    "frozen": methods.Freeze(ffn="random"),
}
SOUND = np.random.default_rng(3).standard_normal(8000).astype(np.float32)


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
    config = Wav2Vec2Config(
        **SMALL,
        vocab_size=len(letters),
        conv_dim=[16, 16, 16],
        conv_kernel=[10, 3, 3],
        conv_stride=[5, 4, 4],
        num_feat_extract_layers=3,
        num_conv_pos_embedding_groups=4,
        num_conv_pos_embeddings=16,
        initializer_range=0.5,
    )
    variant = saved(Wav2Vec2ForCTC(config), METHODS[name], tmp_path, extractor, tokenizer)

    answer = pipeline("automatic-speech-recognition", model=str(tmp_path))(SOUND)

    with torch.no_grad():
        best = variant(**extractor(SOUND, sampling_rate=16000, return_tensors="pt")).logits[0].argmax(-1)
    assert answer["text"] == tokenizer.decode(best)
    assert set(answer["text"]) & set("abcdefgh")  # it heard something
