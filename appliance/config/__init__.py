"""`appliance.toml` and its drop-ins → one immutable, typed Config."""

from appliance.config.load import LoadedConfig, load_config
from appliance.config.overrides import parse_overrides
from appliance.config.schema import Config

__all__ = ["Config", "LoadedConfig", "load_config", "parse_overrides"]
