"""Names of points in a plot, written where they cover no other point."""

from collections.abc import Sequence
from typing import Any

# Where the name of a point may be written, in points from it, best first.
_SPOTS = [
    (d * x, d * y)
    for d in (8, 14, 22, 30)
    for x, y in ((1, 0.5), (-1, 0.5), (1, -0.9), (-1, -0.9), (0, 1), (0, -1.2), (0.6, 1.4), (-0.6, 1.4))
]


def name_points(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each (x, y, name, id in the drawing) beside it, where it covers no other point and no other name. Where
    there is no such place, the name is left to the legend."""
    axes.figure.draw_without_rendering()  # or it is not known where the points lie
    marks = [tuple(axes.transData.transform(point[:2])) for point in points]
    taken: list[Any] = []
    for (x, y, name, gid), mark in zip(points, marks, strict=True):
        text = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", va="center", gid=gid)
        for spot in _SPOTS:
            text.xyann = spot
            text.set_ha("left" if spot[0] > 0 else "right" if spot[0] < 0 else "center")
            place, inside = text.get_window_extent().padded(1), axes.bbox
            within = inside.x0 <= place.x0 and place.x1 <= inside.x1 and inside.y0 <= place.y0 and place.y1 <= inside.y1
            near = place.padded(5)  # a mark is as wide
            if (
                within
                and not any(near.contains(*other) for other in marks if other != mark)
                and not place.count_overlaps(taken)
            ):
                taken.append(place)
                break
        else:
            text.remove()
