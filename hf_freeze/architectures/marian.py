"""Marian translation models (Junczys-Dowmunt et al., 2018; Helsinki-NLP/opus-mt-*)."""

import torch

from hf_freeze.architectures.base import Architecture, Attention, Stack
from hf_freeze.architectures.registry import register_architecture


def _attention(name: str, stack: str) -> Attention:
    return Attention(
        q=f"{name}.q_proj",
        k=f"{name}.k_proj",
        v=f"{name}.v_proj",
        o=f"{name}.out_proj",
        heads=f"{stack}_attention_heads",
        bidirectional=stack == "encoder",
    )


def _inputs(task: str) -> dict[str, torch.Tensor]:
    # Two sentences of 5 and 3 tokens; 0 is the padding, starts the decoder and is never a label.
    batch = {
        "input_ids": torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    }
    if task == "seq2seq-lm":
        batch["labels"] = torch.tensor([[6, 2, 9, 1], [7, 1, -100, -100]])
    else:
        batch["decoder_input_ids"] = torch.tensor([[0, 6, 2, 9], [0, 7, 1, 0]])
    return batch


MARIAN = register_architecture(
    Architecture(
        model_type="marian",
        named_like="bart",
        tasks=("seq2seq-lm", "feature-extraction"),
        stacks={
            "encoder": Stack(
                layers="encoder.layers.{}",
                depth="encoder_layers",
                attentions={"self": _attention("self_attn", "encoder")},
                ffn=("fc1", "fc2"),
                width="encoder_ffn_dim",
                activation="activation_fn",
                reads="encoder",
            ),
            "decoder": Stack(
                layers="decoder.layers.{}",
                depth="decoder_layers",
                attentions={
                    "self": _attention("self_attn", "decoder"),
                    "cross": _attention("encoder_attn", "decoder"),
                },
                ffn=("fc1", "fc2"),
                width="decoder_ffn_dim",
                activation="activation_fn",
                reads="decoder",
            ),
        },
        embeddings=("shared.*", "encoder.embed_tokens.*", "decoder.embed_tokens.*"),
        token_tables={
            "shared": "vocab_size",
            "encoder.embed_tokens": "vocab_size",
            "decoder.embed_tokens": "decoder_vocab_size",
        },
        other_tables={
            "encoder.embed_positions": "max_position_embeddings",
            "decoder.embed_positions": "max_position_embeddings",
        },
        output="lm_head",
        norms=("*_layer_norm.*",),
        constants=("*.embed_positions.weight",),
        output_bias="final_logits_bias",
        sizes={
            "hidden size": ("d_model",),
            "FFN width": ("encoder_ffn_dim", "decoder_ffn_dim"),
            "heads": ("encoder_attention_heads", "decoder_attention_heads"),
            "layers": ("encoder_layers", "decoder_layers"),
            "vocabulary": ("vocab_size", "decoder_vocab_size"),
            "rows of positions": ("max_position_embeddings",),
        },
        tiny={
            "vocab_size": 40,
            "decoder_vocab_size": 40,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 32,
            "activation_function": "relu",
            "scale_embedding": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": 1,
        },
        tiny_variants={
            "uneven": {"encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 16},
            "untied": {
                "tie_word_embeddings": False,
                "share_encoder_decoder_embeddings": False,
                "decoder_vocab_size": 44,
            },
            "two_tables": {"share_encoder_decoder_embeddings": False, "scale_embedding": False},
            "other_heads": {
                "d_model": 24,
                "encoder_attention_heads": 3,
                "decoder_attention_heads": 4,
                "decoder_layers": 3,
                "activation_function": "swish",
            },
        },
        tiny_inputs=_inputs,
    )
)
