"""What is run on the cards at boot."""

from dataclasses import replace

from appliance.card_settings import commands
from appliance.config.schema import Config, GpuTable


def test_the_limit_comes_after_persistence_mode() -> None:
    """In watts, without a fraction that nvidia-smi would refuse."""
    config = Config(gpu=replace(GpuTable(), power_limit_w=280.0))
    assert list(commands(config)) == [("nvidia-smi", "-pm", "1"), ("nvidia-smi", "-pl", "280")]


def test_no_limit_means_none() -> None:
    """0 leaves what the driver has."""
    assert list(commands(Config())) == [("nvidia-smi", "-pm", "1")]
