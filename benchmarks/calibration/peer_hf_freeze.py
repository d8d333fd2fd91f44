"""Our own methods: without calibration; with it, the same share of each layer; and with shares that it allocates over layers."""

from typing import Any

import torch

PACKAGES = ["hf-freeze"]
REQUIREMENTS: list[str] = []  # runs in the project's own environment
METHODS = {
    "hf_freeze, no calibration": None,
    "hf_freeze, calibrated": None,
    "hf_freeze, calibrated and allocated": {"neurons", "heads"},
}
BLIND = {"hf_freeze, no calibration"}
OWN_TRANSLATIONS = {
    "hf_freeze, calibrated",
    "hf_freeze, calibrated and allocated",
}  # they are made, and timed, by the method itself
CANNOT: dict[tuple[str, ...], str] = {}


def prepare() -> None:
    import hf_freeze.methods
    import hf_freeze.model.make  # noqa: F401


def methods_of(cut: dict[str, Any], config: Any, allocated: bool) -> list[Any]:
    """The methods of a cut: `cut` has the shares of neurons, heads, weights (rank), zeros, layers or bits. `allocated`: these
    shares are of all layers together."""
    from hf_freeze import methods

    width = config.encoder_ffn_dim if config.is_encoder_decoder else config.intermediate_size
    hidden = config.hidden_size
    chosen: list[Any] = []
    if share := cut.get("heads"):
        chosen.append(methods.HeadPruning(share=share, scope="global" if allocated else "attention"))
    if share := cut.get("neurons"):
        size: Any = {"share": share} if allocated else {"width": int(share * width)}
        chosen.append(methods.FFNPruning(**size))
    if share := cut.get("rank"):
        chosen.append(methods.LowRank(rank=int(share * hidden * width / (hidden + width))))
    if share := cut.get("zeros"):
        chosen.append(methods.MagnitudePruning(sparsity=share))
    if share := cut.get("layers"):
        chosen.append(methods.LayerSelection(share=share))
    if cut.get("bits") == 4:
        chosen.append(methods.Quantize(weights="int4", granularity="group-64"))
    if share := cut.get("train"):
        chosen.append(methods.TensorTrain(rank=train_rank(share, hidden, width)))
    return chosen


def train_rank(share: float, hidden: int, width: int) -> int:
    """The largest rank of a tensor train of at most `share` of the weights of a (hidden, width) matrix."""
    from hf_freeze.layers.shapes import modes_of
    from hf_freeze.layers.tensor_train import full_ranks

    ins, outs = modes_of(hidden, width, None)
    for rank in range(hidden, 0, -1):
        ranks = [min(rank, limit) for limit in full_ranks(ins, outs)]
        size = sum(a * i * o * b for a, i, o, b in zip(ranks, ins, outs, ranks[1:], strict=False))
        if size <= share * hidden * width:
            return rank
    raise ValueError(f"no tensor train of ({hidden}, {width}) has {share} of its weights")


def compress(model: Any, batches: list[dict[str, torch.Tensor]], job: dict[str, Any]) -> tuple[dict[str, Any], dict]:
    from transformers import AutoTokenizer

    from hf_freeze import make_variant

    chosen = methods_of(job["cut"], model.config, allocated=job["method"].endswith("allocated"))
    options: dict[str, Any] = {}
    if job["method"] not in BLIND:
        if job["texts"] is None:
            options["calibration"] = batches
        else:
            options = {"calibration": job["texts"], "tokenizer": AutoTokenizer.from_pretrained(job["model_folder"])}
    variant = make_variant(model, chosen, **options)
    native = variant.merge()
    if "layers" in job["cut"]:
        return _in_place(model, native), {"methods": str(chosen)}
    return native.state_dict(), {"methods": str(chosen)}


def _in_place(model: Any, native: Any) -> dict[str, torch.Tensor]:
    """The state of a Llama of all layers that computes as `native`, which has fewer: the others add zero."""
    state, smaller = dict(model.state_dict()), native.state_dict()
    queries = [layer.self_attn.q_proj.weight for layer in model.model.layers]
    kept = [
        next(i for i, query in enumerate(queries) if torch.equal(query, layer.self_attn.q_proj.weight))
        for layer in native.model.layers
    ]
    for name in state:
        if ".layers." not in name:
            state[name] = smaller[name]
            continue
        before, _, rest = name.partition(".layers.")
        number, _, rest = rest.partition(".")
        if int(number) in kept:
            state[name] = smaller[f"{before}.layers.{kept.index(int(number))}.{rest}"]
        elif "o_proj" in rest or "down_proj" in rest:
            state[name] = torch.zeros_like(state[name])
    return state
