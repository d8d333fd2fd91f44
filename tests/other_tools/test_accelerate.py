"""`load_checkpoint_and_dispatch` opens the folder of a variant: what no file holds is there as well."""

import json

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from support.processes import printed_by
from support.small import small_config
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.tasks import AUTO_CLASSES

TASKS = {"marian": "seq2seq-lm", "bert": "sequence-classification", "gpt2": "causal-lm", "llama": "causal-lm"}
METHODS = {
    "seeded and tied": [methods.Freeze(ffn="random", embeddings="random", seed=5)],
    "shared": [methods.LayerSharing(groups=1)],
    "factorised": [methods.FactorizedEmbedding(rank=4), methods.LowRank(rank=4)],
    "buffers": [methods.MagnitudePruning(sparsity=0.5), methods.Quantize(components=["attention"], scheme="int8")],
}
LOAD = """
import sys, torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
model.tie_weights()
model = load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"": "cpu"}).eval()
with torch.no_grad():
    print(model(torch.tensor([[1, 2, 3]])).logits.tolist())
"""


def saved(model_type, applied, folder, **changes):
    torch.manual_seed(0)
    variant = make_variant(small_config(model_type, **changes), applied, task=TASKS[model_type]).eval()
    variant.save_pretrained(folder, remote_code=True)
    return variant


def inputs_of(model_type):
    ids = torch.tensor([[1, 2, 3]])
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model_type == "marian" else {})


@pytest.mark.parametrize("model_type", TASKS)
@pytest.mark.parametrize("applied", METHODS.values(), ids=METHODS)
def test_dispatched_it_computes_the_same(model_type, applied, tmp_path):
    if any(isinstance(method, methods.Quantize) for method in applied):
        pytest.importorskip("bitsandbytes")
    ties = {} if model_type == "bert" else {"tie_word_embeddings": True}
    variant = saved(model_type, applied, tmp_path, **ties)
    with init_empty_weights():
        model = AUTO_CLASSES[TASKS[model_type]].from_config(AutoConfig.from_pretrained(tmp_path))
    model.tie_weights()  # as accelerate asks for
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"}).eval()
    expected = variant.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():  # accelerate maps files, and where tensors lie there decides in which order some CPUs add
        logits = [one(**inputs_of(model_type)).logits for one in (model, variant)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)
    trainable = {name: parameter.requires_grad for name, parameter in variant.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trainable


def test_so_does_a_program_that_does_not_import_hf_freeze(tmp_path):
    variant = saved("llama", METHODS["seeded and tied"], tmp_path, tie_word_embeddings=True)
    with torch.no_grad():
        expected = variant(**inputs_of("llama")).logits
    assert json.loads(printed_by(LOAD, tmp_path).splitlines()[-1]) == expected.tolist()


def test_an_empty_model_holds_only_what_no_file_holds():
    config = small_config("llama")
    with init_empty_weights():
        model = make_variant(config, [methods.Freeze(ffn="random", seed=5)], task="causal-lm")
    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert real == set(model.seeded_tensors)
    with init_empty_weights(include_buffers=True):  # for sizes alone
        model = make_variant(config, [methods.Freeze(ffn="random", seed=5)], task="causal-lm")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert count_parameters(model).total == count_parameters(make_variant(config, [], task="causal-lm")).total


def test_a_config_with_another_digest_is_refused(tmp_path):
    variant = saved("bert", [methods.Freeze(ffn="random", seed=5)], tmp_path)
    config = variant.config
    config.digests = dict.fromkeys(config.digests, "0" * 32)
    with pytest.raises(ValueError, match="digest mismatch"), init_empty_weights():
        AUTO_CLASSES["sequence-classification"].from_config(config)


def test_in_another_precision(tmp_path):
    variant = saved("llama", METHODS["seeded and tied"], tmp_path).to(torch.bfloat16)
    with init_empty_weights():
        model = AUTO_CLASSES["causal-lm"].from_config(variant.config, dtype=torch.bfloat16)
    model.tie_weights()
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16).eval()
    torch.testing.assert_close(
        model(**inputs_of("llama")).logits, variant(**inputs_of("llama")).logits, rtol=1e-5, atol=1e-6
    )
