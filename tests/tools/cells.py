"""Time every cell of the rotation kernels against hand-written C, and of plans against every peer, in one run.

    python tests/tools/cells.py FOLDER > cells.md

FOLDER holds a module `rope_limit`, whose `rotation(x, cos, sin, out, interleaved, nt, threads)` returns a call that
rotates contiguous (tokens, heads, head_dim) in C. Printed are tables in Markdown; a ratio says how many times as long
the other takes as ours (C: ours as C, the lower quartile of the rounds). Everything of a row is timed in turn, round by
round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu._kernels.rotation import ALONE
from rope_cpu._machine import last_level_cache
from rope_cpu.bench.contender import Case, Contender, rotating
from rope_cpu.bench.implementations import PEERS
from rope_cpu.bench.limit import memory
from rope_cpu.bench.measure import measure
from rope_cpu.bench.problem import DTYPES, Problem
from rope_cpu.bench.statistics import quantile, ratios
from rope_cpu.bench.timing import Effort, Timed, interleave

TOKENS, HEADS, KV_HEADS = (1, 16, 512, 4096), 32, 8
DIMS = (128, 64, 96, 256)  # the C takes multiples of 32
LAYOUTS = ("bshd", "bhsd")
PLACES = {True: "in place", False: "out"}
BAR, MOST = 1.15, rope_cpu.get_num_threads()
Cell = tuple[int, str, bool, int]  # tokens, dtype, interleaved, threads


def cells() -> Iterator[Cell]:
    """Yield what has a row for each place."""
    for tokens, dtype, interleaved in product(TOKENS, DTYPES, (False, True)):
        for threads in {MOST} if tokens == 1 else sorted({1, MOST}):  # of a token's, peers may use all
            yield tokens, dtype, interleaved, threads


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return normal numbers in memory that starts on a cache line."""
    x = memory(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
    x[...] = np.random.default_rng(0).standard_normal(shape, np.float32)
    return x


def against_c(rotation: Callable[..., Any], dim: int, cell: Cell) -> dict[tuple[bool, str], float]:
    """Return, by place and layout, how many times as long the compiled kernel takes as C.

    Both rotate q alone, and the same memory: where large arrays lie decides up to a fifth of the time.
    """
    tokens, name, interleaved, threads = cell
    dtype, rope = DTYPES[name], RotaryEmbedding(dim, interleaved=interleaved)
    cos, sin = rope.cos_sin(np.arange(tokens), np.float32)
    timed: dict[tuple[bool, str], Timed] = {}
    x, other = aligned((tokens, HEADS, dim), dtype), aligned((tokens, HEADS, dim), dtype)
    for in_place in PLACES:
        out = x if in_place else other
        given = [a.view(np.uint16) if name == "bfloat16" else a for a in (x, out)]
        past_caches = not in_place and x.nbytes > last_level_cache()
        call = rotation(given[0], cos, sin, given[1], interleaved, past_caches, threads if tokens > 1 else 1)
        timed[in_place, "C"] = Timed(call, [()])
        for layout in LAYOUTS:
            shape = (1, tokens, HEADS, dim) if layout == "bshd" else (1, HEADS, tokens, dim)
            y, to = x.reshape(shape), out.reshape(shape)
            plan = rope.plan(np.arange(tokens), layout=layout)
            plan.rotate(y, to)  # prepares the dtype
            prepared = plan._ready
            enter = partial(rope_cpu.set_num_threads, threads)
            timed[in_place, layout] = Timed(prepared[0], [(y, y, to, prepared, ALONE)], enter=enter)
    taken = dict(zip(timed, interleave(list(timed.values()), Effort(budget=0.8)), strict=True))
    return {
        (place, layout): quantile(ratios(taken[place, layout], taken[place, "C"]), 0.25)
        for place, layout in product(PLACES, LAYOUTS)
    }


def against_peers(cell: Cell, peers: Sequence[str], storage: str) -> dict[bool, tuple[float, dict[str, float]]]:
    """Return, by place, the seconds of a plan, and how many times as long peers take.

    storage: "packed", q and k are views of one buffer, for peers as well; "contiguous", they are not.
    """
    tokens, name, interleaved, threads = cell
    rope_cpu.set_num_threads(threads)
    rope = RotaryEmbedding(128, interleaved=interleaved)
    problem = Problem(rope, np.arange(tokens), 1, tokens, HEADS, KV_HEADS, name, storage=storage)

    def contenders() -> list[Contender]:
        ours = [rotating("plan", problem.but(in_place=place), PLACES[place]) for place in PLACES]
        return [row for row in (*ours, *(rotating(peer, problem) for peer in peers)) if row is not None]

    result = measure(Case("", "", contenders, effort=Effort(budget=2.0)))
    for row in result.rows:
        if row.status in ("wrong", "failed"):
            print(f"{cell}: {row.name}: {row.reason}", file=sys.stderr)
    rows = {row.name: row for row in result.timed()}
    found = {}
    for place, title in PLACES.items():
        base = rows[title]
        compared = {peer: quantile(ratios(rows[peer].samples, base.samples), 0.5) for peer in peers if peer in rows}
        found[place] = base.seconds.median, compared
    return found


def shown(cell: Cell, in_place: bool) -> tuple[str, ...]:
    tokens, dtype, interleaved, threads = cell
    return str(tokens), dtype, "interleaved" if interleaved else "half", PLACES[in_place], str(threads)


def line(*texts: object) -> None:
    print("|", " | ".join(map(str, texts)), "|", flush=True)


def table_of_cells(rotation: Callable[..., Any]) -> None:
    """Print a row for each cell of heads of 128, then what the columns come to."""
    titles = ["C, " + layout for layout in LAYOUTS] + list(PEERS)
    line("tokens", "dtype", "pairing", "place", "threads", "µs", *titles)
    line(*["---"] * (6 + len(titles)))
    columns: dict[str, list[float]] = {title: [] for title in titles}
    for cell in cells():
        rope_cpu.set_num_threads(MOST)
        c = against_c(rotation, 128, cell) if cell[1] != "float64" else {}
        peers = against_peers(cell, PEERS, "packed")
        for place in PLACES:
            seconds, row = peers[place]
            row |= {"C, " + layout: c[place, layout] for layout in LAYOUTS if c}
            for name, value in row.items():
                columns[name].append(value)
            values = [f"{row[name]:.2f}" if name in row else "" for name in titles]
            line(*shown(cell, place), f"{1e6 * seconds:.2f}", *values)
    rope_cpu.set_num_threads(MOST)
    for what, of in (("geometric mean", geometric_mean), ("least", min), ("most", max)):
        line(what, "", "", "", "", "", *(f"{of(columns[name]):.2f}" if columns[name] else "" for name in titles))


def table_of_widths(rotation: Callable[..., Any]) -> None:
    """Print, for each width of heads and layout, what cells come to against C.

    Those most above the bar are measured twice more: of hundreds, some are by chance.
    """
    print("\nThe kernels against C, by width of heads:\n")
    line("head_dim", "layout", "cells", "geometric mean", "most", f"above {BAR}", "those most above")
    line(*["---"] * 7)
    for dim in DIMS:
        found = {cell: against_c(rotation, dim, cell) for cell in cells() if cell[1] != "float64"}
        for layout in LAYOUTS:
            values = {(cell, place): c[place, layout] for cell, c in found.items() for place in PLACES}
            above = sorted((key for key, value in values.items() if value > BAR), key=values.__getitem__)[::-1]
            worst = []
            for cell, place in above[:3]:
                again = ", ".join(f"{against_c(rotation, dim, cell)[place, layout]:.2f}" for _ in range(2))
                worst.append(f"{' '.join(shown(cell, place))}: {values[cell, place]:.2f} (again {again})")
            mean, most = geometric_mean(list(values.values())), max(values.values())
            line(dim, layout, len(values), f"{mean:.2f}", f"{most:.2f}", len(above), "; ".join(worst))


def table_of_contiguous_arrays() -> None:
    """Print, for each number of tokens and place, geometric mean and least of onnxruntime, all on contiguous arrays."""
    peers = [peer for peer in PEERS if peer.startswith("ORT") and "primitive" not in peer]
    print("\nonnxruntime and a plan, both on contiguous q and k, geometric mean and least:\n")
    line("tokens", "place", "cells", *peers)
    line(*["---"] * (3 + len(peers)))
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for cell in cells():
        if cell[1] in ("float32", "float16"):
            for place, (_, row) in against_peers(cell, peers, "contiguous").items():
                for key in ((str(cell[0]), PLACES[place]), ("all", "")):
                    found.setdefault(key, []).append(row)
    rope_cpu.set_num_threads(MOST)
    for key in sorted(found, key=lambda key: (key == ("all", ""), int(key[0]) if key[1] else 0)):
        columns = [[row[peer] for row in found[key]] for peer in peers]
        line(*key, len(found[key]), *(f"{geometric_mean(column):.2f}, {min(column):.2f}" for column in columns))


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from rope_limit import rotation  # type: ignore[import-not-found]

    table_of_cells(rotation)
    table_of_widths(rotation)
    table_of_contiguous_arrays()
