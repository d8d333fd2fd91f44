"""Bytes in memory and bytes that a decoding step reads, against sums by hand."""

import pytest
from support.small import small_config
from transformers import MarianConfig
from typer.testing import CliRunner

from hf_freeze import make_variant
from hf_freeze.analysis import inference_memory
from hf_freeze.cli import app
from hf_freeze.methods import FactorizedEmbedding, Freeze
from hf_freeze.seeded.tiles import scratch_bytes

V, D, F, P = 40, 16, 24, 32  # tokens, width, neurons, positions
CONFIG = MarianConfig(
    vocab_size=V,
    d_model=D,
    encoder_ffn_dim=F,
    decoder_ffn_dim=F,
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    max_position_embeddings=P,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
    forced_eos_token_id=None,
)
FFN, ATTENTION, NORM = 2 * D * F, 4 * D * D, 2 * D
LAYER = FFN + F + D + ATTENTION + 4 * D + 2 * NORM
DECODER = LAYER + ATTENTION + 4 * D + NORM
RANDOM = Freeze(ffn="random", attention="random", embeddings="random")


def test_a_native_encoder_decoder():
    memory = inference_memory(make_variant(CONFIG, [], task="seq2seq-lm"))
    assert memory.resident == 4 * (V * D + V + 2 * P * D + 2 * LAYER + DECODER)
    # The table as the output matrix, the bias on the logits, a row of the decoder's positions and one of the encoder's.
    cached = 2 * D * D + 2 * D
    assert memory.read == 4 * (V * D + V + 2 * D + DECODER - cached)
    assert memory.scratch == 0


def test_seeded_tensors_count_nothing_where_they_are_generated():
    model = make_variant(CONFIG, [RANDOM], task="seq2seq-lm")
    before = inference_memory(model)
    streamed = inference_memory(model, "streamed")
    matrices = V * D + 3 * FFN + 4 * ATTENTION
    assert streamed.resident == before.resident - 4 * matrices + scratch_bytes()
    assert streamed.scratch == scratch_bytes() <= 4 << 20
    assert streamed.read == before.read - 4 * (V * D + FFN + 2 * ATTENTION - 2 * D * D)
    model.set_seeded_execution("streamed")
    assert inference_memory(model) == inference_memory(model, "fused") == streamed
    assert inference_memory(model, "resident") == before


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "t5"])
def test_other_families_and_factors(model_type):
    config = small_config(model_type)
    task = {"bert": "masked-lm", "t5": "seq2seq-lm"}.get(model_type, "causal-lm")
    for methods in ([], [FactorizedEmbedding(rank=4)], [RANDOM]):
        model = make_variant(config, methods, task=task)
        memory = inference_memory(model)
        everything = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        assert 0 < memory.read <= memory.resident <= everything
        assert inference_memory(model, "streamed").read <= memory.read


def test_inspect_tells_both(tmp_path):
    make_variant(CONFIG, [RANDOM], task="seq2seq-lm").save_pretrained(tmp_path / "random")
    make_variant(CONFIG, [], task="seq2seq-lm").save_pretrained(tmp_path / "plain")
    lines = {}
    for name in ("random", "plain"):
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / name), "--length", "8"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        lines[name] = [line for line in result.output.splitlines() if "bytes in memory" in line]
    memory = inference_memory(make_variant(CONFIG, [], task="seq2seq-lm"))
    assert (
        lines["plain"]
        == [f"resident: {memory.resident:,} bytes in memory; a decoding step reads {memory.read:,}"]
        == lines["random"][:1]
    )
    assert lines["random"][1].startswith("streamed: ")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="seeded_execution='lazy': must be one of 'resident', 'streamed', 'fused'"):
        inference_memory(make_variant(CONFIG, [], task="seq2seq-lm"), "lazy")
