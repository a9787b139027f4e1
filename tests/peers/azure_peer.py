"""Clients on azure-servicebus, Microsoft's own; README.md beside this file is the contract."""

from __future__ import annotations

import json
import sys

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError


def say(**line):
    print(json.dumps(line), flush=True)


def client(options):
    """Make a client without TLS, as for Microsoft's emulator, or with it."""
    account = f"SharedAccessKeyName={options['rule']};SharedAccessKey={options['key']}"
    if "tls" in options:
        # The library allows only one port for TLS.
        return ServiceBusClient.from_connection_string(
            f"Endpoint=sb://localhost/;{account}",
            retry_total=0,
            connection_verify=options["tls"]["ca"],
        )
    return ServiceBusClient.from_connection_string(
        f"Endpoint=sb://localhost:{options['port']};{account};UseDevelopmentEmulator=true",
        retry_total=0,
    )


def send(service, options):
    with service.get_queue_sender(options["address"]) as sender:
        for number in range(options["count"]):
            sender.send_messages(ServiceBusMessage(str(number)), timeout=10)
    return {"sent": options["count"]}


def receive(service, options):
    found = []
    with service.get_queue_receiver(options["address"]) as receiver:
        while len(found) < options["count"]:
            for message in receiver.receive_messages(max_message_count=10, max_wait_time=5):
                receiver.complete_message(message)
                found.append(str(message))
    return {"messages": found}


def main():
    role, options = sys.argv[1], json.loads(sys.argv[2])
    say(ready=1)
    try:
        with client(options) as service:
            result = {"send": send, "receive": receive}[role](service, options)
    except ServiceBusError as error:
        result = {"error": {"scope": "client", "condition": type(error).__name__}}
    say(**result)


main()
