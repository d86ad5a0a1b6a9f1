"""Checks of the promise and of the machine."""
