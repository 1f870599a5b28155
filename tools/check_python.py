"""Ends with a sentence that says the mend when this Python cannot make Torchrelay's virtual environment."""

import importlib.util
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"Torchrelay needs Python 3.11 or newer, this is {sys.version.split()[0]}: `make setup PYTHON=python3.11`")
if importlib.util.find_spec("ensurepip") is None:  # Debian and Ubuntu ship it apart
    sys.exit(f"This Python makes no virtual environments: `apt-get install python3.{sys.version_info[1]}-venv`")
