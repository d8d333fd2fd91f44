"""Small configs of any family."""

from typing import Any

from transformers import SqueezeBertConfig, SqueezeBertModel

from hf_freeze.architectures.fields import change
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.shrink import shrink


def small_config(model_type: str, **changes: Any) -> Any:
    """The small config of a family, with other values for some fields."""
    config = change(shrink(default_config(model_type)), **changes)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def not_understood() -> Any:
    """A tiny model of a family of which nothing is derived: its matrices are convolutions."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "embedding_size": 8}
    return SqueezeBertModel(SqueezeBertConfig(vocab_size=9, num_hidden_layers=1, num_attention_heads=1, **sizes))
