"""The control socket: applianced listens, the gateway and appliancectl ask. The wire format is in docs/structures.md."""
