"""From files and streams to evidence: decoding, wrappers, clocks, and which source a line belongs to."""
