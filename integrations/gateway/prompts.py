"""A client's request: checked, its prompt measured and cut into hashed blocks."""

from __future__ import annotations

import array
import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .prefix_index import chain

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = "kv_transfer_params"
TOKEN_BYTES = 4
"""Of text, until answers tell; the bytes of a token id in a hashed block, too."""

MEDIA_TOKENS = 256
"""Taken for an image or the like: what it really is, only the engine's processor knows."""

_OWN = (
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    PARAMS,
)
"""What each leg has for itself."""

_FULL_MEDIA = MEDIA_TOKENS * TOKEN_BYTES // 32


class BadRequestError(ValueError):
    """The client's mistake; says which."""


class Whole(str, enum.Enum):
    """Why a prompt can't be prefilled elsewhere, whatever its length. Stand beside `Reason`."""

    SEVERAL_PROMPTS = "several_prompts"
    """One answer carries the kv_transfer_params of one prompt only."""

    NEEDS_PROMPT = "needs_prompt"
    """The answer is about the prompt itself, so who answers must compute it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to an engine."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    model: str | None
    stream: bool
    tokens: int
    """Of the prompt; an estimate where it is text."""

    text_bytes: int
    """Of the prompt; 0 where it came as tokens."""

    hashes: tuple[int, ...]
    block_tokens: float
    """Tokens for which each of the hashes stands."""

    whole: Whole | None = None
    common: list[bytes] = field(default_factory=list, compare=False, repr=False)
    """The part of the body that both legs share, encoded, once it was needed."""

    def cached(self, blocks: int) -> int:
        """Return the tokens that so many blocks are."""
        return min(self.tokens, int(blocks * self.block_tokens))


class Measure:
    """Tells tokens from text: how many bytes a token has, learnt from what engines count."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.token_bytes = float(TOKEN_BYTES)

    def learn(self, call: Call, tokens: int) -> None:
        """Take in how many tokens a prompt really had."""
        if call.text_bytes >= 256 and tokens > 0:
            found = min(16.0, max(0.5, call.text_bytes / tokens))
            self.token_bytes += 0.1 * (found - self.token_bytes)

    def call(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Call:
        """Return what a body asks for.

        Raises
        ------
        BadRequestError
            It holds what a client may not send.
        """
        refuse(body)
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise BadRequestError("model is not text")
        root: tuple[object, ...] = (path, model, str(body.get("cache_salt")))
        prompt = body.get("prompt") if path == COMPLETIONS else _chat_text(body)
        whole = _whole(body)
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            whole = Whole.SEVERAL_PROMPTS
            lengths = (len(one) for one in prompt if isinstance(one, (str, list)))
            scale = self.token_bytes if isinstance(prompt[0], str) else 1.0
            tokens = round(sum(lengths) / scale)
            return Call(path, body, headers, model, _streams(body), tokens, 0, (), 1.0, whole)
        block = self.block_tokens * TOKEN_BYTES
        if isinstance(prompt, str):
            data = prompt.encode(errors="surrogatepass")
            tokens, text = max(1, round(len(data) / self.token_bytes)), len(data)
            unit = block / self.token_bytes
        else:
            data = token_bytes(prompt)
            tokens, text, unit = len(data) // TOKEN_BYTES, 0, float(self.block_tokens)
            root = (*root[1:], "tokens")
        hashes = tuple(chain(root, data, block))
        return Call(path, body, headers, model, _streams(body), tokens, text, hashes, unit, whole)

    def tokenized(self, call: Call, tokens: list[int]) -> Call:
        """Return the call with the tokens that its prompt is."""
        data = token_bytes(tokens)
        root = (call.model, str(call.body.get("cache_salt")), "tokens")
        hashes = tuple(chain(root, data, self.block_tokens * TOKEN_BYTES))
        return Call(
            call.path,
            call.body,
            call.headers,
            call.model,
            call.stream,
            len(tokens),
            0,
            hashes,
            float(self.block_tokens),
            call.whole,
        )


def refuse(body: Mapping[str, Any]) -> None:
    """Raise if a client tries to say where engines should connect to."""
    for name in (PARAMS, "vllm_xargs", "extra_args", "extra_body"):
        value = body.get(name)
        if value is None:
            continue
        if name == PARAMS or (isinstance(value, Mapping) and PARAMS in value):
            raise BadRequestError(
                f"{PARAMS} is between the gateway and its engines; send the request without it"
            )


def prefill_body(call: Call, params: Mapping[str, Any]) -> bytes:
    """Return what a prefill engine is asked: the same prompt, for one token."""
    own: dict[str, Any] = {"stream": False, "max_tokens": 1, PARAMS: params}
    for name in ("n", "max_completion_tokens"):
        if name in call.body:
            own[name] = 1
    return _encoded(call, own)


def decode_body(call: Call, params: Mapping[str, Any] | None) -> bytes:
    """Return what a decode engine is asked: what the client asked, and where the KV is."""
    own = {name: call.body[name] for name in _OWN if name in call.body}
    own.pop(PARAMS, None)
    if params is not None:
        own[PARAMS] = params
    return _encoded(call, own)


def _encoded(call: Call, own: Mapping[str, Any]) -> bytes:
    """Return a leg's body. What both legs have in common, the long part, is encoded once."""
    if not call.common:
        common = {name: value for name, value in call.body.items() if name not in _OWN}
        call.common.append(json.dumps(common).encode()[:-1])
    head, tail = call.common[0], json.dumps(own).encode()[1:]
    return head + (b", " if len(head) > 1 and len(tail) > 1 else b"") + tail


def _streams(body: Mapping[str, Any]) -> bool:
    return body.get("stream") is True


def _whole(body: Mapping[str, Any]) -> Whole | None:
    about_prompt = (
        body.get("echo")
        or body.get("prompt_logprobs") is not None
        or body.get("use_beam_search")
        or body.get("prompt_embeds") is not None
        # Cut to what max_tokens leaves, which differs between the two legs.
        or body.get("truncate_prompt_tokens") is not None
        or body.get("max_tokens") == 0
    )
    return Whole.NEEDS_PROMPT if about_prompt else None


def token_bytes(prompt: Any) -> bytes:  # noqa: ANN401 - what JSON carries
    """Return token ids as bytes; nothing for what is none, which the engine will refuse."""
    try:
        return array.array("i", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""


def _chat_text(body: Mapping[str, Any]) -> str:
    """Return the messages as text of which a longer conversation's is a continuation."""
    parts = []
    for name in ("tools", "documents", "chat_template", "chat_template_kwargs"):
        if body.get(name) is not None:
            parts.append(json.dumps(body[name]))
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        parts.append(str(message.get("role")))
        content = message.get("content")
        for piece in content if isinstance(content, list) else (content,):
            parts.append(_piece(piece))
        others = {k: v for k, v in message.items() if k not in ("role", "content")}
        if others:
            parts.append(json.dumps(others))
    return "\n".join(parts)


def _piece(piece: Any) -> str:  # noqa: ANN401 - what JSON carries
    if piece is None:
        return ""
    if isinstance(piece, str):
        return piece
    if isinstance(piece, Mapping) and isinstance(piece.get("text"), str):
        return str(piece["text"])
    digest = hashlib.blake2b(json.dumps(piece).encode(), digest_size=16).hexdigest()
    return digest * _FULL_MEDIA
