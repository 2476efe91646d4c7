"""The tables of what clients meet: the gateway, admission, resume, the fallback and the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.config.keys import key


@dataclass(frozen=True, slots=True)
class GatewayTable:
    """[gateway] what clients connect to."""

    host: str = key("127.0.0.1", "Address to listen on.")
    port: int = key(8000, "Port to listen on; 0 lets the kernel choose one.", minimum=0, maximum=65535)
    api_keys_file: str = key(
        "",
        "File of API keys (docs/gateway.md); with it every request needs one. Needed where host is an address that other machines reach. "
        "Read again on SIGHUP.",
    )
    allow_open: bool = key(
        False,
        "Listen on an address that other machines reach without API keys: whoever reaches it may use the model.",
    )
    admin_actions: bool = key(
        False,
        "Keys with admin = true may drain, resume and restart the engine through the port, with the buttons of the page.",
    )
    tls_certificate: str = key("", "PEM file with the certificate and its chain: the port then speaks TLS. Read again on SIGHUP.")
    tls_key: str = key("", "PEM file with the certificate's key, without a passphrase.")
    cors_origins: tuple[str, ...] = key(
        (), 'Origins of web pages that may ask from a browser, such as "https://chat.example.org"; "*": any. Empty: none.'
    )
    max_body_bytes: int = key(32 * 1024**2, "Larger request bodies are refused with 413.", unit="bytes", minimum=1024)
    header_timeout_s: float = key(
        10.0, "A client that has not sent its headers by then is disconnected.", unit="s", minimum=0.1, maximum=600
    )
    write_timeout_s: float = key(
        60.0,
        "A client that reads nothing for so long is disconnected and its request aborted.",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    disconnect_grace_s: float = key(
        10.0,
        "How long an answer without a stream is still computed after its client fell silent; a closed socket is acted on at once.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    drain_s: float = key(30.0, "On SIGTERM, how long running answers may take to finish.", unit="s", minimum=0, maximum=3600)


@dataclass(frozen=True, slots=True)
class AdmissionTable:
    """[admission] who may go in."""

    max_concurrent_decodes: int = key(
        0,
        "Requests given to the engine at once; 0: what the engine published as its own limit.",
        minimum=0,
        maximum=4096,
    )
    queue_size: int = key(256, "Requests that may wait for a slot; one more gets 429.", minimum=0, maximum=100_000)
    queue_timeout_s: float = key(120.0, "How long a request may wait for a slot before it gets 429.", unit="s", minimum=0, maximum=86400)
    request_timeout_s: float = key(
        0.0,
        "How long clients wait for a slot that do not say so themselves with X-Request-Timeout; one that would wait longer is refused "
        "at once. 0: they wait as long as they may.",
        unit="s",
        minimum=0,
        maximum=86400,
    )
    kv_fill: float = key(
        1.0,
        "Share of the engine's KV pool that prompts and answers (max_tokens) of the requests given to it may need together; above it "
        "they wait. More than 1 trusts that answers end early; 0: not looked at.",
        minimum=0,
        maximum=16,
    )
    vram_red_line: float = key(
        0.98,
        "While more than this share of a card's memory is taken, long prompts (2048 tokens, or a prefill chunk) wait until nothing else "
        "runs. One that is answered so moves the line up for as long as the engine lives. 0: not looked at.",
        minimum=0,
        maximum=1,
    )
    max_prompt_tokens: int = key(
        0,
        "Longer prompts are refused with 422, whatever the engine could take; 0: what the engine published as its own limit.",
        minimum=0,
        maximum=100_000_000,
    )
    fused_lengths: tuple[int, ...] = key(
        (),
        "Prompts of exactly so many tokens are refused with 422: for engines that crash at certain lengths. Each prompt is then counted "
        "before it waits.",
        minimum=1,
        maximum=100_000_000,
        items=int,
    )
    auto_fuse: bool = key(
        True,
        "Fuse lengths that the appliance itself finds to kill engines: two different prompts of one length convicted, or crashes that have "
        "a length in common. For [resume] quarantine_ttl_s each time, and said in the status.",
    )
    length_policy: str = key(
        "reject",
        "What is done with a prompt whose length does not go. reject: it is refused with 422. pad: one of a fused length gets a line break "
        "more, or some. truncate: that, and what is too long or cannot be padded loses its oldest messages, or the beginning of its text. "
        "any: the engine judges. A prompt that was altered is marked in the answer's header x-appliance-prompt.",
        choices=("reject", "pad", "truncate", "any"),
    )
    length_buckets: tuple[int, ...] = key(
        (),
        "Lengths in tokens that a prompt is moved to when its own does not go: pad makes it exactly as long as the next of them, at most "
        "16 tokens more; truncate makes it no longer than the largest that goes. Prompts whose length goes are left alone. Empty: any "
        "length that goes.",
        minimum=1,
        maximum=100_000_000,
        items=int,
    )
    assumed_answer_tokens: int = key(512, "Length of an answer whose request names no max_tokens.", minimum=1, maximum=10_000_000)


@dataclass(frozen=True, slots=True)
class ResumeTable:
    """[resume] requests over a crash."""

    max_wait_s: float = key(300.0, "How long a request is held while the engine is away; then 503.", unit="s", minimum=0, maximum=86400)
    max_attempts: int = key(
        2,
        "How often in a row a request may lose its engine without getting any further, and be given to the next one.",
        minimum=0,
        maximum=100,
    )
    quarantine_ttl_s: float = key(
        3600.0,
        "How long a request is refused that killed an engine while it was alone with it.",
        unit="s",
        minimum=0,
        maximum=604800,
    )


@dataclass(frozen=True, slots=True)
class FallbackTable:
    """[fallback] another endpoint for what would be refused; off unless base_url is set."""

    base_url: str = key(
        "",
        "OpenAI-compatible API, such as https://api.example.com/v1, for requests that would be refused because the engine is parked or "
        "too many wait. Their prompts then leave this box; the answers carry the header x-appliance-fallback.",
    )
    model: str = key("", "Model to ask for there; empty: the client's.")
    api_key_file: str = key("", "File whose only line is the key for it; empty: none.")
    max_concurrent: int = key(16, "Requests there at once; more are refused as without it.", minimum=1, maximum=10_000)
    timeout_s: float = key(120.0, "Without a byte of an answer for so long, it is given up.", unit="s", minimum=1, maximum=3600)


@dataclass(frozen=True, slots=True)
class MetricsTable:
    """[metrics] numbers for Prometheus."""

    enabled: bool = key(True, "Serve /metrics on the gateway's port.")
    traffic_days: int = key(
        30,
        "For how many days the traffic profile is kept: histograms of lengths, concurrency and arrivals, never any text. 0: none is made.",
        minimum=0,
        maximum=3650,
    )
