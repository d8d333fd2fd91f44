"""GPT-2 (Radford et al., 2019). Its linears are `Conv1D`, with weights of (inputs, outputs); one of them holds queries, keys and
values."""

from hf_freeze.architectures.base import DECODER_TASKS, Architecture, Attention, Stack, decoder_inputs
from hf_freeze.architectures.registry import register_architecture

GPT2 = register_architecture(
    Architecture(
        model_type="gpt2",
        tasks=DECODER_TASKS,
        stacks={
            "decoder": Stack(
                layers="h.{}",
                depth="n_layer",
                attentions={
                    "self": Attention(
                        q="attn.c_attn", k="attn.c_attn", v="attn.c_attn", o="attn.c_proj", heads="n_head"
                    ),
                    "cross": Attention(
                        q="crossattention.q_attn",
                        k="crossattention.c_attn",
                        v="crossattention.c_attn",
                        o="crossattention.c_proj",
                        heads="n_head",
                        switch="add_cross_attention",
                    ),
                },
                ffn=("mlp.c_fc", "mlp.c_proj"),
                width="n_inner",
                activation="mlp.act",
            )
        },
        embeddings=("wte.*", "wpe.*"),
        token_tables={"wte": "vocab_size"},
        other_tables={"wpe": "n_positions"},
        output="lm_head",
        norms=("h.*.ln_*.*", "ln_f.*"),
        sizes={
            "hidden size": ("n_embd",),
            "FFN width": ("n_inner",),
            "heads": ("n_head",),
            "layers": ("n_layer",),
            "vocabulary": ("vocab_size",),
            "rows of positions": ("n_positions",),
        },
        tiny={
            "vocab_size": 40,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 24,
            "n_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        tiny_variants={
            "inverse_layer_scale": {
                "n_layer": 4,
                "scale_attn_by_inverse_layer_idx": True,
                "reorder_and_upcast_attn": True,
            },
            "untied": {"tie_word_embeddings": False, "n_head": 4, "activation_function": "relu"},
            "cross_attention": {"add_cross_attention": True},
            "default_width": {"n_inner": None, "n_embd": 32, "scale_attn_weights": False},
        },
        tiny_inputs=decoder_inputs,
    )
)
