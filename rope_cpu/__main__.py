"""`python -m rope_cpu`: the command `rope-cpu`."""

from rope_cpu.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
