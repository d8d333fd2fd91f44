"""GGUF files, opened by llama.cpp itself: the same tokens and the same outputs as transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.llama_cpp import use_llama_cpp
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.analysis import choose_vocabulary
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.data import train_tokenizer, trim_tokenizer
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.gguf_model import FAMILIES
from hf_freeze.publish.export.llama_cpp import LlamaCpp
from hf_freeze.publish.export.served import opened, served_fidelity
from hf_freeze.publish.export.zero_parts import without_zeros

TEXTS = [
    "a man is riding a red bicycle near the river.",
    "two dogs play in the snow, 3 cats look!",
    "Lily's little house",
] * 9
SIZE, VOCABULARY = 48, 300
_DECODER = {
    "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
_BERT = {
    "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_WINDOW = {"num_hidden_layers": 7, "sliding_window": 4, "query_pre_attn_scalar": 12}
CONFIGS: dict[str, dict[str, Any]] = dict.fromkeys(FAMILIES, _DECODER) | {
    "phi3": {name: value for name, value in _DECODER.items() if name != "head_dim"} | {"pad_token_id": 0},
    "qwen3": _DECODER | {"tie_word_embeddings": True},
    "gemma2": _DECODER | _WINDOW,
    "gemma3_text": _DECODER | _WINDOW,
    "smollm3": _DECODER | {"num_hidden_layers": 5},
    "gpt2": {"n_embd": SIZE, "n_layer": 3, "n_head": 6, "vocab_size": VOCABULARY, "n_positions": 64},
    "distilbert": {"dim": SIZE, "hidden_dim": 64, "n_layers": 3, "n_heads": 6, "vocab_size": VOCABULARY},
    "t5": {
        "d_model": SIZE, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
        "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
    },
    "mt5": {
        "d_model": SIZE, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
        "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
    },
} | dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT)  # fmt: skip


@pytest.fixture(autouse=True)
def _llama_cpp() -> None:
    use_llama_cpp()


def random_model(kind: str, task: str = "causal-lm", **changes: Any) -> Any:
    """Of a family, with weights far from their first values, norms among them."""
    torch.manual_seed(0)
    fields = {"pad_token_id": 0} | CONFIGS[kind] | changes
    config = AutoConfig.for_model(kind, **fields)
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, name):
            setattr(config, name, 1e-3)  # large enough to be seen in the outputs
    model = AUTO_CLASSES[task].from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def byte_tokenizer(steps: Any = None) -> Any:
    """BPE on bytes, as GPT-2, unless `steps` split texts in another way."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = steps or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def fallback_tokenizer(*, complete: bool = True) -> Any:
    """BPE on characters with bytes for the unknown ones, and `<s>` before each text, as Llama 2. `complete`: any two tokens are
    joined that make another one, as in conversions from sentencepiece."""
    characters = sorted({"▁", *"".join(TEXTS).replace(" ", "")})
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    joined = ["▁a", "in", "ri", "▁r", "ing", "ding", "▁ri", "▁riding"]
    vocabulary += joined
    splits = [(token[:i], token[i:]) for token in joined for i in range(1, len(token))]
    merges = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    merges = merges if complete else [pair for pair in merges if pair != ("▁", "ri")]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer: Any = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tokenizer_for(kind: str) -> Any:
    if kind in ("bert", "distilbert"):
        return train_tokenizer(TEXTS, 120, "wordpiece")
    return train_tokenizer(TEXTS, 120, "unigram") if kind in ("t5", "mt5", "xlm-roberta") else byte_tokenizer()


