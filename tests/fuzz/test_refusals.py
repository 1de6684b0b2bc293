"""Functions of plain arguments: results, or refusals.

Wrong arrays, outputs, ids and slots are rows of the tables in tests/rotation and tests/launch.
"""

from __future__ import annotations

import inspect

from fuzz.mutations import LARGEST_NUMBER
from hypothesis import strategies as st
from refusals import check_ours

import rope_cpu
from rope_cpu import positions


def argument_names(function):
    """Return the names of a function's arguments after the positional ones."""
    called = function.__init__ if isinstance(function, type) else function
    skipped = FUNCTIONS[function] + isinstance(function, type)
    return list(inspect.signature(called).parameters)[skipped:]


ODD = ("", "half", "interleaved", "float32", b"", float("nan"), float("inf"), -(10**400))
# Functions of plain arguments, by how many of these are given by position.
BY_POSITION = {
    0: (rope_cpu.Batch,),
    1: (
        *(positions.packed, positions.left_padded, positions.grid, positions.patches),
        *(positions.with_unrotated, positions.mrope, positions.token_types),
        *(rope_cpu.set_num_threads, rope_cpu.RMSNorm, rope_cpu.RotaryEmbedding),
        *(rope_cpu.RotaryEmbedding.from_inv_freq, rope_cpu.RotaryEmbedding.from_generators),
    ),
    2: (
        *(rope_cpu.sinusoidal, rope_cpu.convert_weight, rope_cpu.KVCache),
        *(rope_cpu.RotaryEmbedding.axial, rope_cpu.RotaryEmbedding.mrope),
    ),
    4: (rope_cpu.KVCache.zeros,),
}
FUNCTIONS = {function: count for count, each in BY_POSITION.items() for function in each}


def test_refused_arguments_of_functions(search):
    """Functions of plain arguments return, or raise TypeError or ValueError."""
    number = st.integers(-1, 9)
    odd = st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-3, 40)
    odd |= st.sampled_from((*ODD, LARGEST_NUMBER)) | st.lists(number, max_size=4)
    odd |= st.lists(st.lists(number, max_size=3), max_size=3)
    names = {name for function in FUNCTIONS for name in argument_names(function)}
    sensible = {"to": "half", "image_token_id": 7, "video_token_id": 8, "rope_theta": 1e4}
    sensible |= {"seq_lens": [3, 9], "query_lens": [3, 1], "page_size": 8}
    sensible |= {"page_table": [[4, -1], [0, 2]], "dtype": "float32"}

    def check_function(function, arguments, options):
        allowed = argument_names(function)
        given = {name: value for name, value in (sensible | options).items() if name in allowed}
        threads = rope_cpu.get_num_threads()
        try:
            function(*arguments[: FUNCTIONS[function]], **given)
        except (TypeError, ValueError) as error:
            check_ours(error)
        finally:
            rope_cpu.set_num_threads(threads)

    search(
        check_function,
        150,
        function=st.sampled_from(tuple(FUNCTIONS)),
        arguments=st.lists(odd, min_size=4, max_size=4),
        options=st.dictionaries(st.sampled_from(sorted(names)), odd, max_size=3),
    )
