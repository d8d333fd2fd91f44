"""A fixed sample of the families: `make families` tests all of them."""

import pytest
from families.contract import problems_of

# family -> the methods: together all methods, and layouts and traits that no family of the other tests has.
SAMPLE = {
    "roberta": ["freeze", "factorized_embedding", "vocabulary_trimming", "head_pruning"],
    "t5": ["head_pruning", "theseus", "layer_sharing", "layer_drop"],
    "bart": ["low_rank", "layer_selection", "quantize"],
    "modernbert": ["freeze", "ffn_pruning", "layer_sharing"],
    "qwen3": ["layer_selection", "tensor_train", "distillation"],
    "bloom": ["freeze", "head_pruning"],
    "falcon": ["head_pruning", "magnitude_pruning"],
    "phi3": ["head_pruning", "ffn_pruning", "tucker"],
    "olmo2": ["head_pruning", "variational_dropout"],
    "albert": ["layer_selection", "theseus"],
    "vit": ["freeze", "head_pruning", "layer_selection"],
}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_the_contract_holds(model_type, tmp_path):
    assert problems_of(model_type, tmp_path, SAMPLE[model_type]) == {}
