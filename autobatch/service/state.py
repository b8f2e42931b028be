"""Holds what the endpoints of one server share."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from autobatch.service.alerts import Alerts
from autobatch.service.auth import Tokens
from autobatch.service.database import Database
from autobatch.service.metrics import Metrics
from autobatch.service.shield import LOOPBACK, RateLimit
from autobatch.service.store import Store


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        is_open: Whether anyone on this machine may do all without a token.
        hosts: Names that the Host header may have, beside those of this machine's loopback.
        webhook: URL that alerts are sent to.
        rate: Requests a second that one address may make.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    is_open: bool = False
    hosts: tuple[str, ...] = ()
    webhook: str | None = None
    rate: float = 1000.0

    @property
    def allowed_hosts(self) -> frozenset[str]:
        return LOOPBACK | {host.lower() for host in self.hosts} | {self.host}


@dataclass
class Service:
    """One server: its database, and what its requests share."""

    settings: Settings
    database: Database
    streams: Counter[str] = field(default_factory=Counter)  # pages that watch, by token
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Metrics = field(default_factory=Metrics)
    failures: RateLimit = field(default_factory=lambda: RateLimit(rate=1, burst=30))  # wrong tokens

    def __post_init__(self) -> None:
        self.store = Store(self.database)
        self.tokens = Tokens(self.database)
        self.alerts = Alerts(self.store, self.settings.webhook)
        self.limit = RateLimit(self.settings.rate, 3 * self.settings.rate)
