"""`python -m backend.quantize`: the process that `tidegate quantize` becomes."""

import sys

from backend.extra import missing_extra

if fault := missing_extra():
    print(f"tidegate quantize {fault}", file=sys.stderr)  # noqa: T201
    sys.exit(2)

from backend.quantize.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
