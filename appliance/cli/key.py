"""`appliancectl key`: an entry for gateway.api_keys_file. The file holds hashes; the key itself is shown once and kept nowhere."""

from __future__ import annotations

import sys

import click

from appliance.cli.verbs import Verb
from appliance.config.api_keys import entry_text, new_key
from appliance.core.errors import ConfigError

SHORTEST_OWN = 24
"""Of a key that somebody made up; ours have 256 random bits."""


@click.command(cls=Verb)
@click.argument("name")
@click.option("--stdin", "own", is_flag=True, help="Hash the key on standard input instead of making one.")
def key(name: str, own: bool) -> None:
    """Make an API key, and the entry for the file of keys.

    NAME stands in logs and metrics. The entry goes to stdout and the key, once, to stderr, so that `>>` adds the entry to the file
    that gateway.api_keys_file names. Limits and rights may be written below it.

    \b
    Example:
      appliancectl key alice >> /etc/llm-appliance/api-keys.toml
      systemctl reload llm-appliance-gateway
    """
    secret = _own_key() if own else new_key()
    click.echo(f"\n{entry_text(name, secret)}", nl=False)
    if not own:
        click.echo(f"The key of {name}, shown only now: {secret}", err=True)
    click.echo("In force after: systemctl reload llm-appliance-gateway (or SIGHUP to the gateway)", err=True)


def _own_key() -> str:
    secret = sys.stdin.readline().strip()
    if len(secret) < SHORTEST_OWN or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(
            f"the key has {len(secret)} characters; it must have at least {SHORTEST_OWN}, all printable ASCII without spaces",
            hint="leave --stdin out, and a good one is made",
        )
    return secret
