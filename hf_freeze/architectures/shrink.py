"""A small config of the same kind: the same switches, small numbers. Probes and tests run on the model that it makes."""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# The sizes of one layer all differ, so that shapes tell what a matrix joins.
HIDDEN, HEADS, GROUPS, HEAD_SIZE, WIDER_HEAD, WIDTH = 32, 4, 2, 8, 16, 48
VOCABULARY, POSITIONS, DEPTH, MIXED_DEPTH = 99, 64, 2, 3

_SIDE = "(?:(?:en|de)coder_|source_|target_)?"
_DEPTHS = rf"num_{_SIDE}(?:hidden_)?layers|{_SIDE}layers|n_layers?|num_hidden_groups"
_HEADS = rf"num_{_SIDE}(?:attention_)?heads|{_SIDE}attention_heads|n_(?:attention_)?heads?"
_HIDDEN = rf"{_SIDE}hidden_size|d_model|n_embd|dim|embed_dim|model_dim|emb_dim|d_embed|hidden_dims?"
_WIDTHS = rf"{_SIDE}(?:intermediate_size|ffn_dim)|d_ff|n_inner|(?:dense_)?ffn_hidden_size|block_ff_dim"
EXPERT_COUNTS = r"num_(?:local_)?experts|n_routed_experts|moe_num_experts"
_CHOSEN = r"num_experts_per_tok(?:en)?|moe_top_?k|top_k|moe_k|num_selected_experts"  # 1 stays 1
_PERIODS = r"(?:attn|expert)_layer_period"
# Patterns of config fields -> (the small value, the kind of size that limits are given for).
_SMALL: tuple[tuple[str, int, str | None], ...] = (
    (_HIDDEN, HIDDEN, "hidden size"),
    (_DEPTHS, DEPTH, "layers"),
    (_HEADS, HEADS, "heads"),
    (_WIDTHS, WIDTH, "FFN width"),
    (r"(?!type_)(?:\w+_)?vocab_size", VOCABULARY, "vocabulary"),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_(?:source|target)_positions|max_seq(?:uence)?_len(?:gth)?|max_length",
        POSITIONS,
        "positions",
    ),
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_dim|expert_ffn_hidden_size", 40, None),
    (EXPERT_COUNTS, 4, None),
    (_CHOSEN, 2, None),
    (r"n_groups?|topk_group|num_expert_group", 1, None),
    (r"first_k_dense_replace", 1, None),  # layers without experts, of the two
    (r"rotary_dim", 4, None),
    (r"attention_window|sliding_window|window_size|local_attention", 16, None),
    (r"image_size", 16, None),
    (r"patch_size|block_size", 8, None),
    (r"num_mel_bins|q_lora_rank|kv_lora_rank", 12, None),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim", 8, None),
    (r"projection_dim", 28, None),
    (r"projection_size", HIDDEN, None),
    (_PERIODS, 2, None),
    # Of a box on a page: four coordinates, its width and its height make one hidden state.
    (r"coordinate_size", 6, None),
    (r"shape_size", 4, None),
    # The inner width of a state space is twice the hidden size, and its heads times their size.
    (r"mamba_n_heads|n_mamba_heads|mamba_num_heads", 8, None),
    (r"mamba_d_head|mamba_head_?dim", 8, None),
    (r"mamba_d_ssm", 2 * HIDDEN, None),
    (r"mamba_d_state|mamba_chunk_size", 16, None),
    (r"type_vocab_size", 2, None),
)
_COMPILED = [(re.compile(pattern), size, kind) for pattern, size, kind in _SMALL]
_GROUPS = re.compile(r"(?:num_|n_)(?:key_value|kv)_heads|n_head_kv|kv_n_heads|(?:en|de)coder_key_value_heads")
_HEAD_SIZE = re.compile(r"head_dim|d_kv|global_head_dim|kv_channels|d_head|attention_head_size")
# of tables that may be narrower than the hidden size
TABLE_WIDTHS = ("embedding_size", "word_embed_proj_dim", "input_embedding_size")
_TOKEN = re.compile(r"\w*token_(?:ids?|index)|(?:image|im|slice)_(?:start|end|patch|newline)_id|newline_id")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def shrink(config: Any) -> Any:
    """A config of the class of `config` with its switches and small sizes. Nothing is allocated.

    Raises ValueError if the class refuses these values.
    """
    return type(config).from_dict(copy.deepcopy(_shrunk(config.to_dict())))


def config_key(config: Any) -> str:
    """Equal for configs of which the native classes make equal models."""
    left_out = ("architectures", "transformers_version", "_name_or_path", "problem_type")
    data = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return type(config).__name__ + json.dumps(data, sort_keys=True, default=str)


def sizes_in(config: Any) -> dict[str, tuple[str, ...]]:
    """Kind of size -> the config fields that hold one, told by their names."""
    sizes: dict[str, tuple[str, ...]] = {}
    for name, value in vars(config).items():
        kind = next((kind for pattern, _, kind in _COMPILED if kind is not None and pattern.fullmatch(name)), None)
        if kind is not None and type(value) is int and value > 0:
            sizes[kind] = (*sizes.get(kind, ()), name)
    return sizes


def head_fields(config: Any) -> tuple[str | None, str | None]:
    """The fields that hold the number of query heads and the number of key and value heads, told by their names; None if there is
    none."""
    numbers = [name for name, value in vars(config).items() if type(value) is int and value > 0]
    heads = next((name for name in numbers if re.fullmatch(_HEADS, name)), None)
    return heads, next((name for name in numbers if _GROUPS.fullmatch(name)), None)


