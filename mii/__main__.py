"""`python -m mii`: the command line."""

import sys

from mii.cli import main

if __name__ == "__main__":
    sys.exit(main())
