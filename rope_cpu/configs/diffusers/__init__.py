"""Configs of diffusers' transformers: `config.DiffusersConfig` lists the coordinates of positions.

The rows of diffusers.json (`class_facts`) name each class's keys; `forms` makes its rotation.
"""
