"""Errors as clients of the OpenAI API expect them."""

from __future__ import annotations

from aiohttp import web

_KINDS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}


def error_response(status: int, message: str, retry_after: int | None = None) -> web.Response:
    """Return an error."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    error = {"message": message, "type": _KINDS.get(status, "GatewayError"), "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)
