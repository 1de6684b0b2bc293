"""Shared by tests of `rope-cpu bench`."""

import argparse

import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.bench.cases import all_cases
from rope_cpu.bench.measure import measure
from rope_cpu.bench.timing import Effort
from rope_cpu.cli import bench as command


@pytest.fixture
def quick():
    """As few rounds as there can be."""
    return Effort(1e-6, 0.0, rounds=2)


@pytest.fixture(scope="module")
def cases():
    return {case.name: case for case in all_cases(RotaryEmbedding(128), (32, 8))}


@pytest.fixture
def bench(monkeypatch, quick):
    """Return a call that runs the command with as few rounds as there can be."""
    monkeypatch.setattr(command, "measure", lambda case: measure(case, quick))
    threads = rope_cpu.get_num_threads()

    def run(*words):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.run(parser.parse_args(words))

    yield run
    rope_cpu.set_num_threads(threads)
