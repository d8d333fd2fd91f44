"""Folders of compressed-tensors: a process without hf_freeze opens them, and computes what the variant does."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.processes import printed_by
from transformers import AutoConfig, PreTrainedModel

from hf_freeze import make_variant, methods
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.data import train_tokenizer
from hf_freeze.model import paging
from hf_freeze.model.convert import convert
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.compressed_tensors import _packed

needs_the_reader = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is missing")
_SIZES = {
    "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 120,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DECODER = _SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True}
_MARIAN = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # model type -> task, sizes
    "llama": ("causal-lm", _DECODER),
    "qwen2": ("causal-lm", _DECODER | {"tie_word_embeddings": False}),
    "mistral": ("causal-lm", _DECODER),
    "mixtral": ("causal-lm", _DECODER | {"num_local_experts": 2}),
    "gpt2": ("causal-lm", {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 120}),
    "bert": ("sequence-classification", _SIZES | {"num_labels": 3}),
    "marian": ("seq2seq-lm", _MARIAN),
}
INT8 = methods.Quantize(weights="int8")
INT4 = methods.Quantize(weights="int4", granularity="group-64")
CASES: dict[str, tuple[str, list[Any]]] = {
    "llama": ("llama", [INT4]),
    "llama in bf16": ("llama", [INT8]),
    "narrow llama": ("llama", [methods.FFNPruning(width=128), INT4]),
    "shared layers": ("llama", [methods.LayerSharing(), INT8]),
    "qwen2": ("qwen2", [INT8]),
    "mistral of two widths": (
        "mistral",
        [
            methods.Quantize(weights="int8", components=["attention"]),
            methods.Quantize(weights="int4", components=["ffn", "embeddings"]),
        ],
    ),
    "bert": ("bert", [INT4]),
    "marian": ("marian", [INT4]),
}
_OPEN = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
for auto_class, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    inputs = load_file(f"{folder}/inputs")
    model, info = getattr(transformers, auto_class).from_pretrained(f"{folder}/out", output_loading_info=True)
    model.eval()
    held = sum(parameter.nbytes for parameter in model.parameters())
    answers = {}
    if model.can_generate():  # first: an encoder-decoder begins with its encoder alone
        answers["generated"] = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        answers["logits"] = model(**inputs).logits
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            answers[f"{name}.weight"] = module.weight.detach().clone()
    save_file({name: value.contiguous() for name, value in answers.items()}, f"{folder}/answers")
    tied = model.get_input_embeddings().weight is getattr(model.get_output_embeddings(), "weight", None)
    print(json.dumps({"info": {name: len(info[name]) for name in info}, "held": held, "tied": tied}))
assert "hf_freeze" not in sys.modules
"""


