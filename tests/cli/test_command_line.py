"""Shared by all commands: the default config."""

import argparse

import oracle

from rope_cpu import command_line

mp = oracle.CONTEXT


def llama3_inv_freq(i, rotary_dim=128, theta=500000, factor=8, low=1, high=4, original=8192):
    """Llama 3.1's own rule, in 200 bits.

    Short waves stay, long ones stretch, those between are mixed.
    """
    omega = mp.mpf(theta) ** (-mp.mpf(2 * i) / rotary_dim)
    wavelength = 2 * mp.pi / omega
    if wavelength < mp.mpf(original) / high:
        return omega
    if wavelength > mp.mpf(original) / low:
        return omega / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * omega / factor + smooth * omega


def test_the_shipped_config_is_llama_3_1(capsys):
    rope = command_line.rope_from_config(
        command_line.config_from_arguments(argparse.Namespace(config=None)), None
    )
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved, rope.attention_factor) == (
        128,
        128,
        False,
        1.0,
    )
    for i, omega in enumerate(rope.inv_freq.tolist()):
        exact = llama3_inv_freq(i)
        assert abs(mp.mpf(omega) - exact) <= 8 * 2.0**-53 * exact
