"""Exported files in runtimes and tools of others: each result, and each refusal that is known.

A refusal or a wrong result that expectations.json lists fails its test as soon as it is gone.
"""

import itertools

import pytest

PACKAGES = (
    *("openvino", "onnx2torch", "onnxscript", "tract", "cv2", "MNN", "iree.compiler", "tinygrad"),
    *("onnxruntime_ggml", "nxrt", "tvm"),
)
for package in PACKAGES:
    pytest.importorskip(package)

from runtimes.consumers import CONSUMERS  # noqa: E402
from runtimes.exported_files import KINDS, MODELS, TARGETS  # noqa: E402
from runtimes.outcomes import EXPECTATIONS, expectation, measure  # noqa: E402

pytestmark = [
    pytest.mark.runtimes,
    pytest.mark.filterwarnings("ignore"),  # of the runtimes
]

CASES = list(itertools.product(CONSUMERS, TARGETS, KINDS, MODELS))


def assert_as_expected(outcome, expected):
    if "refuses" in expected:
        assert expected["refuses"] in outcome.refusal
        return
    assert not outcome.refusal
    assert outcome.within != ("error" in expected or "wrong" in expected), outcome
    assert outcome.error <= expected.get("error", float("inf"))


@pytest.mark.parametrize("case", CASES, ids=":".join)
def test_outcome(case, pytestconfig):
    seed = pytestconfig.option.seed
    expected = expectation(*case)
    assert_as_expected(measure(*case, seed), expected)
    if "one_row" in expected:
        assert_as_expected(measure(*case, seed, one_row=True), expected["one_row"])


def test_every_expectation_is_used():
    used = [expectation(*case) for case in CASES]
    assert [row for row in EXPECTATIONS if row not in used] == []
