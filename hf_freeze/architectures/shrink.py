"""A small config of the same kind: the same switches, small numbers. Probes and tests run on the model that it makes."""

import copy
import re
from typing import Any

# Patterns of config fields -> the small value. All sizes of one layer differ, so that shapes tell what a matrix joins.
HIDDEN, HEADS, GROUPS, HEAD_SIZE, WIDTH, VOCABULARY, POSITIONS, DEPTH = 32, 4, 2, 8, 48, 99, 64, 2
_WIDER_HEAD = 16
_SMALL = (
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|model_dim|emb_dim|d_embed|hidden_dims?|decoder_hidden_size|encoder_hidden_size",
        HIDDEN,
    ),
    (
        r"num_hidden_layers|encoder_layers|decoder_layers|n_layers?|num_layers|num_decoder_layers|num_encoder_layers|num_hidden_groups",
        DEPTH,
    ),
    (
        r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|n_attention_heads|num_(en|de)coder_attention_heads",
        HEADS,
    ),
    (
        r"intermediate_size|ffn_dim|d_ff|n_inner|(en|de)coder_ffn_dim|ffn_hidden_size|(en|de)coder_intermediate_size|dense_ffn_hidden_size|block_ff_dim",
        WIDTH,
    ),
    (r"(?!type_)(\w+_)?vocab_size", VOCABULARY),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_sequence_length|max_seq_len|max_length",
        POSITIONS,
    ),
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_dim|expert_ffn_hidden_size", 40),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k|moe_k|num_selected_experts", 2),
    (r"n_groups?|topk_group|num_expert_group|n_group", 1),
    (r"rotary_dim", 4),
    (r"attention_window|sliding_window|window_size|local_attention", 16),
    (r"image_size", 16),
    (r"patch_size", 8),
    (r"num_mel_bins", 12),
    (r"q_lora_rank|kv_lora_rank", 12),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim", 8),
    (r"projection_dim", 28),
    (r"block_size", 8),
    (r"type_vocab_size", 2),
)
_COMPILED = [(re.compile(rf"(?:{pattern})"), value) for pattern, value in _SMALL]
_GROUPS = re.compile(
    r"num_key_value_heads|n_head_kv|num_kv_heads|n_kv_heads|num_ln_in_parallel_attn|(en|de)coder_key_value_heads"
)
_HEAD_SIZE = re.compile(r"head_dim|d_kv|global_head_dim|kv_channels|d_head|attention_head_size")
_TOKEN = re.compile(r"\w*token_ids?|\w*token_index")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def shrink(config: Any, **changes: Any) -> Any:
    """A config of the class of `config` with its switches and small sizes, with `changes` on top. Nothing is allocated.

    Raises ValueError if the class refuses these values.
    """
    data = shrunk_fields(config.to_dict())
    return type(config).from_dict(copy.deepcopy(data) | changes)


def shrunk_fields(data: dict[str, Any]) -> dict[str, Any]:
    """`data`, a config as a dict, with small sizes; nested configs too."""
    heads = next(
        (
            data[n]
            for n in data
            if re.fullmatch(r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads", n)
            and type(data[n]) is int
        ),
        None,
    )
    hidden = next(
        (
            data[n]
            for n in data
            if re.fullmatch(r"hidden_size|d_model|n_embd|dim|embed_dim", n) and type(data[n]) is int
        ),
        None,
    )
    small: dict[str, Any] = {}
    depth = next(
        (
            data[n]
            for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
            if type(data.get(n)) is int
        ),
        None,
    )
    for name, value in data.items():
        small[name] = _small(name, value, heads, hidden, depth)
    if "qk_rope_head_dim" in data:  # latent attention: queries and keys have a part with positions and one without
        small |= {name: size for name, size in (("head_dim", 8), ("qk_head_dim", 16)) if name in data}
    return small


def _small(name: str, value: Any, heads: int | None, hidden: int | None, depth: int | None) -> Any:
    if (
        isinstance(value, dict)
        and value
        and all(re.fullmatch(r"\d+", str(key)) for key in value)
        and "label" not in name
    ):
        return {key: item for key, item in value.items() if int(key) < DEPTH}  # an entry for each layer
    if isinstance(value, dict) and (
        "model_type" in value or name.endswith("_config") or name in ("encoder", "decoder", "generator")
    ):
        return shrunk_fields(value)
    if _TOKEN.fullmatch(name):
        if isinstance(value, list):
            return [2]
        return value if value is None else _TOKENS.get(name, 1)
    if isinstance(value, list) and depth is not None and len(value) == depth and not name.endswith("ids"):
        return kinds_first(value, DEPTH)
    if value is None and name == "num_key_value_heads":
        return HEADS
    if type(value) is not int:
        return value
    if _GROUPS.fullmatch(name):
        return HEADS if heads is not None and value >= heads else 1 if value == 1 else GROUPS
    if _HEAD_SIZE.fullmatch(name):
        return HEAD_SIZE if heads is None or hidden is None or value * heads == hidden else _WIDER_HEAD
    if name in ("embedding_size", "word_embed_proj_dim", "input_embedding_size"):
        return HIDDEN if value == hidden else 24
    for pattern, size in _COMPILED:
        if pattern.fullmatch(name):
            return size if value > 0 else value
    return value


_KINDS = {
    HIDDEN: "hidden size",
    HEADS: "heads",
    WIDTH: "FFN width",
    VOCABULARY: "vocabulary",
    POSITIONS: "positions",
    DEPTH: "layers",
}


def sizes_in(config: Any) -> dict[str, tuple[str, ...]]:
    """Kind of size -> the config fields that hold one, told by their names."""
    sizes: dict[str, tuple[str, ...]] = {}
    for name, value in vars(config).items():
        kind = next((_KINDS.get(size) for pattern, size in _COMPILED[:6] if pattern.fullmatch(name)), None)
        if kind is not None and type(value) is int and value > 0:
            sizes[kind] = (*sizes.get(kind, ()), name)
    return sizes


def kinds_first(entries: list[Any], count: int) -> list[Any]:
    """`count` entries that hold as many different kinds as possible, in the order of their first appearance."""
    kinds: list[Any] = []
    for entry in entries:
        if entry not in kinds:
            kinds.append(entry)
    return [kinds[number % len(kinds)] for number in range(count)]
