"""Argument names of other libraries, refused with the name that the argument has here.

A function that refuses them takes unexpected keyword arguments as `**_others: Never`, so that
type checkers report them as before, and passes them to `refuse_rotation_names`. The empty dict
costs a call less than a wrapper function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

# Arguments of constructors.
_CONSTRUCTOR_NAMES = {
    **dict.fromkeys(("dim", "rope_dim", "head_size", "d_head"), "head_dim"),
    **dict.fromkeys(("base", "theta", "rope_base", "freq_base"), "rope_theta"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "scaling"),
    **dict.fromkeys(("max_seq_len", "max_position", "max_length"), "max_position_embeddings"),
    **dict.fromkeys(("rotary_emb_dim", "rotary_embedding_dim", "n_rot"), "rotary_dim"),
}

# Arguments of rotations.
_ROTATION_NAMES = {
    **dict.fromkeys(("positions", "position", "pos", "pos_ids", "input_pos"), "position_ids"),
    **dict.fromkeys(("start_pos", "start", "past_length", "seqlen_offset"), "offset"),
}

Function = TypeVar("Function", bound=Callable[..., Any])


def refuse_constructor_names(owner: str, arguments: Iterable[str]) -> None:
    """Raise TypeError if an argument has the name that another library uses for it."""
    _refuse(owner, arguments, _CONSTRUCTOR_NAMES)


def refuse_rotation_names(owner: str, arguments: Iterable[str]) -> None:
    """Raise TypeError for the unexpected keyword arguments of a rotation, at least one.

    The text gives the name here if another library has the argument under another name.
    """
    _refuse(owner, arguments, _ROTATION_NAMES)
    raise TypeError(f"{owner} got an unexpected keyword argument {next(iter(arguments))!r}")


def _refuse(owner: str, arguments: Iterable[str], names_here: Mapping[str, str]) -> None:
    for name in arguments:
        if name in names_here:
            raise TypeError(
                f"{owner} has no argument `{name}`; here it is called `{names_here[name]}`"
            )


def hide_other_names(function: Function) -> Function:
    """Leave `**_others` out of the signature that `inspect`, `help` and editors show."""
    signature = inspect.signature(function)
    shown = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function
