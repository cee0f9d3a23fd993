"""Which server the load generator asks, and how it reaches it."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    timeout: float = 600.0  # seconds for a whole request

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"the base URL must begin with http:// or https://, got {self.base_url!r}")
        if not self.endpoint.endswith("/completions"):
            raise ValueError(f"the endpoint must end in /completions or /chat/completions, got {self.endpoint!r}")

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def url(self, path: str) -> str:
        """A base URL may end in /v1, as clients of OpenAI's write it, or not."""
        base = self.base_url.rstrip("/")
        return (base.removesuffix("/v1") if path.startswith("/v1/") else base) + path

    def session(self) -> aiohttp.ClientSession:
        """Each request gets a connection of its own, as each user has: some servers close one that is used again."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=headers,
            read_bufsize=1 << 20,
        )

    async def first_model(self) -> str:
        """Name of the first model that the server lists. ValueError if it lists none, or does not answer."""
        url = self.url(self.endpoint.removesuffix("/completions").removesuffix("/chat") + "/models")
        try:
            async with self.session() as session, session.get(url) as response:
                if response.status != 200:
                    raise ValueError(f"{url} answers HTTP {response.status}: {(await response.text())[:200]}")
                listed = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ValueError(f"no answer from {url}: {error}") from None
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{url} lists no model; name one") from None
