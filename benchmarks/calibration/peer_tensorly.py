"""tensorly-torch: each FFN matrix as a tensor train ("blocktt"), by its decomposition of the weights; it has no calibration."""

from typing import Any

import blocks

PACKAGES = ["tensorly-torch", "tensorly"]
REQUIREMENTS = ["torch==2.13.0", "tensorly==0.9.0", "tensorly-torch==0.5.0", "transformers==5.23.0"]
METHODS = {"tensorly-torch": {"train"}}
BLIND = {"tensorly-torch"}
CANNOT: dict[tuple[str, ...], str] = {}


def prepare() -> None:
    import tltorch  # noqa: F401


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import tltorch

    state, share, sizes = dict(model.state_dict()), job["cut"]["train"], []
    for block in blocks.ffns(model):
        for name in block.linears:
            linear: Any = model.get_submodule(name)
            rank: Any = share
            layer = tltorch.FactorizedLinear.from_linear(
                linear, rank=rank, n_tensorized_modes=3, factorization="blocktt"
            )
            sizes.append(sum(factor.numel() for factor in layer.weight.factors) / linear.weight.numel())
            state[f"{name}.weight"] = layer.weight.to_matrix().detach()
    return state, {"share of the weights": max(sizes)}
