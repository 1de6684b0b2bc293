"""Configs of diffusers' transformers: `config.DiffusersConfig` lists the coordinates of positions.

The rows of diffusers.json (`rows`) name each class's keys; `rotations` makes its rotation of them.
"""
