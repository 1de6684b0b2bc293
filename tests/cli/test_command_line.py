"""Shared by all commands: the default config."""

import argparse

from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding
from rope_cpu.cli import command_line


def test_the_shipped_config_is_llama_3_1():
    config = command_line.config_from_arguments(argparse.Namespace(config=None))
    rope = RotaryEmbedding.from_config(config)
    assert rope == RotaryEmbedding(128, rope_theta=500000.0, scaling=LLAMA3_SCALING)
    assert not rope.interleaved
