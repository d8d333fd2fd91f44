"""A fixed sample of the families: `make families` tests all of them."""

from families.contract import problems_before_loading, problems_of_loading

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


def test_the_contract_holds(tmp_path):
    """One new process opens the variants of all families."""
    problems = {family: problems_before_loading(family, tmp_path / family, names) for family, names in SAMPLE.items()}
    assert {family: found for family, found in problems.items() if found} == {}
    assert problems_of_loading(tmp_path) == {}
