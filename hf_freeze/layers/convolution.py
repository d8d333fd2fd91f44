"""Lightweight and dynamic convolutions over time: kernels are softmax-normalised, and either parameters or computed from each
token (Wu et al., 2019, "Pay Less Attention with Lightweight and Dynamic Convolutions", https://arxiv.org/abs/1901.10430).

Shapes: B batch, T tokens, C channels, h heads, K taps of a kernel. The C/h channels of a head share its kernel.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.derived import SelfInitialized, is_traced

KINDS = ("dynamic", "lightweight")
_TILE = 32  # tokens whose kernels are laid out as one band matrix


def convolve(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """(B, T + K - 1, C), (B, T, h, K) -> (B, T, C): token t gets the sum over k of kernels[t, k] · x[t + k].

    It multiplies by band matrices, one for each head and tile of tokens. This is faster than K multiplications one after
    another, which read and write all channels K times.
    """
    tokens, heads, taps = kernels.shape[1:]
    channels = x.unflatten(-1, (heads, -1))
    if is_traced():  # for any number of tokens; its gradient would be slow
        windows = channels.unfold(1, taps, 1)  # (B, T, h, C/h, K)
        return (windows @ kernels[..., None]).flatten(2)
    if tokens == 1:
        return (kernels[:, 0, :, None] @ channels.transpose(1, 2)).flatten(1).unsqueeze(1)
    tile = max(min(tokens, _TILE), taps - 1)
    missing = -tokens % tile
    kernels = functional.pad(kernels, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, tile)).permute(0, 3, 1, 2, 4)
    # Rows are stored one entry longer than the matrix is wide, then read at the matrix width: each row shifts right by one.
    band = functional.pad(kernels, (0, tile)).flatten(-2)[..., : tile * (tile + taps - 1)]
    band = band.unflatten(-1, (tile, tile + taps - 1))  # (B, h, tiles, tile, tile + K - 1)
    tiles = functional.pad(channels, (0, 0, 0, 0, 0, missing + tile - (taps - 1))).unflatten(1, (-1, tile))
    # A window is a tile and the start of the next tile.
    windows = torch.cat([tiles[:, :-1], tiles[:, 1:, : taps - 1]], dim=2)
    convolved = band @ windows.permute(0, 3, 1, 2, 4)
    return convolved.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)[:, :tokens]


class KernelConvolution(SelfInitialized):
    """Input projection, convolution, output projection.

    The input projection is C -> 2C followed by a gated linear unit ("dynamic") or C -> C ("lightweight"). The convolution has K
    taps centred on the token or, if `causal`, ending at it. A kernel is a softmax over taps: of a linear of the token
    ("dynamic") or of parameters (h, K) ("lightweight"). `dropout` drops taps in training (DropConnect).
    """

    def __init__(
        self, channels: int, heads: int, taps: int, *, kind: str, causal: bool, dropout: float, **new: Any
    ) -> None:
        super().__init__()
        self.heads, self.taps, self.causal, self.dropout = heads, taps, causal, dropout
        self.dynamic = kind == "dynamic"
        self.expand = nn.Linear(channels, channels * (1 + self.dynamic), **new)
        if self.dynamic:
            self.kernel: Any = nn.Linear(channels, heads * taps, bias=False, **new)
        else:
            self.kernel = nn.Parameter(torch.empty(heads, taps, **new))
        self.project = nn.Linear(channels, channels, **new)
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Draw the kernels of "lightweight" after Glorot. The native initialisation draws the linears."""
        if not self.dynamic:
            bound = (6 / (self.heads + self.taps)) ** 0.5
            initialization.uniform_(self.kernel, -bound, bound)

    def inputs(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(B, T, C) -> (B, T, C): the inputs of the convolution, zero where `mask`, bool (B, T), is False (padding)."""
        expanded = self.expand(x)
        if self.dynamic:
            expanded = functional.glu(expanded)
        return expanded if mask is None else expanded * mask[..., None].to(expanded.dtype)

    def forward(self, inputs: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        """`inputs` (B, T, C) from `inputs()`, and `past` (B, K - 1, C), those of the tokens before them, or None -> (B, T, C)."""
        kernels = self.kernel(inputs).unflatten(-1, (self.heads, self.taps)) if self.dynamic else self.kernel
        kernels = functional.dropout(kernels.softmax(-1), self.dropout, self.training)
        if past is not None:
            padded = torch.cat([past.to(inputs.dtype), inputs], dim=1)
        else:
            before = self.taps - 1 if self.causal else self.taps // 2
            padded = functional.pad(inputs, (0, 0, before, self.taps - 1 - before))
        if not self.dynamic:
            kernels = kernels.to(inputs.dtype).expand(*inputs.shape[:2], -1, -1)
        return self.project(convolve(padded, kernels.to(padded.dtype)))

    def extra_repr(self) -> str:
        return f"taps={self.taps}, heads={self.heads}, kind={KINDS[not self.dynamic]!r}, causal={self.causal}"