def exported(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return export_model(folder / "model", "gguf", out=folder / "gguf", **options) / "model.gguf"


class _TableOfGELU(torch.nn.Module):
    """GELU as llama.cpp has it: looked up in a table whose inputs and outputs have 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x.abs() < 10, found, x.clamp(min=0))


def with_table(model: Any) -> Any:
    """A copy of the model that computes GELU as llama.cpp does."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if "GELU" in type(child).__name__:
                setattr(parent, name, _TableOfGELU())
    return model


@torch.no_grad()
def difference(model: Any, task: str, ids: list[int], path: Path) -> float:
    """The largest, of llama.cpp's outputs and those of transformers, relative to the largest output if that is above 1."""
    model, inputs = with_table(model), {"input_ids": torch.tensor([ids])}
    engine = LlamaCpp(path.parent, task, exact=True)
    if task == "causal-lm":
        expected, found = model(**inputs).logits[0], engine.logits(ids)
    elif task == "seq2seq-lm":
        start = [engine.start(), 5, 9, 3]
        engine.encode(ids)
        expected, found = model(**inputs, decoder_input_ids=torch.tensor([start])).logits[0], engine.logits(start)
    elif task == "sequence-classification":
        expected, found = model(**inputs).logits[0], engine.outputs(ids)
        assert engine.labels() == [*model.config.id2label.values()]
    else:
        expected, found = model(**inputs).last_hidden_state[0], engine.outputs(ids)
    engine.close()
    return float(np.abs(found - expected.numpy()).max() / expected.abs().max().clamp(min=1))


def tolerance(kind: str) -> float:
    """Where an input of the table lies between two of its values, rounding of 32 bits may choose the other one."""
    if kind == "mt5":  # its attention does not divide by the root of the head's size, so small differences grow
        return 2e-3
    return 1e-3 if "gelu" in FAMILIES[kind].activations else 1e-5


@pytest.mark.parametrize(("kind", "task"), [(kind, task) for kind, family in FAMILIES.items() for task in family.tasks])
def test_llama_cpp_computes_what_transformers_computes(kind: str, task: str, tmp_path: Path) -> None:
    model, tokenizer = random_model(kind, task), tokenizer_for(kind)
    path = exported(model, tokenizer, tmp_path)
    assert difference(model, task, tokenizer("a man is riding 3 bicycles!").input_ids, path) < tolerance(kind)


def _cut(kind: str) -> dict[str, list[Any]]:
    stack = "encoder" if kind in ("bert", "t5") else "decoder"
    heads = {f"{stack}.0.self": [0, 1, 2], f"{stack}.2.self": [3, 4, 5]}
    uneven = {f"{stack}.0.ffn": list(range(0, 64, 2)), f"{stack}.1.ffn": list(range(5))}
    return {
        "heads": [methods.HeadPruning(heads=heads)],
        "thin groups": [methods.HeadPruning(heads={f"{stack}.0.self": [0, 4]})],
        "neurons": [methods.FFNPruning(keep=uneven)],
        "layers": [methods.LayerSelection(keep={stack: [0, 2]})],
        "several": [methods.HeadPruning(share=0.5), methods.FFNPruning(width=40), methods.LowRank(rank=8)],
        "integers": [methods.FFNPruning(width=32), methods.Quantize(weights="int8")],
    }


@pytest.mark.parametrize("cut", _cut("llama"))
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gpt2", "bert"])
def test_a_variant_computes_the_same_in_llama_cpp(kind: str, cut: str, tmp_path: Path) -> None:
    task = FAMILIES[kind].tasks[0]
    model = make_variant(random_model(kind, task), _cut(kind)[cut]).eval()
    tokenizer = tokenizer_for(kind)
    path = exported(model, tokenizer, tmp_path)
    assert difference(model, task, tokenizer("two dogs look").input_ids, path) < tolerance(kind)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_a_variant_of_gemma_keeps_the_windows_of_its_layers(kind: str, tmp_path: Path) -> None:
    model = make_variant(random_model(kind), [methods.HeadPruning(share=0.5)]).eval()
    assert difference(model, "causal-lm", list(range(5, 35)), exported(model, byte_tokenizer(), tmp_path)) < 1e-3


@pytest.mark.parametrize("cut", ["heads", "thin groups", "neurons", "layers"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_layers_of_different_sizes_take_no_more_bytes_than_those_of_the_variant(
    kind: str, cut: str, tmp_path: Path
) -> None:
    model = make_variant(random_model(kind), _cut(kind)[cut])
    reader = gguf.GGUFReader(exported(model, byte_tokenizer(), tmp_path))
    assert sum(tensor.n_bytes for tensor in reader.tensors) <= 1.02 * stored_bytes(model)
    if cut != "layers":
        assert reader.fields["general.architecture"].contents() == "deci"


def test_layers_of_one_size_keep_as_many_neurons_as_the_one_that_needs_most(tmp_path: Path) -> None:
    keep = {f"decoder.{layer}.ffn": list(range(width)) for layer, width in enumerate((20, 30, 10))}
    said: list[str] = []
    model = make_variant(random_model("gpt2"), [methods.FFNPruning(keep=keep)])
    reader = gguf.GGUFReader(exported(model, byte_tokenizer(), tmp_path, say=said.append))
    assert reader.fields["gpt2.feed_forward_length"].contents() == 30
    assert any("gguf holds native models alone, so ffn_pruning are merged" in line for line in said)


def test_zero_heads_and_neurons_of_a_native_model_are_left_out() -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, :24] = 0  # the three heads of the first group
        model.model.layers[1].mlp.down_proj.weight[:, 10:] = 0
    smaller = without_zeros(model, uneven=True, heads=True)
    assert smaller.model.layers[0].self_attn.q_proj.out_features == 24
    assert smaller.model.layers[0].self_attn.k_proj.out_features == 8
    assert smaller.model.layers[1].mlp.up_proj.out_features == 10
    ids = torch.tensor([[5, 9, 3, 7]])
    torch.testing.assert_close(smaller(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_model_without_zeros_stays_itself() -> None:
    model = random_model("gpt2")
    assert without_zeros(model, uneven=False, heads=False) is model


BITS = {"f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}  # of a weight


@pytest.mark.parametrize("kind", BITS)
def test_matrices_take_the_bits_of_their_type_and_are_rounded_to_it(kind: str, tmp_path: Path) -> None:
    model = random_model("llama", hidden_size=64, num_attention_heads=8, tie_word_embeddings=True)
    reader = gguf.GGUFReader(exported(model, byte_tokenizer(), tmp_path, quantization=kind))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert "output.weight" not in stored  # it is the table of tokens
    up = stored["blk.1.ffn_up.weight"]
    assert up.n_bytes * 8 == BITS[kind] * 64 * 64
    weight = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    error = np.abs(gguf.quants.dequantize(up.data, up.tensor_type) - weight)
    steps = {
        "f16": 2**-11,
        "bf16": 2**-8,
        "q8_0": 1 / 250,
        "q5_1": 1 / 31,
        "q5_0": 1 / 16,
        "q4_1": 1 / 15,
        "q4_0": 1 / 8,
    }[kind]
    assert 0 < error.max() <= 1.001 * steps * np.abs(weight).max()
    assert stored["blk.1.ffn_norm.weight"].n_bytes == 4 * 64


def test_rows_that_a_type_does_not_divide_are_in_f16_and_this_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    model = random_model("llama", hidden_size=64, num_attention_heads=8, intermediate_size=40)
    path = exported(model, byte_tokenizer(), tmp_path, quantization="q4_0", say=said.append)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q4_0")
    assert any("3 tensors are in f16, such as blk.0.ffn_down.weight" in line for line in said)
    LlamaCpp(path.parent, "causal-lm").close()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_rotary_positions_turn_by_the_same_angles(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = random_model("llama", rope_parameters={"rope_theta": 10000.0, **scaling})
    ids = list(range(5, 45))
    assert difference(model, "causal-lm", ids, exported(model, byte_tokenizer(), tmp_path)) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma", "olmo2", "smollm3", "starcoder2"])
def test_linear_scaling_is_read_in_every_family(kind: str, tmp_path: Path) -> None:
    model = random_model(kind, rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0})
    ids = list(range(5, 35))
    assert difference(model, "causal-lm", ids, exported(model, byte_tokenizer(), tmp_path)) < tolerance(kind)


WORDS = [
    "a man is riding a red bicycle near the river.",
    "Two DOGS,  3 cats!",
    "Lily's  house: ünknown 漢字",
    "",
    "12 345",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> Any:
    from tokenizers import Regex

    split: Any = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _small() -> Any:
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), levels])


TOKENIZERS = {
    "GPT-2": ("gpt2", byte_tokenizer),
    "Qwen 2": ("qwen2", lambda: byte_tokenizer(_split(QWEN))),
    "Llama 3": ("llama", lambda: byte_tokenizer(_split(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")))),
    "SmolLM": ("llama", lambda: byte_tokenizer(_small())),
    "Llama 2": ("llama", fallback_tokenizer),
    "WordPiece": ("bert", lambda: train_tokenizer(TEXTS, 120, "wordpiece")),
    "Unigram": ("t5", lambda: train_tokenizer(TEXTS, 120, "unigram")),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_splits_texts_into_the_same_tokens(name: str, tmp_path: Path) -> None:
    kind, make = TOKENIZERS[name]
    tokenizer, task = make(), FAMILIES[kind].tasks[0]
    size = max(VOCABULARY, len(tokenizer))
    path = exported(random_model(kind, task, vocab_size=size), tokenizer, tmp_path)
    engine = LlamaCpp(path.parent, task)
    for text in WORDS:
        assert engine.tokens(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("name", ["GPT-2", "Llama 2", "WordPiece", "Unigram"])
def test_a_trimmed_tokenizer_splits_texts_into_the_same_tokens(name: str, tmp_path: Path) -> None:
    kind, make = TOKENIZERS[name]
    tokenizer, task = make(), FAMILIES[kind].tasks[0]
    trimming = choose_vocabulary(tokenizer, TEXTS[:1], coverage=1.0)
    model = random_model(kind, task, vocab_size=len(tokenizer))
    model, trimmed = make_variant(model, [trimming]), trim_tokenizer(tokenizer, trimming.keep)
    assert len(trimmed) < len(tokenizer)
    path = exported(model, trimmed, tmp_path)
    assert LlamaCpp(path.parent, task).tokens(TEXTS[0]) == trimmed(TEXTS[0]).input_ids


@pytest.mark.parametrize(("window", "warned"), [(8, True), (64, False), (None, False)])
def test_a_window_that_llama_cpp_does_not_read_is_said(window: int | None, warned: bool, tmp_path: Path) -> None:
    said: list[str] = []
    exported(random_model("mistral", sliding_window=window), byte_tokenizer(), tmp_path, say=said.append)
    assert any("look back at all tokens, not 8" in line for line in said) == warned


def test_greedy_search_continues_a_text_as_generate_does(tmp_path: Path) -> None:
    model, tokenizer = random_model("llama"), byte_tokenizer()
    path = exported(make_variant(model, _cut("llama")["neurons"]), tokenizer, tmp_path)
    model = make_variant(model, _cut("llama")["neurons"]).eval()
    ids = tokenizer("a man is").input_ids
    generated = model.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    engine = LlamaCpp(path.parent, "causal-lm", exact=True)
    assert engine.continued(ids, 20, ends=[]) == generated[0, len(ids) :].tolist()


def test_the_chat_template_and_special_tokens_go_along(tmp_path: Path) -> None:
    tokenizer = fallback_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    reader = gguf.GGUFReader(exported(random_model("llama", vocab_size=320), tokenizer, tmp_path))
    said = {
        name: reader.fields[f"tokenizer.{name}"].contents()
        for name in ("chat_template", "ggml.add_bos_token", "ggml.bos_token_id")
    }
    assert said == {"chat_template": tokenizer.chat_template, "ggml.add_bos_token": True, "ggml.bos_token_id": 1}


def test_a_cased_tokenizer_of_word_pieces_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 120, "wordpiece")
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    with pytest.raises(
        ValueError, match=r"llama.cpp makes all letters of WordPiece small, and this tokenizer does not"
    ):
        exported(random_model("bert", "feature-extraction"), tokenizer, tmp_path)


def test_bpe_on_words_without_bytes_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 120, "bpe")
    with pytest.raises(ValueError, match=r"no BPE tokenizer that splits words by Metaspace, Punctuation like this one"):
        exported(random_model("llama"), tokenizer, tmp_path)


def test_bpe_that_joins_only_some_pairs_of_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"joins any two tokens that make '▁ri', and this tokenizer only some"):
        exported(random_model("llama", vocab_size=320), fallback_tokenizer(complete=False), tmp_path)


def test_families_and_tasks_that_llama_cpp_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"gguf does not support .*ElectraModel \(feature-extraction\); choose from llama"
    ):
        exported(
            AutoModel.from_config(AutoConfig.for_model("electra", vocab_size=120, hidden_size=8, num_hidden_layers=1)),
            train_tokenizer(TEXTS, 120, "wordpiece"),
            tmp_path,
        )


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "no llama with the activation function 'gelu'; it computes silu"),
        ("phi3", {"partial_rotary_factor": 0.5}, "no phi3 with a share of rotated values of 0.5"),
        (
            "qwen2",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            "of the type 'dynamic'",
        ),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            "of the type 'llama3'; it takes default, linear here",
        ),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "other layers than three of four: .1, 1, 0, 1, 1"),
        ("t5", {"num_decoder_layers": 5}, "more layers in the decoder than in the encoder: 5, 3"),
    ],
)
def test_settings_that_llama_cpp_does_not_compute_are_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = random_model(kind, FAMILIES[kind].tasks[0], **changes)
    with pytest.raises(ValueError, match=message):
        exported(model, tokenizer_for(kind), tmp_path)


