"""The implementations of a rotation by name: those of rope_cpu, and peers of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from ..measurement.timing import Call
from ..workload import Workload
from . import frameworks, numpy_forms, onnx_graphs, ours

# Prepares a call, or raises UnavailableError.
Implementation = Callable[[Workload], Call]

OURS: dict[str, Implementation] = {
    "plan": ours.plan,
    "plan, new arrays": ours.plan_new_arrays,
    "call": ours.single_call,
}

# The NumPy implementations have one pairing each.
NUMPY_HALF_SPLIT = "NumPy rotate_half"
NUMPY_INTERLEAVED = "NumPy complex"
TORCH_COMPILED = "torch.compile"

# Packages that peers need, named as for pip → the peers by name.
PEERS_BY_PACKAGES: dict[tuple[str, ...], dict[str, Implementation]] = {
    ("numpy",): {
        NUMPY_HALF_SPLIT: numpy_forms.rotate_half,
        NUMPY_INTERLEAVED: numpy_forms.complex_product,
    },
    frameworks.TORCH_MODULES: {
        "torch eager": frameworks.torch_eager,
        TORCH_COMPILED: frameworks.torch_compiled,
    },
    frameworks.JAX_MODULES: {"JAX jit": frameworks.jax_jit},
    onnx_graphs.MODULES: onnx_graphs.implementations(),
}
PEERS = {name: peer for peers in PEERS_BY_PACKAGES.values() for name, peer in peers.items()}

# Seconds that the first calls of compilers take.
_FIRST_CALLS = {TORCH_COMPILED: 4.0}


def first_calls(names: Iterable[str]) -> float:
    """Return the seconds that the first calls of implementations take."""
    return sum(_FIRST_CALLS.get(name, 0.0) for name in names)


def installed(names: Iterable[str]) -> list[str]:
    """Return those of the named implementations whose packages are installed."""
    missing = {
        name
        for packages, peers in PEERS_BY_PACKAGES.items()
        if any(find_spec(package) is None for package in packages)
        for name in peers
    }
    return [name for name in names if name not in missing]


def peer_names(interleaved: bool) -> list[str]:
    """Return the names of the peers that have a pairing."""
    other_pairing = NUMPY_HALF_SPLIT if interleaved else NUMPY_INTERLEAVED
    return [name for name in PEERS if name != other_pairing]
