"""Counts against the published shares (Bogoychev, 2021) and against closed forms written by hand; mostly on `meta`."""

import dataclasses

import pytest
import torch
from support import ROOT
from support.small import not_understood
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    MarianConfig,
    MarianMTModel,
)

from hf_freeze import count_parameters, make_variant, methods, multiply_adds, stored_bytes
from hf_freeze.analysis.accounting import forward_multiply_adds
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.methods.registry import method_from_dict

RECIPE = ROOT / "recipes" / "freeze_ablation" / "recipe.yaml"
VOCABULARY = 36_000

# Trained share of each row: by arithmetic, not the printed, truncated figures.
SHARES = {
    "big": {"0": 1, "1": 0.8271, "2": 0.6456, "3": 0.5276, "4": 0.3547, "5": 0.4727, "6": 0.1732},
    # The paper prints rows 2 and 4 of this table the other way round.
    "big-ffn1024": {"0": 1, "1": 0.732, "2": 0.451, "3": 0.817, "4": 0.549, "5": 0.184},
}


def big(preset, row, init):
    recipe = load_recipe(RECIPE, [f"preset={preset}"])
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    sizes = {"vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY} | recipe.backbone.config
    config = MarianConfig(**ids, **sizes)
    methods = [method_from_dict(method) for method in recipe.rows[row].methods]
    with torch.device("meta"):
        return make_variant(config, methods, task="seq2seq-lm", init=init)


# -- parameters ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("init", "millions"), [("backbone", 213.22), ("marian", 213.26)])
def test_transformer_big_has_the_published_size(init, millions):
    model = big("big", "0", init)
    assert all(parameter.is_meta for parameter in model.parameters())
    count = count_parameters(model)
    assert count.total / 1e6 == pytest.approx(millions, abs=0.005)
    assert count.trainable == count.stored == count.total
    d, f, blocks, layers = 1024, 4096, 18, 12
    assert {component: c.total for component, c in count.by_component.items()} == {
        "embeddings": VOCABULARY * d,  # 36.86M
        "attention": blocks * 4 * (d * d + d),  # 75.57M
        "ffn": layers * (2 * d * f + f + d),  # 100.72M
        "norm": (6 * 2 + 6 * 3) * 2 * d,
        "head": VOCABULARY if init == "marian" else 0,  # the bias of the softmax, a parameter in Marian only
    }


@pytest.mark.parametrize("preset", SHARES)
def test_rows_train_the_published_shares(preset):
    tolerance = {"big": 0.0002, "big-ffn1024": 0.0006}[preset]
    counts = {row: count_parameters(big(preset, row, "marian")) for row in SHARES[preset]}
    for row, share in SHARES[preset].items():
        count = counts[row]
        assert count.trainable / count.total == pytest.approx(share, abs=tolerance), row
        assert count.stored == count.trainable, row  # what is random is not stored
        assert count.total == counts["0"].total, row
        for total in ("total", "trainable", "stored"):
            assert getattr(count, total) == sum(getattr(c, total) for c in count.by_component.values()), (row, total)


@pytest.mark.parametrize(("row", "same_as"), [("2.1", "2"), ("3.1", "3")])
def test_diagonal_rows_count_as_the_random_ones(row, same_as):
    assert count_parameters(big("big", row, "marian")) == count_parameters(big("big", same_as, "marian"))


# Of the size whose shares come nearest to the paper's language model (its 38M is not explained).
LM_SHARES = {"0": 1, "1": 0.536, "2": 0.822, "3": 0.643, "4": 0.180, "5": 0.358, "6": 0.465}


def test_language_model_rows_train_the_published_shares():
    recipe = load_recipe(RECIPE.with_name("lm.yaml"), ["preset=lm-paper"])
    # Its positions are sinusoidal; GPT-2 learns them: as few as there can be.
    sizes = recipe.backbone.config | {"vocab_size": recipe.tokenizer.vocab_size, "n_positions": 1}
    counts = {}
    for row in LM_SHARES:
        methods = [method_from_dict(method) for method in recipe.rows[row].methods]
        with torch.device("meta"):
            model = make_variant(
                GPT2Config(**sizes, bos_token_id=1, eos_token_id=1), methods, task="causal-lm", init="marian"
            )
        counts[row] = count_parameters(model)
    total = counts["0"].total
    assert total / 1e6 == pytest.approx(35.3, abs=0.05)
    d, f, layers = 512, 2048, 6
    assert total == 32_000 * d + d + layers * (4 * (d * d + d) + 2 * d * f + f + d + 4 * d) + 2 * d
    bias = 32_000  # of Marian's softmax, always trained; GPT-2 has none
    for row, count in counts.items():
        share = (count.trainable + bias) / (count.total + bias)
        assert share == pytest.approx(LM_SHARES[row], abs=0.0006), row
        assert count.stored == count.trainable, row


def test_smaller_ffn_has_the_published_size():
    count = count_parameters(big("big-ffn1024", "0", "marian"))
    assert count.total / 1e6 == pytest.approx(137.7, abs=0.05)
    assert count.by_component["ffn"].total / 1e6 == pytest.approx(25.19, abs=0.01)


def test_frozen_is_stored_and_random_is_not():
    frozen = count_parameters(tiny_marian([{"method": "freeze", "ffn": "frozen"}])).by_component["ffn"]
    random = count_parameters(tiny_marian([{"method": "freeze", "ffn": "random"}])).by_component["ffn"]
    assert (frozen.trainable, frozen.stored) == (0, frozen.total)
    assert (random.trainable, random.stored, random.total) == (0, 0, frozen.total)


def test_bert_components_add_up():
    model = BertForMaskedLM(bert_config())
    count = count_parameters(model)
    # The tied table once; the native sum over distinct tensors is the same.
    assert count.total == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert {component: c.total for component, c in count.by_component.items()} == {
        "embeddings": (V + P + 2) * D,
        "attention": L * 4 * (D * D + D),
        "ffn": L * (2 * D * F + F + D),
        "norm": (2 * L + 1) * 2 * D,
        "head": D * D + D + 2 * D + V,  # transform, its norm, the output bias
    }


def test_sinusoidal_positions_are_never_counted():
    model = MarianMTModel(tiny_marian_config())
    positions = 2 * P * D
    assert count_parameters(model).total == sum({id(p): p.numel() for p in model.parameters()}.values()) - positions


@pytest.mark.parametrize("function", [count_parameters, stored_bytes, multiply_adds])
def test_other_architectures_are_refused(function):
    model = not_understood()
    with pytest.raises(ValueError, match=r"squeezebert: no list of layers with linears"):
        function(model)


def test_a_module_that_is_no_transformer_is_refused():
    with pytest.raises(ValueError, match="Linear"):
        count_parameters(torch.nn.Linear(2, 2))


# -- bytes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("methods", [[], [{"method": "freeze", "embeddings": "random", "ffn": "diagonal"}]])
def test_stored_bytes_are_those_of_the_file(tmp_path, methods, dtype):
    model = tiny_marian(methods).to(dtype)
    model.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert stored_bytes(model) == (tmp_path / "model.safetensors").stat().st_size - header
    assert header <= 64 * 1024


def test_stored_bytes_on_meta():
    # Row 6 of big stores the table, the norms and the output bias.
    assert stored_bytes(big("big", "6", "marian")) == 4 * (VOCABULARY * 1024 + 30 * 2048 + VOCABULARY)


# -- multiply-adds -------------------------------------------------------------------------------------------------------------

D, F, L, N, V, P, HEADS, K = 16, 24, 2, 10, 50, 20, 4, 5  # width, FFN, layers, tokens, words, positions, heads, labels


def tiny_marian_config(**changes):
    sizes = {
        "vocab_size": V,
        "decoder_vocab_size": V,
        "d_model": D,
        "encoder_layers": L,
        "decoder_layers": L,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": F,
        "decoder_ffn_dim": F,
        "max_position_embeddings": P,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": 1,
    }
    return MarianConfig(**(sizes | changes))


def tiny_marian(methods):
    methods = [method_from_dict(method) for method in methods]
    return make_variant(tiny_marian_config(), methods, task="seq2seq-lm", init="marian")


def bert_config(**changes):
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L}
    sizes |= {"num_attention_heads": HEADS, "max_position_embeddings": P, "num_labels": K}
    return BertConfig(**(sizes | changes))


