"""Parts of the settings that belong to one service."""