def native(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    task, sizes = CONFIGS[kind]
    model = AUTO_CLASSES[task].from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def exported(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder / "model")
    return export_model(folder / "model", "compressed-tensors", out=folder / "out", **options)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name -> the variant, its folders, and what it answers."""
    made, ids = {}, torch.arange(3, 33).view(2, 15)
    for name, (kind, changes) in CASES.items():
        folder = tmp_path_factory.mktemp("case")
        variant = make_variant(native(kind, torch.bfloat16 if "bf16" in name else torch.float32), changes).eval()
        exported(variant, folder)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.clone()} if kind == "marian" else {})
        save_file(inputs, folder / "inputs")
        made[name] = SimpleNamespace(variant=variant, folder=folder, inputs=inputs, auto=CONFIGS[kind][0])
    return made


@pytest.fixture(scope="module")
def answers(cases: dict[str, Any]) -> dict[str, Any]:
    """Name -> (what transformers says of the model in a new process, what it computes)."""
    arguments = [str(part) for case in cases.values() for part in (AUTO_CLASSES[case.auto].__name__, case.folder)]
    lines = [json.loads(line) for line in printed_by(_OPEN, *arguments).splitlines() if line.startswith("{")]
    return {
        name: (line, load_file(case.folder / "answers"))
        for (name, case), line in zip(cases.items(), lines, strict=True)
    }


@needs_the_reader
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_new_process_computes_what_the_variant_does(cases: Any, answers: Any, name: str) -> None:
    case, (said, computed) = cases[name], answers[name]
    assert not any(said["info"].values()), said
    merged = case.variant.merge()
    weights = {key: value for key, value in computed.items() if key.endswith("weight")}
    assert len(weights) >= 7
    for key, weight in weights.items():
        expected = merged.get_parameter(key)
        assert weight.dtype == expected.dtype
        # In bf16, the step is rounded, and both weights, each by 2^-8 of its value at most.
        close = 3 * 2**-8 if weight.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(weight.float(), expected.float(), rtol=close, atol=0)
    if case.variant.dtype == torch.float32:
        expected = case.variant(**case.inputs).logits
        assert (computed["logits"] - expected).abs().max() <= 1e-5 * expected.abs().max()
        if case.variant.can_generate():
            written = case.variant.generate(case.inputs["input_ids"], max_new_tokens=6, do_sample=False)
            assert computed["generated"].tolist() == written.tolist()


@needs_the_reader
def test_tied_tables_stay_tied_and_integers_are_read_as_such(cases: Any, answers: Any) -> None:
    assert answers["llama"][0]["tied"]
    assert not answers["qwen2"][0]["tied"]
    assert "lm_head.weight" not in tensors_in(cases["llama"].folder / "out")
    stored = sum(value.nbytes for value in tensors_in(cases["llama"].folder / "out").values())
    assert answers["llama"][0]["held"] == stored  # of several groups, until the first forward


def test_the_file_has_the_bytes_of_integers_steps_and_shapes(cases: Any) -> None:
    linears = [(128, 128), (64, 128), (64, 128), (128, 128), (160, 128), (160, 128), (128, 160)]
    # 64 inputs share a step of fp32, and 32 where rows have 160 inputs.
    packed = sum(
        rows * columns // 2 + 4 * rows * columns // (32 if columns == 160 else 64) for rows, columns in linears
    )
    others = 4 * (120 * 128 + 5 * 128)  # table and norms
    found = tensors_in(cases["llama"].folder / "out")
    assert sum(value.nbytes for value in found.values()) == 2 * (packed + 16 * len(linears)) + others
    assert found["model.layers.0.mlp.down_proj.weight_shape"].tolist() == [128, 160]


@needs_the_reader
@pytest.mark.parametrize("name", CASES)
def test_the_config_is_one_of_the_library_and_names_what_is_packed(cases: Any, name: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    folder = cases[name].folder / "out"
    config = json.loads((folder / "config.json").read_text())
    assert not config["model_type"].startswith("hf_freeze")
    found = QuantizationConfig.model_validate(config["quantization_config"])
    packed = {key.removesuffix(".weight_packed") for key in tensors_in(folder) if key.endswith("packed")}
    assert not packed & set(found.ignore or ())
    targets = [target for group in found.config_groups.values() for target in group.targets]
    assert targets == ["Linear"] or set(targets) == packed
    assert len(found.config_groups) == (2 if name in ("llama", "bert", "mistral of two widths") else 1)


@needs_the_reader
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 64, 172])
def test_integers_are_packed_as_the_library_does(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    largest = 2 ** (bits - 1) - 1
    numbers = torch.randint(-largest, largest + 1, (5, columns), dtype=torch.int8)
    numbers[0, 0] = -largest
    # The library fills the last word with zeros, as here.
    assert _packed(numbers, bits).tolist() == pack_to_int32(numbers, bits).tolist()


def test_shards_hold_what_one_file_does(cases: Any, tmp_path: Path) -> None:
    whole = tensors_in(cases["llama"].folder / "out")
    export_model(cases["llama"].folder / "model", "compressed-tensors", out=tmp_path / "out", max_shard_size="50KB")
    places = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) >= 3
    assert places.keys() == whole.keys()
    for name, shard in places.items():
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            assert torch.equal(file.get_tensor(name), whole[name])


@pytest.mark.parametrize(("quantization", "method"), [("int8", INT8), ("int4", INT4)])
def test_a_native_model_is_rounded_as_quantize_does(quantization: str, method: Any, tmp_path: Path) -> None:
    model = native("bert")
    rounded = exported(model, tmp_path / "native", quantization=quantization)
    found, expected = tensors_in(rounded), tensors_in(exported(make_variant(model, [method]), tmp_path / "variant"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_native_model_in_bf16_is_rounded_to_the_steps_that_are_stored(tmp_path: Path) -> None:
    model = native("llama", torch.bfloat16)
    found = tensors_in(exported(model, tmp_path, quantization="int8"))
    for name in [name.removesuffix("_packed") for name in found if name.endswith("weight_packed")]:
        weight, steps = model.get_parameter(name).detach().float(), found[f"{name}_scale"].float()
        numbers = found[f"{name}_packed"].view(torch.uint8).float() - 128
        assert ((numbers * steps - weight).abs() <= 0.5001 * steps).all()


@needs_the_reader
def test_its_fidelity_is_measured(tmp_path: Path) -> None:
    texts = ["a man is riding a red bicycle near the river.", "two dogs play in the snow"] * 9
    train_tokenizer(texts, 60, "unigram").save_pretrained(tmp_path / "model")
    said: list[str] = []
    exported(native("llama"), tmp_path, quantization="int8", texts=texts, min_fidelity=0.5, say=said.append)
    assert said[-1].startswith("fidelity ")


@needs_the_reader
def test_what_opens_as_integers_is_not_packed_again(cases: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out is quantized already"):
        export_model(cases["llama"].folder / "out", "compressed-tensors", quantization="int8", out=tmp_path / "again")


@pytest.mark.parametrize(
    ("kind", "changes", "quantization", "words"),
    [
        ("llama", [], None, "holds integers, and this model has none: add --quantization int8 or int4"),
        ("llama", [methods.TensorTrain(rank=2)], None, "holds integers, and this model has none: add --quantization"),
        (
            "llama",
            [methods.Quantize(weights="int8", activations="int8")],
            None,
            "cannot hold this model: method 'quantize' cannot be merged: it rounds the inputs .*; choose --format onnx",
        ),
        (
            "llama",
            [methods.LowRank(rank=4), INT8],
            None,
            r"no place for the integers of '[\w.]+', which are not those of a linear of LlamaForCausalLM: run hf-freeze merge",
        ),
        (
            "llama",
            [methods.HeadPruning(heads={"decoder.0.self": [0, 1]}), INT8],
            None,
            r"no place for the integers of 'model.layers.0.self_attn.q_proj'",
        ),
        (
            "gpt2",
            [],
            "int8",
            r"has no Conv1D, which 'transformer.h.0[\w.]+' of GPT2LMHeadModel is; choose --format gguf",
        ),
        ("mixtral", [], "int8", "opens no mixtral whose experts are dense"),
        (
            "marian",
            [
                methods.Quantize(weights="int8", components=["attention"]),
                methods.Quantize(weights="int8", components=["ffn"], granularity="group-64"),
            ],
            None,
            "must have one number of bits and one size of groups, and this MarianMTModel has 2 kinds of linears",
        ),
    ],
)
def test_what_it_cannot_hold_is_refused(
    kind: str, changes: list[Any], quantization: str | None, words: str, tmp_path: Path
) -> None:
    model = native(kind)
    with pytest.raises(ValueError, match=words) as error:
        exported(make_variant(model, changes) if changes else model, tmp_path, quantization=quantization)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_wrong_size_of_shards_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size='1 GB': write a number and one of"):
        export_model(tmp_path / "missing", "compressed-tensors", max_shard_size="1 GB")


def test_what_tables_and_small_groups_cost_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    changes = [methods.Quantize(weights="int4", granularity="group-64", components=["ffn", "embeddings"])]
    model = make_variant(native("llama"), [methods.FFNPruning(width=40), *changes])
    exported(model, tmp_path, say=said.append)
    assert any(text.startswith("compressed-tensors has dense tables and groups of one size: ") for text in said)
    assert any("steps are for 8 inputs each" in text and "vLLM has no such groups" in text for text in said)


@pytest.mark.parametrize("changes", [[], [INT4]])
def test_what_is_made_lies_in_files(changes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is saved, no large tensor of the model is in memory of the process."""
    save, outside = PreTrainedModel.save_pretrained, []
    native("llama").save_pretrained(tmp_path / "native")
    source = convert(tmp_path / "native", tmp_path / "variant", changes) if changes else tmp_path / "native"

    def saving(model: Any, *arguments: Any, **options: Any) -> None:
        ranges = paging._file_ranges()
        for name, tensor in model.state_dict().items():
            if not any(start <= tensor.data_ptr() < end for start, end in ranges):
                outside.append((name, tensor.nbytes))
        save(model, *arguments, **options)

    monkeypatch.setattr(paging, "_SMALL", 1024)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saving)
    options: dict[str, Any] = {} if changes else {"quantization": "int4"}
    export_model(source, "compressed-tensors", out=tmp_path / "out", **options)
    assert len(outside) >= 14  # shapes
    assert max(nbytes for _, nbytes in outside) <= 1024
