"""Targets, and the command `rope-cpu export`, as tests call it."""

import argparse
import json

import pytest
from attention_runs import targets_of

from rope_cpu.cli import export as command
from rope_cpu.export.targets import TARGETS


@pytest.fixture(params=TARGETS)
def target(request):
    """The name of a target, each in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _skip_dtypes_that_a_target_refuses(request):
    """Skip them where a test has a `target` and a `kind` of dtype."""
    case = getattr(request.node, "callspec", None)
    params = case.params if case else {}
    if {"target", "kind"} <= params.keys() and params["target"] not in targets_of(params["kind"]):
        pytest.skip("refused")


@pytest.fixture
def export_config(tmp_path):
    """A function that runs the command on a config; it returns the exit code and the file."""

    def call(config, *arguments):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        file = tmp_path / "out.onnx"
        return command.run(parser.parse_args([str(folder), "-o", str(file), *arguments])), file

    return call
