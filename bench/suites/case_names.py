"""Names of cases, family/dtype/pairing/out/cold, and their meaning in words.

Saved runs hold names, so pictures of runs of any age are labelled with these words.
"""

from __future__ import annotations

from typing import NamedTuple

# Family → description, without the heads of the model.
FAMILIES = {
    "decode-1": "one token",
    "decode-8": "one token of each of 8 sequences",
    "decode-64": "one token of each of 64 sequences",
    "prefill-128": "128 tokens",
    "prefill-512": "512 tokens",
    "prefill-4096": "4096 tokens",
    "prefill-32768": "32768 tokens",
    "partial": "512 tokens, half of each head rotated",
    "axial-2d": "an image of 64 by 64 patches",
    "mrope": "512 tokens at three coordinates each",
    "layouts": "512 tokens, packed or contiguous, ratios per byte",
    "serving-1": "one token appended",
    "serving-8": "8 tokens appended",
    "serving-32": "32 tokens appended",
    "serving-128": "128 tokens appended",
    "serving-512": "512 tokens appended",
    "serving-shift": "8192 paged keys, shifted",
    "attention-1": "one token attends to 4000",
    "attention-8": "one token of each of 8 sequences attends to 4000",
    "attention-chunk": "512 tokens attend to 3488 and each other",
    "angles-4096": "cos and sin of 4096 positions",
    "angles-131072": "cos and sin of 131072 positions",
    "angles-axes": "cos and sin of 131072 positions on three axes",
    "plan-64": "a plan of one token of 64 sequences",
    "plan-4096": "a plan of 4096 tokens",
    "shift": "4096 cached keys, shifted",
    "convert": "a projection weight, made half-split",
    "export": "an ONNX graph of a rotation",
    "import": "a new Python process that imports one module",
}


class Suffix(NamedTuple):
    """A part of a name: its words in a title, and its explanation."""

    words: str
    meaning: str


# In their order in a name, after the dtype.
SUFFIXES = {
    "interleaved": Suffix("interleaved", "interleaved pairs; without: half-split, as the model's"),
    "half": Suffix("half-split", "half-split pairs; without: interleaved, as the model's"),
    "out": Suffix("into other arrays", "results go to other arrays; without: in place"),
    "norm": Suffix("with norms", "q and k are normed; without: they are not"),
    "to-bfloat16": Suffix("cached as bfloat16", "the cache is bfloat16; without: as the dtype"),
    "to-int8": Suffix("cached as int8", "the cache is int8 with scales; without: as the dtype"),
    "cold": Suffix("cold", "arrays come from memory; without: from the caches, if they fit"),
}
COLD = "/cold"


def family(name: str) -> str:
    """Return the family of a case, the first part of its name."""
    return name.partition("/")[0]


def title(name: str) -> str:
    """Return a case in words, such as "one token, float32, cold"."""
    first, *others = name.split("/")
    words = [FAMILIES.get(first, first), *(_words(part) for part in others)]
    return ", ".join(words)


def _words(part: str) -> str:
    return SUFFIXES[part].words if part in SUFFIXES else part


def described(name: str, *details: str) -> str:
    """Return the description of a case: its family in words, then details."""
    return ", ".join([FAMILIES[family(name)], *details])


def without_dtype(name: str) -> str:
    """Return the name of a case without its dtype, which cases of one comparison share."""
    first, *others = name.split("/")
    return "/".join([first, *others[1:]])
