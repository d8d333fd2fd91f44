"""optipfair: neurons of gated FFNs, by its peak-to-peak score of weights and with its scores of activations, and whole layers."""

from typing import Any

import blocks

PACKAGES = ["optipfair"]
REQUIREMENTS = ["torch==2.13.0", "optipfair==0.4.2", "transformers==5.23.0"]
METHODS = {
    "optipfair, weights": {"neurons"},
    "optipfair, activations": {"neurons"},
    "optipfair, last layer": {"layers"},
    "optipfair, least important layer": {"layers"},
}
BLIND = {"optipfair, weights", "optipfair, last layer"}
CANNOT = {
    (method, model): "only gated FFNs of decoders, as Llama's"
    for method in METHODS
    for model in ("minilm", "translator")
}


def prepare() -> None:
    import optipfair  # noqa: F401


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import optipfair

    cut, quiet = job["cut"], {"show_progress": False}
    if "neurons" in cut:
        data = batches if job["method"] == "optipfair, activations" else None
        share = 100 * (1 - cut["neurons"])
        smaller = optipfair.prune_model(
            model, "MLP_GLU", neuron_selection_method="MAW", pruning_percentage=share, dataloader=data, **quiet
        )
        return smaller.state_dict(), {"width": smaller.config.intermediate_size}
    layers = list(model.model.layers)
    gone = len(layers) - round(cut["layers"] * len(layers))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    choice: dict[str, Any] = {"num_layers_to_remove": gone, "layer_selection_method": "last"}
    if job["method"] == "optipfair, least important layer":
        scores = optipfair.analyze_layer_importance(model, batches, **quiet)
        choice = {"layer_indices": sorted(scores, key=scores.__getitem__)[:gone]}
    kept = list(optipfair.prune_model(model, "DEPTH", **choice, **quiet).model.layers)
    removed = [number for number, layer in enumerate(layers) if not any(layer is other for other in kept)]
    for number in removed:  # a layer whose outputs are zero is none
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"model.layers.{number}.{name}.weight"].zero_()
    return state, {"removed": removed}
