"""Model configurations: what `config.json` says, read strictly."""
