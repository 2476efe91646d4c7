"""Models as data: a family reads config.json into a DecoderConfig, one decoder runs them all."""
