"""Stop ids by row: any number of different sets, each row ended by its own."""

import numpy as np

from pentad.infer.sequence import StopSets


def test_each_row_is_ended_by_its_own_ids():
    stops = StopSets(4)
    stops.put(0, (7, 9))
    stops.put(1, ())
    stops.put(2, (1000, 7))
    stops.put(3, (7, 9))
    rows = np.array([0, 1, 2, 3])
    for id_, expected in ((7, [1, 0, 1, 1]), (9, [1, 0, 0, 1]), (1000, [0, 0, 1, 0]), (8, [0] * 4)):
        assert stops.stops(rows, np.full(4, id_)).tolist() == [bool(x) for x in expected]
    assert not stops.stops(rows, np.full(4, 10**6)).any()


def test_sets_that_nobody_uses_are_replaced():
    stops = StopSets(2)
    for i in range(50):
        stops.put(0, (i,))
        assert stops.stops(np.array([0]), np.array([i])).all()
        assert not stops.stops(np.array([0]), np.array([i + 1])).any()
        stops.drop([0])
    assert len(stops.is_stop) <= 3
