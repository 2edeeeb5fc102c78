"""HTTP/2 (RFC 9113) and gRPC on asyncio: connections, streams, calls.

Knows no router and no worker. A message costs a fraction of what it does in `grpc.aio`, since
nothing is awaited on its way: data received calls the stream's receiver, and what is sent goes out
with all else that the same turn of the event loop sends on the connection.
"""
