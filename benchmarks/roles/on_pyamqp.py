"""Azure's Python SDK: its codec, which is available only under private names, and its client of Service Bus."""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.metadata import version


def say(**line):
    print(json.dumps(line), flush=True)


def sdk():
    for name in ("azure.servicebus", "azure.eventhub"):
        try:
            return name, importlib.import_module(f"{name}._pyamqp._encode").__package__
        except ImportError:
            continue
    raise SystemExit("neither azure-servicebus nor azure-eventhub is installed")


def codec(package, options):
    decoder = importlib.import_module(f"{package}._decode")
    encoder = importlib.import_module(f"{package}._encode")
    messages = importlib.import_module(f"{package}.message")
    performatives = importlib.import_module(f"{package}.performatives")
    outcomes = importlib.import_module(f"{package}.outcomes")
    body = (bytes(range(251)))[:100]
    named = {"region": "eu", "attempt": 3, "urgent": True}

    def encode():
        return encoder.encode_payload(
            bytearray(),
            messages.Message(
                properties=messages.Properties(
                    message_id=17,
                    user_id=b"guest",
                    to="orders",
                    subject="new",
                    content_type="application/octet-stream",
                ),
                application_properties=named,
                data=[body],
            ),
        )

    encoded = bytes(encode())
    view = memoryview(encoded)

    def transfer():
        return encoder.encode_frame(
            performatives.TransferFrame(
                handle=1,
                delivery_id=1_000,
                delivery_tag=b"0001",
                message_format=0,
                settled=False,
                more=False,
                rcv_settle_mode=None,
                state=None,
                resume=None,
                aborted=None,
                batchable=None,
                payload=encoded,
            )
        )

    def disposition():
        return encoder.encode_frame(
            performatives.DispositionFrame(
                role=True,
                first=1_000,
                last=1_049,
                settled=True,
                state=outcomes.Accepted(),
                batchable=None,
            )
        )

    transfer_body = memoryview(bytes(transfer()[1]))
    disposition_body = memoryview(bytes(disposition()[1]))
    seconds = options["seconds"]
    say(ready=1)
    say(
        message_encode=nanoseconds(encode, seconds),
        message_decode=nanoseconds(lambda: decoder.decode_payload(view), seconds),
        transfer_encode=nanoseconds(transfer, seconds),
        transfer_decode=nanoseconds(lambda: decoder.decode_frame(transfer_body), seconds),
        disposition_encode=nanoseconds(disposition, seconds),
        disposition_decode=nanoseconds(lambda: decoder.decode_frame(disposition_body), seconds),
        size=len(encoded),
    )


def nanoseconds(operation, seconds):
    """Return the nanoseconds of one call, measured over about *seconds*."""
    for _ in range(200):
        operation()
    done, started = 0, time.process_time()
    while (elapsed := time.process_time() - started) < seconds:
        for _ in range(200):
            operation()
        done += 200
    return elapsed / done * 1e9


def bus(options):
    """Send messages, receive and complete them, as many at a time as *count*."""
    from azure.servicebus import ServiceBusClient, ServiceBusMessage

    client = ServiceBusClient.from_connection_string(options["connection_string"])
    name = options["queue"]
    with client, client.get_queue_sender(name) as out, client.get_queue_receiver(name) as back:
        most = options["count"]

        def one():
            sent = [ServiceBusMessage(b"x" * 100) for _ in range(most)]
            out.send_messages(sent if most > 1 else sent[0])
            left = most
            while left:
                received = back.receive_messages(left, max_wait_time=5)
                left -= len(received)
                for message in received:
                    back.complete_message(message)

        one()
        say(ready=1)
        say(warm=1)
        count, started, cpu = 0, time.monotonic(), time.process_time()
        while (elapsed := time.monotonic() - started) < options["seconds"]:
            one()
            count += most
        say(n=count, elapsed=elapsed, cpu=time.process_time() - cpu)


def main():
    name, package = sdk()
    if sys.argv[1] == "version":
        found = name.replace(".", "-")
        say(version=f"{found} {version(found)}")
    elif sys.argv[1] == "bus":
        bus(json.loads(sys.argv[2]))
    else:
        codec(package, json.loads(sys.argv[2]))


main()
