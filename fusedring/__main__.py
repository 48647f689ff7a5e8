"""`python -m fusedring`."""

import sys

from fusedring.cli import main

sys.exit(main())
