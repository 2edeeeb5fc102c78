"""Options that every gRPC channel of ours is made with."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 128 * 2**20

Options = list[tuple[str, int]]

_MESSAGE_SIZES: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]


def channel_options() -> Options:
    """Return the options of a channel.

    It pings while a call waits, which a server with C-core's own options would refuse after
    minutes. The ping timeout is set by itself because C-core's keepalive timeout does not find a
    peer that hangs under a busy stream.
    """
    return [
        *_MESSAGE_SIZES,
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", 30000),
        ("grpc.keepalive_timeout_ms", 10000),
        ("grpc.http2.ping_timeout_ms", 10000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
