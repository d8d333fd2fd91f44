"""Llama (Touvron et al., 2023): grouped key and value heads, gated FFN, rotary positions, no biases."""

from hf_freeze.architectures.base import DECODER_TASKS, Architecture, Attention, Stack, decoder_inputs
from hf_freeze.architectures.registry import register_architecture

LLAMA = register_architecture(
    Architecture(
        model_type="llama",
        tasks=DECODER_TASKS,
        stacks={
            "decoder": Stack(
                layers="layers.{}",
                depth="num_hidden_layers",
                attentions={
                    "self": Attention(
                        q="self_attn.q_proj",
                        k="self_attn.k_proj",
                        v="self_attn.v_proj",
                        o="self_attn.o_proj",
                        heads="num_attention_heads",
                        groups="num_key_value_heads",
                        thins=True,
                    )
                },
                ffn=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
                width="intermediate_size",
                activation="mlp.act_fn",
            )
        },
        embeddings=("embed_tokens.*",),
        token_tables={"embed_tokens": "vocab_size"},
        output="lm_head",
        norms=("layers.*layernorm.weight", "norm.weight"),
        sizes={
            "hidden size": ("hidden_size",),
            "FFN width": ("intermediate_size",),
            "heads": ("num_attention_heads", "num_key_value_heads"),
            "head size": ("head_dim",),
            "layers": ("num_hidden_layers",),
            "vocabulary": ("vocab_size",),
            "positions": ("max_position_embeddings",),
        },
        tiny={
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        tiny_variants={
            "biases": {"attention_bias": True, "mlp_bias": True},
            "head_size": {"head_dim": 8, "num_hidden_layers": 3},
            "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            "ungrouped": {"num_key_value_heads": 4, "intermediate_size": 40, "hidden_act": "gelu"},
        },
        tiny_inputs=decoder_inputs,
    )
)