# Per target token, in one layer: one attention block's linears, its two score products, one FFN, the output matrix.
LINEARS, SCORES, FFN, OUTPUT = 4 * D * D, 2 * N * D, 2 * D * F, V * D
MARIAN_FORWARD = {"attention": 3 * L * (LINEARS + SCORES), "ffn": 2 * L * FFN, "embeddings": OUTPUT}


def forward_of(operations):
    return {component: c.forward for component, c in operations.by_component.items() if c.forward}


def backward_of(operations):
    return {component: c.backward for component, c in operations.by_component.items() if c.backward}


@pytest.mark.parametrize("make", [lambda: MarianMTModel(tiny_marian_config()), lambda: tiny_marian([])])
def test_marian_by_hand(make):
    operations = multiply_adds(make(), length=N)
    assert forward_of(operations) == pytest.approx(MARIAN_FORWARD)
    assert operations.forward == pytest.approx(sum(MARIAN_FORWARD.values()))
    # All is trained: each product has two gradients.
    assert backward_of(operations) == pytest.approx({c: 2 * value for c, value in MARIAN_FORWARD.items()})
    assert operations.backward == pytest.approx(2 * operations.forward)


# What the backward pass has less than twice the forward, for each row of the ablation. Frozen weights spare their own gradient.
# With a frozen table nothing below the first layers needs one, so the linears on the input there (q, k, v) compute no input
# gradient; where they are frozen too, the first attentions have no backward at all: the first trained tensor is their norm.
FIRST_QKV = 2 * 3 * D * D  # in the encoder and in the decoder
SAVED = {
    "0": {},
    "1": {"embeddings": OUTPUT, "attention": FIRST_QKV},
    "2": {"attention": 3 * L * LINEARS},
    "2.1": {"attention": 3 * L * LINEARS},
    "3": {"ffn": 2 * L * FFN},
    "3.1": {"ffn": 2 * L * FFN},
    "4": {"embeddings": OUTPUT, "attention": FIRST_QKV, "ffn": 2 * L * FFN},
    "5": {"embeddings": OUTPUT, "attention": 3 * L * LINEARS + 2 * LINEARS + 2 * 2 * SCORES},
    "6": {"attention": 3 * L * LINEARS, "ffn": 2 * L * FFN},
}


