"""The colours and markers that tell rows apart in plots and in their legends."""

# Okabe and Ito's, which people of any colour vision tell apart, without black and yellow, which a dark or a white page hides.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7f7f7f")

MARKERS = dict(zip("os^Dv<>Ph*X", "●■▲◆▼◀▶✚⬢★✖", strict=True))  # matplotlib's, and the signs like them
SIGNS = len(COLOURS) * len(MARKERS)  # as many rows can be told apart: the two lengths have no common divisor


def style_of(index: int) -> tuple[str, str]:
    """Colour and marker of a row."""
    return COLOURS[index % len(COLOURS)], list(MARKERS)[index % len(MARKERS)]
