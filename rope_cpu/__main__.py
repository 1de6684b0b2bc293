"""`python -m rope_cpu`: the command `rope-cpu`."""

from rope_cpu.cli.main import main

raise SystemExit(main())
