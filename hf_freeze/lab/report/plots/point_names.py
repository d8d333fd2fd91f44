"""Names of points in a plot, written where they cover no other point."""

from typing import Any

# Where the name of a point may be written, in points from it, best first.
_SPOTS = [
    (d * x, d * y)
    for d in (8, 14, 22, 30, 40, 52, 66)
    for x, y in ((1, 0.5), (-1, 0.5), (1, -0.9), (-1, -0.9), (0, 1), (0, -1.2), (0.6, 1.4), (-0.6, 1.4))
]

_NEAR = 18  # points: from a name so near, no line to its point is needed


def name_points(axes: Any, points: list[tuple[float, float, str]]) -> None:
    """Write each name beside its point, where it covers no other point and no other name, if there is such a place; with a line
    to the point where that is not near."""
    marks = [tuple(axes.transData.transform(point[:2])) for point in points]
    taken: list[Any] = []
    for (x, y, name), mark in zip(points, marks, strict=True):
        text = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", va="center")

        def box(spot: tuple[float, float], text: Any = text) -> Any:
            text.xyann = spot
            text.set_ha("left" if spot[0] > 0 else "right" if spot[0] < 0 else "center")
            return text.get_window_extent().padded(1)

        def covers(spot: tuple[float, float], box: Any = box, mark: Any = mark) -> int:
            place = box(spot)
            near = place.padded(5)  # a mark is as wide
            outside = (
                place.x0 < axes.bbox.x0 or place.x1 > axes.bbox.x1 or place.y0 < axes.bbox.y0 or place.y1 > axes.bbox.y1
            )
            return (
                sum(near.contains(*other) for other in marks if other != mark)
                + 2 * sum(map(place.overlaps, taken))
                + 3 * outside
            )

        # The first that covers nothing, or the best: most names need few looks.
        spot = next((spot for spot in _SPOTS if not covers(spot)), None) or min(_SPOTS, key=covers)
        taken.append(box(spot))
        if max(map(abs, spot)) > _NEAR:
            line = {
                "arrowstyle": "-",
                "linewidth": 0.4,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (float(spot[0] < 0), float(spot[1] < 0)),
            }
            axes.annotate(
                name, (x, y), xytext=spot, textcoords="offset points", ha=text.get_ha(), va="center", arrowprops=line
            )
            text.remove()
