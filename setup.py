"""Packaging for tools that call setup.py; pyproject.toml has the metadata."""

from setuptools import setup

setup()
