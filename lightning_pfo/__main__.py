"""`python -m lightning_pfo` is `lightning-pfo`."""

import sys

from lightning_pfo.cli import main

if __name__ == "__main__":
    sys.exit(main())
