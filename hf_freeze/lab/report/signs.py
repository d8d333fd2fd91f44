"""The colours and markers that tell rows apart in plots and in their legends."""

# Okabe and Ito's, which people of any colour vision tell apart, without black and yellow, which a dark or a white page hides.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7f7f7f")

MARKERS = dict(zip("os^Dv<>Ph*X", "●■▲◆▼◀▶✚⬢★✖", strict=True))  # matplotlib's, and the signs like them
OTHERS = "#9a9a9a", "."  # of rows that no sign tells apart


def style_of(index: int | None) -> tuple[str, str]:
    """Colour and marker of a row, which differ for the first 77; None: of one among many."""
    return OTHERS if index is None else (COLOURS[index % len(COLOURS)], list(MARKERS)[index % len(MARKERS)])
