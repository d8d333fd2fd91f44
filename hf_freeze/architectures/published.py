"""Default configs of model types, completed where transformers leaves out what every published checkpoint states."""

from typing import Any

from transformers import AutoConfig

# Model type -> fields that its default config lacks, without which transformers cannot build a model or run it, as published
# checkpoints give them. Only default configs are completed: the config of a checkpoint is used as it is.
PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "funnel": {"architectures": ["FunnelModel"]},
    "granitemoehybrid": {
        "num_hidden_layers": 40,
        "layer_types": ["full_attention" if number in (5, 15, 25, 35) else "linear_attention" for number in range(40)],
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if number in (2, 6, 10, 14, 18, 21) else "conv" for number in range(24)],
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str) -> Any:
    """The default config of a model type of transformers, with the fields that only published checkpoints give."""
    return AutoConfig.for_model(model_type, **PUBLISHED.get(model_type, {}))
