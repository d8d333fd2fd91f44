"""Boolean masks stored as bits, eight in a byte."""

import torch


def packed_size(entries: int) -> int:
    """The number of bytes that hold a mask of so many entries."""
    return -(-entries // 8)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """bool (any shape) -> uint8 (bytes,); the first entry is the lowest bit of the first byte."""
    flat = mask.flatten()
    padded = flat.new_zeros(8 * packed_size(flat.numel()))
    padded[: flat.numel()] = flat
    return (padded.view(-1, 8) * _bits(flat)).sum(1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, entries: int) -> torch.Tensor:
    """uint8 (bytes,) -> bool (entries,)"""
    return (packed[:, None] & _bits(packed)).flatten()[:entries].bool()


def _bits(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=like.device)
