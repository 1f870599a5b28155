"""Tests that kill and stop the processes of a platform."""
