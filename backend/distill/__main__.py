"""`python -m backend.distill`: the process that `tidegate distill-draft` starts."""

import sys

from backend.distill.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
