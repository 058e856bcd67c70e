"""`python -m burnish` is the command `burnish`."""

import sys

from burnish.cli.main import main

sys.exit(main())