def test_every_row_is_in_the_hand_made_table():
    assert SAVED.keys() == load_recipe(RECIPE).rows.keys()


@pytest.mark.parametrize("row", SAVED)
def test_backward_of_each_row_by_hand(row):
    operations = multiply_adds(tiny_marian(load_recipe(RECIPE).rows[row].methods), length=N)
    assert forward_of(operations) == pytest.approx(MARIAN_FORWARD)  # freezing does not speed the forward up
    expected = {c: 2 * value - SAVED[row].get(c, 0) for c, value in MARIAN_FORWARD.items()}
    assert backward_of(operations) == pytest.approx(expected)
    assert operations.backward == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize("row", ["0", "3", "4"])
def test_a_forward_is_counted_alone(row):
    model = tiny_marian(load_recipe(RECIPE).rows[row].methods)
    assert forward_multiply_adds(model) == round(multiply_adds(model, length=P).forward)


def test_nothing_trained_has_no_backward():
    everything = dict.fromkeys(("embeddings", "attention", "ffn", "norm", "head"), "frozen")
    operations = multiply_adds(tiny_marian([{"method": "freeze", **everything}]), length=N)
    assert operations.backward == 0
    assert operations.forward == pytest.approx(sum(MARIAN_FORWARD.values()))


HEADS_OF_BERT = {  # multiply-adds a token of what comes after the body; a pooler sees one token of the sequence
    BertModel: {"head": D * D / N},
    BertForMaskedLM: {"head": D * D, "embeddings": V * D},
    BertForSequenceClassification: {"head": (D * D + D * K) / N},
    BertForTokenClassification: {"head": D * K},
    BertForQuestionAnswering: {"head": D * 2},
}


