"""Bin packing: which items go together, so that few bins of one capacity hold all of them.

Items are sizes; bins are lists of places in the list of sizes. Ties are broken by place, so equal input gives equal bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Bins = list[list[int]]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Largest first, each into the first bin with room (at most 11/9 of the optimum and 6/9 of a bin more; Dósa 2007)."""
    bins: Bins = []
    room: list[int] = []
    for item in _decreasing(sizes, range(len(sizes)), capacity):
        place = next((i for i, free in enumerate(room) if free >= sizes[item]), None)
        if place is None:
            bins.append([item])
            room.append(capacity - sizes[item])
        else:
            bins[place].append(item)
            room[place] -= sizes[item]
    return bins


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Items above half of a bin get one each and are topped up by class of size before the rest is packed first-fit decreasing.

    At most 71/60 of the optimum and one bin more (Johnson and Garey, "A 71/60 theorem for bin packing", 1985).
    """
    order = _decreasing(sizes, range(len(sizes)), capacity)
    large = [i for i in order if 2 * sizes[i] > capacity]
    medium = [i for i in order if 2 * sizes[i] <= capacity < 3 * sizes[i]]
    small = [i for i in order if 3 * sizes[i] <= capacity < 6 * sizes[i]]
    tiny = [i for i in order if 6 * sizes[i] <= capacity]
    bins = [[i] for i in large]

    def room(place: int) -> int:
        return capacity - sum(sizes[i] for i in bins[place])

    def largest_that_fits(items: list[int], place: int) -> int | None:
        return next((i for i in items if sizes[i] <= room(place)), None)

    for place in range(len(large)):
        if (item := largest_that_fits(medium, place)) is not None:
            medium.remove(item)
            bins[place].append(item)
    for place in reversed([p for p in range(len(large)) if len(bins[p]) == 1]):
        if len(small) >= 2 and sizes[small[-1]] + sizes[small[-2]] <= room(place):
            bins[place].append(small.pop())
            item = next(i for i in small if sizes[i] <= room(place))
            small.remove(item)
            bins[place].append(item)
    for place in range(len(large)):
        rest = [*medium, *small, *tiny]  # still in decreasing order
        while (item := largest_that_fits(rest, place)) is not None:
            rest.remove(item)
            bins[place].append(item)
        medium, small, tiny = ([i for i in items if i in set(rest)] for items in (medium, small, tiny))
    left = [*medium, *small, *tiny]
    return bins + [[left[i] for i in packed] for packed in first_fit_decreasing([sizes[i] for i in left], capacity)]


ALGORITHMS: Mapping[str, Callable[[Sequence[int], int], Bins]] = {
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


def _decreasing(sizes: Sequence[int], items: Sequence[int], capacity: int) -> list[int]:
    order = sorted(items, key=lambda i: (-sizes[i], i))
    if order and sizes[order[0]] > capacity:
        raise ValueError(f"an item of {sizes[order[0]]} does not fit into a bin of {capacity}")
    return order
