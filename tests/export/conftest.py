"""The command `rope-cpu export`, as tests call it."""

import argparse
import json

import pytest

from rope_cpu.export import cli


@pytest.fixture
def export_config(tmp_path):
    """A function that runs the command on a config; it returns the exit code and the file."""

    def call(config, *arguments):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        file = tmp_path / "out.onnx"
        return cli.run(parser.parse_args([str(folder), "-o", str(file), *arguments])), file

    return call