@pytest.mark.parametrize("model_class", HEADS_OF_BERT, ids=lambda c: c.__name__)
def test_bert_by_hand(model_class):
    # A question has a start and an end; `num_labels` must be 2.
    config = bert_config(num_labels=2) if model_class is BertForQuestionAnswering else bert_config()
    operations = multiply_adds(model_class(config), length=N)
    expected = {"attention": L * (LINEARS + SCORES), "ffn": L * FFN} | HEADS_OF_BERT[model_class]
    assert forward_of(operations) == pytest.approx(expected)
    assert backward_of(operations) == pytest.approx({c: 2 * value for c, value in expected.items()})


def test_requires_grad_of_a_native_model_counts():
    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    operations = multiply_adds(model, length=N)
    assert backward_of(operations) == pytest.approx({"head": D * K})  # its weight; nothing below asks for more


def test_the_model_itself_is_untouched():
    model = tiny_marian([{"method": "freeze", "ffn": "random"}])
    before = {name: p.clone() for name, p in model.named_parameters()}
    attention = model.config._attn_implementation
    multiply_adds(model, length=N)
    assert model.config._attn_implementation == attention
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_scores_grow_with_the_length_and_linears_do_not():
    short, long = (multiply_adds(tiny_marian([]), length=n) for n in (5, 20))
    assert long.forward - short.forward == pytest.approx(3 * L * 2 * (20 - 5) * D)


@pytest.mark.parametrize("length", [0, -1, P + 1])
def test_a_length_the_model_does_not_have_is_refused(length):
    with pytest.raises(ValueError, match=rf"length={length} is outside 1\.\.{P}"):
        multiply_adds(tiny_marian([]), length=length)


def test_counts_are_plain_values():
    count = count_parameters(tiny_marian([]))
    assert dataclasses.asdict(count)["by_component"]["ffn"]["total"] == 2 * L * (2 * D * F + F + D)


