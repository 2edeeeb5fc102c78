"""Server reflection: by it grpcurl and its like find services and their messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import DESCRIPTOR, ServerReflectionRequest

from mii.http2.grpc_wire import CallFault, StatusCode
from mii.http2.server_call import Handler, ServerCall

# The two versions have the same messages but for their package.
SERVICES: Final = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)


def _declare_v1() -> None:
    """Make v1's messages known to protobuf, as the library does v1alpha's: clients ask for them."""
    alpha, v1 = (f".{service.rpartition('.')[0]}." for service in reversed(SERVICES))
    file = FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = v1.strip(".")
    for message in file.message_type:
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace(alpha, v1)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(alpha, v1)
        method.output_type = method.output_type.replace(alpha, v1)
    descriptor_pool.Default().Add(file)


def reflection_handlers(services: Collection[str]) -> Mapping[str, Handler]:
    """Return the handlers, by path, of the service that tells of `services` and of itself."""
    _declare_v1()
    servicer: Any = ReflectionServicer([*services, *SERVICES])

    async def reflect(call: ServerCall) -> None:
        while (body := await call.receive()) is not None:
            try:
                request = ServerReflectionRequest.FromString(body)
            except DecodeError:
                raise CallFault(StatusCode.INVALID_ARGUMENT, "not a reflection request") from None
            # The library's servicer answers each message of a stream by itself.
            for response in servicer.ServerReflectionInfo(iter((request,)), None):
                call.send(response.SerializeToString())
            await call.drained()  # answers are far larger than questions

    return {f"/{service}/ServerReflectionInfo": reflect for service in SERVICES}
