"""Exits with a hint when this Python cannot create Torchrelay's virtual environment."""

import importlib.util
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"Torchrelay needs Python 3.11 or newer, this is {sys.version.split()[0]}: `make setup PYTHON=python3.11`")
if importlib.util.find_spec("ensurepip") is None:  # Debian and Ubuntu package it separately
    sys.exit(f"This Python cannot create virtual environments: `apt-get install python3.{sys.version_info[1]}-venv`")
