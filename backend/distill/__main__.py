"""`python -m backend.distill`: the process that `tidegate distill-draft` becomes."""

import sys

from backend.extra import missing_extra

if fault := missing_extra():
    print(f"tidegate distill-draft {fault}", file=sys.stderr)  # noqa: T201
    sys.exit(2)

from backend.distill.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
