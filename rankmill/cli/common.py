"""What all commands share. This module does not import the libraries that only some commands need."""

from __future__ import annotations

import click

CONTEXT = {"help_option_names": ["-h", "--help"]}

version = click.version_option(package_name="rankmill")
