"""`appliancectl run`: what systemd does for the appliance, in one foreground process of an ordinary user."""
