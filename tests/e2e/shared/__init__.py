"""Tests on a platform that they leave as it is."""
