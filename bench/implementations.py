"""The table of implementations of a rotation, ours and others': what is timed, and what the tests compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from rope_cpu import rotation
from rope_cpu.bench import frameworks, graphs, numpy_forms
from rope_cpu.bench.binding import Binding, UnavailableError
from rope_cpu.bench.problem import Array, Problem
from rope_cpu.kernels import threads

Bind = Callable[[Problem], Binding]


@dataclass(frozen=True)
class Implementation:
    """One way to rotate q and k, used as its users use it.

    role: "ours", "floor" (part of ours, timed by itself) or "peer". arithmetic: see Problem.error.
    whole: it rotates whole head vectors only. one_axis: it looks cos and sin up by one position. needs: modules it
    imports. new: it returns new arrays.
    """

    name: str
    bind: Bind
    role: str = "peer"
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    pairings: tuple[bool, ...] = (False, True)
    arithmetic: str = "float32"
    whole: bool = True
    one_axis: bool = False
    needs: tuple[str, ...] = ()
    new: bool = False

    def missing(self, problem: Problem) -> str | None:
        """Return why it cannot be timed on this problem, or None."""
        rope = problem.rope
        for module in self.needs:
            if find_spec(module) is None:
                return f"{module} is not installed"
        if problem.dtype not in self.dtypes:
            return f"has no {problem.dtype}"
        if rope.interleaved not in self.pairings:
            return "is for the other pairing"
        if self.whole and (rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1):
            return "rotates whole head vectors only"
        if self.one_axis and rope.axes > 1:
            return "takes one position a token"
        return None

    def bound(self, problem: Problem) -> Binding:
        """Return the call, ready to be made; raise UnavailableError where it cannot be made."""
        reason = self.missing(problem)
        if reason:
            raise UnavailableError(reason)
        return self.bind(problem)


def _targets(problem: Problem, pairs: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    return pairs if problem.in_place else problem.outs()


def _plan(problem: Problem) -> Binding:
    pairs = problem.arrays()
    plan = problem.rope.plan(problem.ids, layout=problem.layout)
    sets = [(q, k, out) for (q, k), out in zip(pairs, _targets(problem, pairs), strict=True)]
    return Binding(plan, sets, pairs[0], problem.bshd)


def _new_arrays(problem: Problem) -> Binding:
    pairs = problem.arrays()
    plan = problem.rope.plan(problem.ids, layout=problem.layout)
    return Binding(plan, list(pairs), pairs[0], problem.bshd)


def _call(problem: Problem) -> Binding:
    pairs, rope, ids, layout = problem.arrays(), problem.rope, problem.ids, problem.layout
    rows = np.atleast_2d(ids)
    if rope.axes == 1 and layout != "thd" and np.array_equal(rows, rows[:, :1] + np.arange(rows.shape[1])):
        offset = int(rows[0, 0]) if len(rows) == 1 else rows[:, 0]

        def call(q: Array, k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            return rope(q, k, offset=offset, layout=layout, out=out)
    else:

        def call(q: Array, k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            return rope(q, k, ids, layout=layout, out=out)

    sets = [(q, k, out) for (q, k), out in zip(pairs, _targets(problem, pairs), strict=True)]
    return Binding(call, sets, pairs[0], problem.bshd)


def _bare_kernel(problem: Problem) -> Binding:
    """Bind the compiled kernel with what a plan gives it, q and k in the order and the elements that it knows."""
    pairs, rope = problem.arrays(), problem.rope
    plan, dtype = rope.plan(problem.ids, layout=problem.layout), pairs[0][0].dtype
    found, arranged = rotation.kernel_of(dtype, rope.interleaved), rotation.ARRANGED[problem.layout]
    if found is None:
        raise UnavailableError(f"this processor has no instructions for {dtype}")
    (kernel, bits), tables, targets = found, plan._cos_sin(rotation.REAL_OF[dtype]), _targets(problem, pairs)

    def seen(*arrays: Array) -> list[Array]:
        as_bits = [x if bits is None else x.view(bits) for x in arrays]
        return [x if arranged is None else arranged(x) for x in as_bits]

    more = (*tables, plan._pairing.sizes, 2, threads.usable())
    sets = [(*seen(*pair, *out), *more) for pair, out in zip(pairs, targets, strict=True)]
    return Binding(kernel, sets, pairs[0], problem.bshd, lambda _: targets[0])


_NOT_DOUBLE = ("float32", "float16", "bfloat16")

# Ours come first: the first row that a case names is what the others are compared with.
TABLE: tuple[Implementation, ...] = (
    Implementation("plan", _plan, role="ours", whole=False),
    Implementation("plan, new arrays", _new_arrays, role="ours", whole=False, new=True),
    Implementation("call", _call, role="ours", whole=False),
    Implementation("bare kernel", _bare_kernel, role="floor", whole=False),
    Implementation("NumPy rotate_half", numpy_forms.rotate_half, pairings=(False,)),
    Implementation("NumPy complex", numpy_forms.as_complex, pairings=(True,)),
    *(
        # In float64 transformers rotates interleaved pairs in float32.
        Implementation(name, bind, dtypes=_NOT_DOUBLE, arithmetic="own", needs=("torch", "transformers"))
        for name, bind in (("torch eager", frameworks.torch_eager), ("torch.compile", frameworks.torch_compiled))
    ),
    Implementation("JAX jit", frameworks.jax_jit, dtypes=_NOT_DOUBLE, needs=("jax",)),
    *(
        Implementation(
            f"{graphs.TITLES[form]} {way}",
            graphs.binder(form, way),
            dtypes=("float32", "float16"),
            arithmetic="own",
            one_axis=True,
            needs=("onnx", "onnxruntime"),
        )
        for form in graphs.TITLES
        for way in graphs.WAYS
    ),
)

BY_NAME = {implementation.name: implementation for implementation in TABLE}
PEERS = tuple(row.name for row in TABLE if row.role == "peer")
