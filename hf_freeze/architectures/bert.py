"""BERT (Devlin et al., 2019)."""

from typing import Any

import torch

from hf_freeze.architectures.base import Architecture, Attention, NormedEmbeddings, Stack
from hf_freeze.architectures.registry import register_architecture

_LABELS = {
    "masked-lm": {"labels": [[-100, 9, -100, 7, -100], [-100, 4, -100, -100, -100]]},
    "sequence-classification": {"labels": [1, 0]},
    "token-classification": {"labels": [[0, 1, 1, 0, 1], [1, 0, 0, -100, -100]]},
    "question-answering": {"start_positions": [1, 0], "end_positions": [3, 1]},
    "feature-extraction": {},
    "causal-lm": {"labels": [[5, 9, 3, 7, 1], [8, 4, 1, -100, -100]]},
    "multiple-choice": {"labels": [1, 0]},
}
_CHOICES = {
    "input_ids": [[[5, 9, 3, 7, 1], [5, 9, 6, 1, 0]], [[8, 4, 1, 0, 0], [8, 1, 0, 0, 0]]],
    "attention_mask": [[[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]],
    "token_type_ids": [[[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]], [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]],
}


def _inputs(task: str) -> dict[str, torch.Tensor]:
    batch: dict[str, Any] = {
        "input_ids": [[5, 9, 3, 7, 1], [8, 4, 1, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "token_type_ids": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
    }
    if task == "multiple-choice":  # (examples, choices, tokens)
        batch = _CHOICES
    return {name: torch.tensor(values) for name, values in (batch | _LABELS[task]).items()}


BERT = register_architecture(
    Architecture(
        model_type="bert",
        tasks=tuple(_LABELS),
        stacks={
            "encoder": Stack(
                layers="encoder.layer.{}",
                depth="num_hidden_layers",
                attentions={
                    "self": Attention(
                        q="attention.self.query",
                        k="attention.self.key",
                        v="attention.self.value",
                        o="attention.output.dense",
                        heads="num_attention_heads",
                        bidirectional=True,
                    ),
                    "cross": Attention(
                        q="crossattention.self.query",
                        k="crossattention.self.key",
                        v="crossattention.self.value",
                        o="crossattention.output.dense",
                        heads="num_attention_heads",
                        switch="add_cross_attention",
                    ),
                },
                ffn=("intermediate.dense", "output.dense"),
                width="intermediate_size",
                activation="intermediate.intermediate_act_fn",
            )
        },
        # The dropout is the last module of the embeddings: FactorizedEmbedding puts the projection there.
        embeddings=("embeddings.*_embeddings.*", "embeddings.dropout.projection.*"),
        token_tables={"embeddings.word_embeddings": "vocab_size"},
        other_tables={
            "embeddings.position_embeddings": "max_position_embeddings",
            "embeddings.token_type_embeddings": "type_vocab_size",
        },
        output_bias="cls.predictions.bias",
        output="cls.predictions.decoder",
        normed_embeddings=NormedEmbeddings(
            others=("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
            norm="embeddings.LayerNorm",
            last="embeddings.dropout",
            output_linear="cls.predictions.transform.dense",
            output_norm="cls.predictions.transform.LayerNorm",
        ),
        norms=("embeddings.LayerNorm.*", "encoder.layer.*.LayerNorm.*"),
        sizes={
            "hidden size": ("hidden_size",),
            "FFN width": ("intermediate_size",),
            "heads": ("num_attention_heads",),
            "layers": ("num_hidden_layers",),
            "vocabulary": ("vocab_size", "type_vocab_size"),
            "rows of positions": ("max_position_embeddings",),
        },
        tiny={
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        },
        tiny_variants={
            "deep": {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 20},
            "untied": {"tie_word_embeddings": False, "hidden_act": "relu"},
            "cross_attention": {"is_decoder": True, "add_cross_attention": True},
            "one_head": {"num_attention_heads": 1, "type_vocab_size": 3, "intermediate_size": 64},
        },
        tiny_inputs=_inputs,
    )
)