def token_fields(config: Any) -> dict[str, int]:
    """Field -> token id, of the fields that hold one, told by their names; a dotted name lies in a nested config."""
    return {name: value for name, value in integer_fields(config.to_dict()) if is_token_field(name.rpartition(".")[2])}


def is_token_field(name: str) -> bool:
    """Whether a config field of this name holds a token id, or a list of them."""
    return _TOKEN.fullmatch(name) is not None


def integer_fields(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """(field, value) of all integers in a config as a dict; a dotted name lies in a nested config."""
    for name, value in data.items():
        if type(value) is int:
            yield f"{prefix}{name}", value
        elif isinstance(value, dict) and "model_type" in value:  # a config inside the config
            yield from integer_fields(value, f"{prefix}{name}.")


def _shrunk(data: dict[str, Any]) -> dict[str, Any]:
    """`data`, a config as a dict, with small sizes; nested configs too."""
    heads, hidden, depth = (_first(data, pattern) for pattern in (_HEADS, _HIDDEN, _DEPTHS))
    small = {name: _small(name, value, heads, hidden, depth) for name, value in data.items()}
    lists = {name: value for name, value in data.items() if isinstance(value, list | tuple)}
    mixed = any(_is_mixed(value) for value in lists.values() if len(value) == depth)
    pair = any(len(value) == DEPTH != depth for name, value in lists.items() if not name.endswith("ids"))
    if mixed or pair:
        # Layers of several kinds: without the last one, there is still one of each of two. And a list of two that is not one
        # of layers, such as limits, must not seem to have an entry for each layer.
        small |= {name: MIXED_DEPTH for name in data if re.fullmatch(_DEPTHS, name) and data[name] == depth}
        small |= {
            name: _kinds_first(value, MIXED_DEPTH)
            for name, value in lists.items()
            if len(value) == depth and not name.endswith("ids")
        }
    if "qk_rope_head_dim" in data:  # latent attention: queries and keys have a part with positions and one without
        whole = data.get("qk_nope_head_dim", 0) + data["qk_rope_head_dim"]
        sizes = {"head_dim": 16 if data.get("head_dim") == whole else 8, "qk_head_dim": 16}
        small |= {name: size for name, size in sizes.items() if name in data}
    # a second, narrower state of each token; six parts of a box make one hidden state
    if "channel_shrink_ratio" in data:
        small |= {"hidden_size": 6 * HEAD_SIZE, "intermediate_size": 7 * HEAD_SIZE}
    if "stage_names" in data:  # names of layers that a backbone returns, made from the depth
        small = {
            name: value for name, value in small.items() if name not in ("stage_names", "out_features", "out_indices")
        }
    if "dtype" in data:
        small["dtype"] = "float32"  # whatever the model is in, the proofs are exact
    return small


def _is_mixed(entries: Sequence[Any]) -> bool:
    return any(entry != entries[0] for entry in entries)


def _first(data: dict[str, Any], pattern: str) -> int | None:
    """The first integer in a field whose name matches."""
    return next((value for name, value in data.items() if type(value) is int and re.fullmatch(pattern, name)), None)


def _small(name: str, value: Any, heads: int | None, hidden: int | None, depth: int | None) -> Any:
    """The small value of one field; `heads`, `hidden` and `depth` are those of the config."""
    if isinstance(value, dict):
        return _small_dict(name, value)
    if is_token_field(name):
        return [2] if isinstance(value, list) else value if value is None else _TOKENS.get(name, 1)
    if isinstance(value, list) and len(value) == depth and not name.endswith("ids"):
        return _kinds_first(value, DEPTH)
    if name == "block_types" and isinstance(value, list | tuple):  # kinds of layers, repeated up to the depth
        return _kinds_first(value, min(len(value), DEPTH))
    if name == "conv_dim" and isinstance(value, list | tuple):  # of the convolutions that read sound
        return [max(2, size // 32) for size in value]
    if name == "attn_layer_indices" and value:
        return [0]
    if name.endswith("_layer_offset"):  # attention in the first of two layers, experts in either
        return 0 if name.startswith("attn") or not value else 1
    if value is None and name == "num_key_value_heads":
        return HEADS
    if type(value) is not int or value <= 0:
        return value
    if _GROUPS.fullmatch(name):
        return HEADS if heads is not None and value >= heads else 1 if value == 1 else GROUPS
    if _HEAD_SIZE.fullmatch(name):
        return HEAD_SIZE if heads is None or hidden is None or value * heads == hidden else WIDER_HEAD
    if name in TABLE_WIDTHS:
        return HIDDEN if value == hidden else 24
    size = next((size for pattern, size, _ in _COMPILED if pattern.fullmatch(name)), value)
    return min(value, size) if re.fullmatch(rf"{_CHOSEN}|{_PERIODS}", name) else size


def _small_dict(name: str, value: dict[str, Any]) -> dict[str, Any]:
    if value and "label" not in name and all(str(key).isdecimal() for key in value):
        return {key: item for key, item in value.items() if int(key) < DEPTH}  # an entry for each layer
    return _shrunk(value) if "model_type" in value or name.endswith("_config") else value


def _is_recurrent(kind: Any) -> bool:
    """Whether a kind of layer, such as "linear_attention" or "mamba", is recurrent or a convolution."""
    return isinstance(kind, str) and re.search(r"linear|mamba|conv|recurrent", kind) is not None


def _kinds_first(entries: Iterable[Any], count: int) -> list[Any]:
    """`count` entries that hold as many different kinds as possible, in the order of their first appearance.

    Kinds with attention come before recurrent ones: native caches need one attention, also when later layers are removed.
    """
    kinds: list[Any] = []
    for entry in entries:
        if entry not in kinds:
            kinds.append(entry)
    kinds.sort(key=_is_recurrent)
    return [kinds[number % len(kinds)] for number in range(count)]
