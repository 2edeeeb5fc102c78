"""Bytes in any portions: messages, header blocks, and whatever a peer may send."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii.http2.frames import ConnectionFault
from mii.http2.grpc_wire import (
    CallFault,
    MessageReader,
    StatusCode,
    decode_message_text,
    encode_message_text,
    format_timeout,
    parse_timeout,
)
from mii.http2.header_decoder import Header, HeaderDecoder
from mii.http2.headers import encode_headers
from tests.http2.conftest import message
from tests.http2.fuzz import Answers, Conversation, run_bytes

bodies = st.lists(st.binary(max_size=300), max_size=8)


def portions(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut bytes at some places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(bodies, st.lists(st.integers(0, 10**6), max_size=12))
def test_messages_come_whole_however_the_stream_is_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    reader = MessageReader(1000)
    data = b"".join(map(message, messages))
    got = [each for portion in portions(data, cuts) for each in reader.feed(portion)]
    assert got == messages and reader.held_bytes == 0


@given(st.binary(max_size=3000), st.sampled_from(["gzip", "deflate"]))
def test_compressed_messages_are_unpacked_up_to_the_limit(body: bytes, compression: str) -> None:
    packed = gzip.compress(body) if compression == "gzip" else zlib.compress(body)
    framed = b"\x01" + len(packed).to_bytes(4, "big") + packed
    assert MessageReader(4000, compression).feed(framed) == [body]
    if len(body) > 100 and len(packed) <= 100:
        with pytest.raises(CallFault) as caught:
            MessageReader(100, compression).feed(framed)
        assert caught.value.code == StatusCode.RESOURCE_EXHAUSTED


def test_a_message_that_unpacks_to_gigabytes_is_refused_without_unpacking_it() -> None:
    packer = zlib.compressobj()
    first, more = (packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in "12")
    packed = first + more * 4000
    framed = b"\x01" + len(packed).to_bytes(4, "big") + packed
    with pytest.raises(CallFault, match="larger than max"):
        MessageReader(2**21, "deflate").feed(framed)


@pytest.mark.parametrize("framed", [b"\x01\0\0\0\x01x", b"\x02\0\0\0\0"])
def test_a_flag_that_means_nothing_here_is_an_error(framed: bytes) -> None:
    with pytest.raises(CallFault):
        MessageReader(1000).feed(framed)


names = st.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True).map(str.encode)
values = st.binary(max_size=400)


@given(st.lists(st.tuples(names, values), max_size=10))
def test_what_we_encode_is_what_hpack_decodes(headers: list[tuple[bytes, bytes]]) -> None:
    assert [tuple(h) for h in hpack.Decoder(2**20).decode(encode_headers(headers), raw=True)] == (
        headers
    )
    assert HeaderDecoder(2**20).decode(encode_headers(headers)) == headers


# As they come again and again on a connection, so that tables fill up and are used.
lists = st.lists(
    st.tuples(st.sampled_from([b":path", b"te", b"x-a", b"x-b"]), st.binary(max_size=300)),
    max_size=10,
)


@given(
    blocks=st.lists(st.tuples(lists, st.booleans(), st.sampled_from([None, 0, 100, 4096]))),
)
def test_what_hpack_encodes_is_what_we_decode(
    blocks: list[tuple[list[Header], bool, int | None]],
) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(2**20)
    for headers, huffman, table_size in blocks:
        if table_size is not None:
            encoder.header_table_size = table_size
        assert decoder.decode(encoder.encode(headers, huffman=huffman)) == headers


@given(st.lists(lists, min_size=1), st.data())
def test_damaged_blocks_mean_to_us_what_they_mean_to_hpack(
    good: list[list[Header]], data: st.DataObject
) -> None:
    encoder, theirs, ours = hpack.Encoder(), hpack.Decoder(2**20), HeaderDecoder(2**20)
    for headers in good:
        block = bytearray(encoder.encode(headers))
        for at in data.draw(st.lists(st.integers(0, max(0, len(block) - 1)), max_size=2)):
            block[at : at + 1] = data.draw(st.binary(max_size=2))
        try:
            expected = [tuple(header) for header in theirs.decode(bytes(block), raw=True)]
        except (hpack.HPACKError, IndexError):
            with pytest.raises(ConnectionFault):
                ours.decode(bytes(block))
            return
        assert ours.decode(bytes(block)) == expected


def test_an_integer_without_end_is_refused() -> None:
    with pytest.raises(ConnectionFault, match="integer"):
        HeaderDecoder(2**20).decode(b"\x7f" + b"\x80" * 30_000 + b"\x01")


@given(st.text())
def test_status_messages_survive_their_encoding(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    encoded = encode_message_text(text)
    assert encoded.isascii() and b"\n" not in encoded
    assert decode_message_text(encoded) == text


@given(st.floats(0, 1e9))
def test_timeouts_are_rounded_up_and_by_little(seconds: float) -> None:
    read = parse_timeout(format_timeout(seconds).decode())
    assert seconds <= read * (1 + 1e-12) and read <= seconds * 1.0001 + 1e-6


@pytest.mark.parametrize("value", ["", "5", "S", "-1S", "1.5S", "123456789S", "5x", "\u0665S"])
def test_malformed_timeouts_are_refused(value: str) -> None:
    with pytest.raises(CallFault):
        parse_timeout(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_whatever_a_peer_sends_raises_nothing(data: bytes) -> None:
    run_bytes(data)


async def test_broken_conversations_raise_nothing_and_leave_nothing() -> None:
    """The beginning of what `python -m tests.http2.fuzz` does for as long as one likes."""
    for seed in range(1000):
        await (Conversation if seed % 2 else Answers)(seed).have()
