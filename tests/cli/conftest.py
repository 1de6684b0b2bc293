import argparse
import json

import pytest

from rope_cpu.cli import show


@pytest.fixture
def shown(tmp_path, capsys):
    """Run `rope-cpu show` on a config; return the lines that it prints, with single spaces."""

    def shown(config, *arguments):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        parser = argparse.ArgumentParser()
        show.add_arguments(parser)
        assert show.run(parser.parse_args([str(path), *arguments])) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return shown
