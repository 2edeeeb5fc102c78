"""A client of DeepSpeed-MII's own stubs. Runs where `mii` is DeepSpeed-MII's package, not ours.

Reads calls from standard input, as JSON: [[method, prompts, keyword arguments], ...]. Prints, as
JSON, for each its replies or the name of its status and its details.
"""

import json
import sys

import grpc
from google.protobuf.empty_pb2 import Empty

from mii.grpc_related.proto import modelresponse_pb2, modelresponse_pb2_grpc

KINDS = {str: "svalue", int: "ivalue", float: "fvalue", bool: "bvalue"}


def value_of(argument):
    """Pack an argument by its exact type, as DeepSpeed-MII does; it knows no lists."""
    if type(argument) is dict:
        values = {key: value_of(item) for key, item in argument.items()}
        return modelresponse_pb2.Value(mvalue=modelresponse_pb2.Dictionary(values=values))
    return modelresponse_pb2.Value(**{KINDS[type(argument)]: argument})


def replies_of(message):
    return [
        [r.response, r.finish_reason, r.prompt_tokens, r.generated_tokens, r.time_taken]
        for r in message.response
    ]


def call(stub, method, prompts, arguments):
    if method == "Terminate":
        stub.Terminate(Empty(), timeout=20)
        return []
    request = modelresponse_pb2.MultiStringRequest(
        request=prompts, query_kwargs={key: value_of(item) for key, item in arguments.items()}
    )
    if method == "GeneratorReply":
        return replies_of(stub.GeneratorReply(request, timeout=20))
    return [replies_of(message) for message in stub.GeneratorReplyStream(request, timeout=20)]


def main():
    limits = [
        ("grpc.max_send_message_length", 2**27),
        ("grpc.max_receive_message_length", 2**27),
    ]
    results = []
    with grpc.insecure_channel(sys.argv[1], limits) as channel:
        stub = modelresponse_pb2_grpc.ModelResponseStub(channel)
        for method, prompts, arguments in json.load(sys.stdin):
            try:
                results.append(call(stub, method, prompts, arguments))
            except grpc.RpcError as error:
                results.append([error.code().name, error.details()])
    print(json.dumps(results))


main()
