"""What the experts of a mixture see, by brute force: each token alone, in the products of transformers' own eager forward."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass
class SeenByExpert:
    """Of one expert, for each of its N tokens: what its last matrix reads, what it gives, and the factor of that in the output;
    and which of all tokens they are."""

    x: Any = field(default_factory=list)  # (N, W)
    y: Any = field(default_factory=list)  # (N, H)
    factors: Any = field(default_factory=list)  # (N,)
    tokens: Any = field(default_factory=list)  # (N,)


class _Products(TorchFunctionMode):
    """Keeps (number of the expert, inputs, outputs) of the products with the matrices of one parameter."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.matrices, self.seen = matrices.detach(), []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.linear and args[1].shape == self.matrices.shape[1:]:
            same = [number for number, matrix in enumerate(self.matrices) if torch.equal(matrix, args[1])]
            self.seen += [(number, args[0], output) for number in same]
        return output


@torch.no_grad()
def seen_by_experts(model: Any, batches: list[dict[str, Tensor]], module: str) -> list[SeenByExpert]:
    """Of each expert of `module` (below the base model), all tokens of the batches, without regard to masks."""
    experts: Any = model.base_model.get_submodule(module)
    forward = getattr(type(experts).forward, "__wrapped__", type(experts).forward)  # the eager one
    seen = [SeenByExpert() for _ in experts.down_proj]
    count = 0

    def look(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        nonlocal count
        for states, index, factors in zip(*args, strict=True):
            with _Products(experts.down_proj) as products:
                forward(experts, states[None], index[None], factors[None])
            for number, x, y in products.seen:
                (factor,) = factors[index == number]
                one = seen[number]
                for values, value in (
                    (one.x, x[0]),
                    (one.y, y[0]),
                    (one.factors, factor),
                    (one.tokens, torch.tensor(count)),
                ):
                    values.append(value)
            count += 1

    handle = experts.register_forward_pre_hook(look)
    for batch in batches:
        model(**batch)
    handle.remove()
    return [
        SeenByExpert(
            *(torch.stack(values).double() if values else torch.empty(0) for values in (e.x, e.y, e.factors)),
            torch.tensor([int(token) for token in e.tokens]),
        )
        for e in seen
    ]
