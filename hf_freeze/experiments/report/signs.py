"""The colours and markers that tell rows apart in plots and in their legends."""

COLOURS = (
    "#1f77b4",
    "#e8710a",
    "#2a9d4a",
    "#d62728",
    "#9467bd",
    "#a9745b",
    "#e377c2",
    "#7f7f7f",
    "#a8a410",
    "#17a5b8",
)

MARKERS = dict(zip("os^Dv<>Ph*X", "●■▲◆▼◀▶✚⬢★✖", strict=True))  # matplotlib's, and the signs like them
SIGNS = len(COLOURS) * len(MARKERS)  # as many rows can be told apart


def style_of(index: int) -> tuple[str, str]:
    """Colour and marker of a row."""
    return COLOURS[index % len(COLOURS)], list(MARKERS)[index % len(MARKERS)]
