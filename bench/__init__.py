"""Micro-benchmarks of this machine: rope_cpu, its memory bandwidth, and other libraries."""
