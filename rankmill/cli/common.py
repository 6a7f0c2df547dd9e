"""What all commands have, without the libraries that only some need."""

from __future__ import annotations

import click

CONTEXT = {"help_option_names": ["-h", "--help"]}

version = click.version_option(package_name="rankmill")