def test_a_file_that_was_cut_off_does_not_open(tmp_path: Path) -> None:
    path = exported(random_model("llama"), byte_tokenizer(), tmp_path)
    mark = json.loads((path.parent / "hf_freeze_export.json").read_text())
    assert list(mark["files"]) == ["model.gguf"]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"llama.cpp cannot open .*model.gguf; export it again"):
        LlamaCpp(path.parent, "causal-lm")
    with pytest.raises(ValueError, match=r"model.gguf has changed since the export"):
        opened(path.parent)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("llama", "causal-lm"),
        ("bert", "feature-extraction"),
        ("bert", "sequence-classification"),
        ("t5", "seq2seq-lm"),
    ],
)
def test_an_exported_file_answers_like_the_model(kind: str, task: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(kind)
    # So T5 writes texts, in which the next best token is 0.05 below: keys and values of 16 bits move the outputs by 0.004.
    path = exported(random_model(kind, task, vocab_size=len(tokenizer)), tokenizer, tmp_path)
    found = served_fidelity(tmp_path / "model", path.parent, TEXTS[:3])
    assert found.score is not None
    assert found.score > 0.999
    assert found.compared == 3


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    path = exported(random_model("llama"), byte_tokenizer(), tmp_path)
    with pytest.raises(ValueError, match=r"70 tokens are more than the 64 that llama.cpp has memory for here"):
        LlamaCpp(path.parent, "causal-lm").logits([5] * 70)


def test_several_beams_are_refused(tmp_path: Path) -> None:
    path = exported(random_model("t5", "seq2seq-lm"), tokenizer_for("t5"), tmp_path)
    with pytest.raises(ValueError, match=r"num_beams=4: llama.cpp searches greedily here: 1 beam"):
        opened(path.parent).model(["two dogs"], num_beams=4)
