"""Measured roles of 0-9-1 on pika's blocking connection (see processes.py)."""

from __future__ import annotations

import json
import sys
import threading
import time

import pika


def say(**line):
    print(json.dumps(line), flush=True)


def dial(options):
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", options["port"]))
    return connection, connection.channel()


def source091(options):
    """Publish for a while; with confirms, wait for each message."""
    connection, channel = dial(options)
    if options.get("confirmed"):
        channel.confirm_delivery()
    body = (bytes(range(251)) * (options["size"] // 251 + 1))[: options["size"]]
    properties = pika.BasicProperties(delivery_mode=2 if options.get("durable") else 1)
    say(ready=1)
    started = time.perf_counter()
    until = started + options["warmup"] + options["seconds"]
    sent = warm = 0
    cpu = 0.0
    while (now := time.perf_counter()) < until:
        channel.basic_publish("", options["address"], body, properties)
        sent += 1
        if not warm and now - started >= options["warmup"]:
            warm, cpu = sent, time.process_time()
    spent = time.process_time() - cpu
    connection.close()
    say(n=sent, measured=sent - warm, cpu=spent)


def consume091(options):
    """Declare a queue, and consume the number of messages given by a line of input."""
    connection, channel = dial(options)
    channel.queue_declare(options["address"], durable=bool(options.get("durable")))
    channel.basic_qos(prefetch_count=options["credit"])
    result = {"n": 0, "measured": 0}
    expected = float("inf")
    came = cpu = 0.0

    def on_message(_channel, method, _properties, _body):
        nonlocal came, cpu
        channel.basic_ack(method.delivery_tag)
        now = time.perf_counter()
        result["n"] += 1
        if "first" in result:
            result["measured"] += 1
            result["last"] = now
        else:
            came = came or now
            if now - came >= options["warmup"]:
                result["first"] = now
                cpu = time.process_time()
        if result["n"] >= expected:
            channel.stop_consuming()

    def stop():
        if result["n"] >= expected:
            channel.stop_consuming()

    def wait():
        nonlocal expected
        expected = int(sys.stdin.readline() or 0)
        connection.add_callback_threadsafe(stop)

    channel.basic_consume(options["address"], on_message)
    threading.Thread(target=wait, daemon=True).start()
    say(ready=1)
    channel.start_consuming()
    say(**result, cpu=time.process_time() - cpu)
    connection.close()


def version(_options):
    say(ready=1, version=pika.__version__)


ROLES = {"source091": source091, "consume091": consume091, "version": version}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
