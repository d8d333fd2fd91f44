"""Distillation of models that read sound or images: what counts where labels do not say it. The sums are written out here."""

import copy

import pytest
import torch
from support.small import small_config
from transformers import AutoModel, AutoModelForCTC

from hf_freeze import make_variant
from hf_freeze.methods import Distillation

TEMPERATURE, ALPHA = 3.0, 0.25


def pair(auto, model_type, **settings):
    """(variant in training mode, its teacher): two models that differ."""
    config = small_config(model_type)
    for name, value in config.to_dict().items():
        if ("drop" in name or name.startswith("mask_")) and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    student, teacher = (auto.from_config(copy.deepcopy(config)).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in (*student.parameters(), *teacher.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    method = Distillation(teacher=teacher, temperature=TEMPERATURE, alpha=ALPHA, **settings)
    return make_variant(student, [method]).train(), student, teacher


def divergence(student, teacher):
    """T² KL of two vectors of logits."""
    p, q = ((x / TEMPERATURE).exp() / (x / TEMPERATURE).exp().sum() for x in (teacher, student))
    return TEMPERATURE**2 * float((p * (p / q).log()).sum())


def distance(student, teacher):
    return float((student / student.norm() - teacher / teacher.norm()).square().sum())


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def frames_of(samples, config):
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


@pytest.mark.parametrize("model_type", ["wav2vec2", "hubert"])
@pytest.mark.parametrize("lengths", [None, (2000, 1250)], ids=["no mask", "mask"])
def test_all_frames_of_a_ctc_model_count_but_padding(model_type, lengths):
    variant, student, teacher = pair(AutoModelForCTC, model_type, hidden="skip", beta=2.0)
    batch = {"input_values": torch.randn(2, 2000), "labels": torch.tensor([[5, 4], [3, -100]])}
    if lengths:
        batch["attention_mask"] = torch.tensor([[1] * length + [0] * (2000 - length) for length in lengths])
    outputs = variant(**batch)
    with torch.no_grad():
        one, other = (model(**batch, output_hidden_states=True) for model in (student, teacher))
    counts = [frames_of(length, student.config) for length in lengths or (2000, 2000)]
    places = [(row, frame) for row, count in enumerate(counts) for frame in range(count)]
    expected = ALPHA * mean(divergence(one.logits[place], other.logits[place]) for place in places)
    states, taught = one.hidden_states[1], other.hidden_states[1]  # of two layers, the last one learns nothing
    expected += 2.0 * mean(distance(states[place], taught[place]) for place in places)
    assert float(outputs.auxiliary_loss) == pytest.approx(expected, rel=1e-4)
    assert float(outputs.loss) == pytest.approx((1 - ALPHA) * float(one.loss) + expected, rel=1e-4)


@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_a_model_of_pairs_learns_which_text_fits_which_image(model_type):
    variant, student, teacher = pair(AutoModel, model_type, hidden="skip", beta=2.0)
    vision = student.config.vision_config
    ids = torch.tensor([[5, 9, 3, 7, 2], [8, 4, 2, 0, 0], [4, 7, 7, 2, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    batch["pixel_values"] = torch.randn(2, 3, vision.image_size, vision.image_size)
    outputs = variant(**batch)
    with torch.no_grad():
        one, other = (model(**batch, output_hidden_states=True) for model in (student, teacher))
    expected = 0.0
    for name in ("logits_per_image", "logits_per_text"):
        expected += ALPHA * mean(map(divergence, one[name], other[name]))
    texts = [(row, token) for row, mask in enumerate(batch["attention_mask"]) for token in range(int(mask.sum()))]
    for part, places in (("text_model_output", texts), ("vision_model_output", None)):
        states, taught = one[part].hidden_states[1], other[part].hidden_states[1]
        places = places or [(row, token) for row in range(2) for token in range(states.shape[1])]
        expected += 2.0 * mean(distance(states[place], taught[place]) for place in places)
    assert float(outputs.auxiliary_loss) == pytest.approx(expected, rel=1e-4)