# -- decoders ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_decoders_by_hand(model_type, task):
    """Multiply-adds per token of a sequence of T tokens: projections, FFN (gated or not), scores, output matrix."""
    architecture = ARCHITECTURES[model_type]
    config = AutoConfig.for_model(model_type, **architecture.tiny)
    assert config.pad_token_id is not None  # with which some forwards look at the ids
    model = make_variant(config, [], task=task)
    length, d, f, layers, vocabulary, labels = 8, 16, 24, 2, 40, config.num_labels
    keys_and_values = {"gpt2": 2 * d * d, "llama": 2 * d * d // 2}[model_type]
    attention = layers * (2 * d * d + keys_and_values + 2 * length * d)
    ffn = layers * {"gpt2": 2, "llama": 3}[model_type] * d * f
    output = d * (vocabulary if task == "causal-lm" else labels)
    macs = multiply_adds(model, length=length)
    assert macs.by_component["attention"].forward == attention
    assert macs.by_component["ffn"].forward == ffn
    assert macs.forward == attention + ffn + output


# -- linears whose weight is computed ------------------------------------------------------------------------------------------

WIDE = {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_layers": 1, "decoder_layers": 1}
I, O, TOKENS = 512, 2048, 20  # noqa: E741
ATTENTIONS = 3 * (4 * I * I + 2 * TOKENS * I)


def wide(*applied):
    with torch.device("meta"):
        return make_variant(tiny_marian_config(**WIDE), list(applied), task="seq2seq-lm", init="marian")


def two_cores(rank, modes, from_left):
    """Of one token: the cores (1, n1, m1, r) and (r, n2, m2, 1), one after the other."""
    (n1, n2), (m1, m2) = modes
    return rank * (n1 * m1 * n2 + m1 * n2 * m2 if from_left else n2 * m2 * n1 + m2 * n1 * m1)


def tensor_train_by_hand(rank):
    there, back = [min(two_cores(rank, modes, left) for left in (True, False)) for modes in (MODES, MODES[::-1])]
    return there + back


MODES = ((16, 32), (32, 64))
# Rank 2 everywhere, factor by factor: 16 x 32 inputs to 2 x 2, 32 x 64 inputs to 2 x 2, and the core; the outputs mirror them.
SMALL, LARGE, CORE = 2 * 16 * 32 + 2 * 2 * 32, 2 * 32 * 64 + 2 * 2 * 64, 4 * 4
TUCKER_TRAINED = (SMALL + CORE + LARGE) + (LARGE + CORE + SMALL)
TUCKER_KEPT = (SMALL + 4 * O) + (LARGE + 4 * I)  # the core and the factors of the outputs are one matrix
BY_HAND = {  # multiply-adds a token of the two linears of an FFN: trained, and frozen, with what is kept already made
    "low rank": (methods.LowRank(rank=8), 2 * 8 * (I + O), 2 * 8 * (I + O)),
    "nearly full rank": (methods.LowRank(rank=500), 2 * 500 * (I + O), 2 * I * O),
    "tensor train": (methods.TensorTrain(rank=2, shape=MODES), tensor_train_by_hand(2), tensor_train_by_hand(2)),
    "tucker": (methods.Tucker(rank=2, shape=MODES), TUCKER_TRAINED, TUCKER_KEPT),
    "masked": (methods.MagnitudePruning(sparsity=0.9), 2 * I * O, 2 * I * O),
    "variational": (methods.VariationalDropout(), 4 * I * O, 4 * I * O),  # means and variances
    "pruned neurons": (methods.FFNPruning(width=100), 2 * I * 100, 2 * I * 100),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_computed_weights_by_hand(name):
    method, trained, frozen = BY_HAND[name]
    operations = multiply_adds(wide(method), length=TOKENS)
    forward = {"attention": ATTENTIONS, "ffn": 2 * trained, "embeddings": V * I}
    assert forward_of(operations) == pytest.approx(forward)
    assert backward_of(operations) == pytest.approx({c: 2 * value for c, value in forward.items()})
    assert operations.backward == pytest.approx(2 * operations.forward)

    operations = multiply_adds(wide(method, methods.Freeze(ffn="frozen")), length=TOKENS)
    ffn = {"ffn": 2 * frozen}  # the gradient of the input only
    assert forward_of(operations) == pytest.approx(forward | ffn)
    assert backward_of(operations) == pytest.approx({c: 2 * value for c, value in forward.items()} | ffn)


def test_making_a_weight_in_every_step_by_hand():
    """So small a product is cheaper with the dense weight, which all tokens share."""
    operations = multiply_adds(tiny_marian([{"method": "low_rank", "rank": 4}]), length=N)
    ffn = 2 * L * 2 * (D * F + 4 * D * F / N)
    assert forward_of(operations) == pytest.approx(MARIAN_FORWARD | {"ffn": ffn})
    assert backward_of(operations) == pytest.approx(
        {c: 2 * value for c, value in (MARIAN_FORWARD | {"ffn": ffn}).items()}
    )


def finalized(sparsity):
    model = tiny_marian([{"method": "magnitude_pruning", "sparsity": sparsity}])
    model.finalize()
    return model


def test_a_sparse_weight_counts_as_dense_and_its_places_are_stored(tmp_path):
    dense, sparse = tiny_marian([]), finalized(0.9)
    assert multiply_adds(sparse, length=N) == multiply_adds(dense, length=N)
    ffn, left = count_parameters(sparse).by_component["ffn"], round(0.1 * 2 * 2 * L * D * F)
    assert ffn.total == ffn.stored == ffn.trainable == left + 2 * L * (D + F)
    # A bit a weight, or (for fewer non-zeros) a column number each and a count a row.
    places = {n: b.nbytes for n, b in sparse.named_buffers() if n.endswith((".mask", ".columns", ".counts"))}
    assert 0 < sum(places.values()) <= 2 * 2 * L * D * F / 8
    assert stored_bytes(sparse) == 4 * count_parameters(sparse).stored + sum(places.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: finalized(0.5),
        lambda: finalized(0.99),
        lambda: tiny_marian([{"method": "tensor_train", "rank": 2}]),
        lambda: tiny_marian([{"method": "magnitude_pruning", "sparsity": 0.5}]),
        lambda: tiny_marian([{"method": "ffn_pruning", "width": 7}, {"method": "freeze", "attention": "random"}]),
    ],
    ids=["sparse", "very sparse", "tensor train", "masked", "pruned neurons"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_bytes_of_compressed_variants_are_those_of_the_file(make, dtype, tmp_path):
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert stored_bytes(model) == (tmp_path / "model.safetensors").stat().st_size - header
