"""Estimates the time of a sequence of matrix products, to choose the fastest of several that give the same result.

The unit is one multiply-add of a large fp32 matrix product on the same kind of device; starting an operation, reading a weight
and writing a result are expressed in it too. The CPU costs were measured on one core of an AMD EPYC with AVX-512 (47 billion
multiply-adds per second, 3 µs to start an operation); benchmarks/linear_methods.py measures the resulting choices. The CUDA
costs are computed from the data sheet of an H100 (about 30 trillion multiply-adds per second, 3 TB/s, 5 µs), not measured.
Estimates depend only on shapes and the kind of device, so that two processes compute the same bits.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    start: float  # of an operation
    read: float  # of an element of a weight
    write: float  # of an element of a result
    chunk: int | None  # rows multiplied at a time, so that intermediate results stay in the processor cache
    matrix: float  # of each product in a batch of products
    lanes: int  # vector width: the vectorised dimension of a result is rounded up to a multiple of it
    narrow: float  # slowdown factor if the vectorised dimension is below `lanes`


COSTS = {"cpu": Costs(150_000, 2, 10, 64, 4_000, 16, 2.7), "cuda": Costs(1.5e8, 40, 80, None, 0, 1, 1)}


def costs_of(device_type: str) -> Costs:
    """The costs of a kind of device; all accelerators have those of CUDA."""
    return COSTS["cpu" if device_type in ("cpu", "meta") else "cuda"]


def product(costs: Costs, batch: int, rows: int, inner: int, columns: int) -> float:
    """The cost of `batch` products (rows, inner) x (inner, columns); one factor is a weight shared by the whole batch.

    A batch of single columns is computed as one product, in which `rows` is the vectorised dimension.
    """
    vectorised, others = (rows, columns) if columns == 1 else (columns, rows)
    computed = -(-vectorised // costs.lanes) * costs.lanes * (costs.narrow if vectorised < costs.lanes else 1)
    return (
        costs.start
        + (costs.matrix * batch if batch > 1 and columns > 1 else 0)
        + costs.read * inner * min(rows, columns)
        + batch * (computed * inner * others + costs.write * rows * columns)
    )
