"""The types of arguments name the values that the tables at run time have."""

from typing import get_args

import pytest

from rope_cpu import array_types
from rope_cpu.export import nodes, options, targets


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (array_types.Layout, array_types.LAYOUT_AXES),
        (array_types.DtypeName, array_types.DTYPES),
        (array_types.CacheDtypeName, array_types.CACHE_FORMATS),
        (options.TargetName, targets.TARGETS),
        (options.Mask, ["none", *nodes.MASK_SHAPES]),
    ],
)
def test_types_name_the_values_of_their_tables(names, table):
    assert {*get_args(names)} == {*table}
