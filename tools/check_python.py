"""Ends with a sentence that says the mend when this Python is too old for Torchrelay."""

import sys

if sys.version_info < (3, 11):
    sys.exit(f"Torchrelay needs Python 3.11 or newer, this is {sys.version.split()[0]}: `make setup PYTHON=python3.11`")
