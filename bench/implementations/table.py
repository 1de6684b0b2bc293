"""The implementations of a rotation by name: those of rope_cpu, and peers of other libraries."""

from __future__ import annotations

from collections.abc import Callable

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

PEERS: dict[str, Implementation] = {
    NUMPY_HALF_SPLIT: numpy_forms.rotate_half,
    NUMPY_INTERLEAVED: numpy_forms.complex_product,
    "torch eager": frameworks.torch_eager,
    "torch.compile": frameworks.torch_compiled,
    "JAX jit": frameworks.jax_jit,
}
for target, title in onnx_graphs.TITLES.items():
    PEERS[f"{title} run"] = onnx_graphs.run_call(target)
    PEERS[f"{title} IO-bound"] = onnx_graphs.bound_call(target)


def peer_names(interleaved: bool) -> list[str]:
    """Return the names of the peers that have a pairing."""
    other_pairing = NUMPY_HALF_SPLIT if interleaved else NUMPY_INTERLEAVED
    return [name for name in PEERS if name != other_pairing]
