"""Tables of AMQP 0-10 for the project's own test client.

Written down here once more, apart from those of the plug-in, so that a mistake in one of them is noticed by the other.
A test compares this text with the published specification where that lies beside the checkout.
"""

from __future__ import annotations

from dataclasses import dataclass

# control|command NAME CODE [-> STRUCT OF THE RESULT]: FIELD:TYPE ...
# struct NAME CODE size OCTETS pack OCTETS: FIELD:TYPE ...
TEXT = """
class connection 1
control start 1: server-properties:map mechanisms:array locales:array
control start-ok 2: client-properties:map mechanism:str8 response:vbin32 locale:str8
control secure 3: challenge:vbin32
control secure-ok 4: response:vbin32
control tune 5: channel-max:uint16 max-frame-size:uint16 heartbeat-min:uint16 heartbeat-max:uint16
control tune-ok 6: channel-max:uint16 max-frame-size:uint16 heartbeat:uint16
control open 7: virtual-host:str8 capabilities:array insist:bit
control open-ok 8: known-hosts:array
control redirect 9: host:str16 known-hosts:array
control heartbeat 10
control close 11: reply-code:uint16 reply-text:str8
control close-ok 12
class session 2
control attach 1: name:vbin16 force:bit
control attached 2: name:vbin16
control detach 3: name:vbin16
control detached 4: name:vbin16 code:uint8
control request-timeout 5: timeout:uint32
control timeout 6: timeout:uint32
control command-point 7: command-id:sequence-no command-offset:uint64
control expected 8: commands:sequence-set fragments:array
control confirmed 9: commands:sequence-set fragments:array
control completed 10: commands:sequence-set timely-reply:bit
control known-completed 11: commands:sequence-set
control flush 12: expected:bit confirmed:bit completed:bit
control gap 13: commands:sequence-set
struct header - size 1 pack 1: sync:bit
struct command-fragment - size 0 pack 0: command-id:sequence-no byte-ranges:byte-ranges
class execution 3
command sync 1
command result 2: command-id:sequence-no value:struct32
command exception 3: error-code:uint16 command-id:sequence-no class-code:uint8 command-code:uint8 field-index:uint8 description:str16 error-info:map
class message 4
command transfer 1: destination:str8 accept-mode:uint8 acquire-mode:uint8
command accept 2: transfers:sequence-set
command reject 3: transfers:sequence-set code:uint16 text:str8
command release 4: transfers:sequence-set set-redelivered:bit
command acquire 5 -> acquired: transfers:sequence-set
command resume 6 -> message-resume-result: destination:str8 resume-id:str16
command subscribe 7: queue:str8 destination:str8 accept-mode:uint8 acquire-mode:uint8 exclusive:bit resume-id:str16 resume-ttl:uint64 arguments:map
command cancel 8: destination:str8
command set-flow-mode 9: destination:str8 flow-mode:uint8
command flow 10: destination:str8 unit:uint8 value:uint32
command flush 11: destination:str8
command stop 12: destination:str8
struct delivery-properties 1 size 4 pack 2: discard-unroutable:bit immediate:bit redelivered:bit priority:uint8 delivery-mode:uint8 ttl:uint64 timestamp:datetime expiration:datetime exchange:str8 routing-key:str8 resume-id:str16 resume-ttl:uint64
struct fragment-properties 2 size 4 pack 2: first:bit last:bit fragment-size:uint64
struct reply-to - size 2 pack 2: exchange:str8 routing-key:str8
struct message-properties 3 size 4 pack 2: content-length:uint64 message-id:uuid correlation-id:vbin16 reply-to:reply-to content-type:str8 content-encoding:str8 user-id:vbin16 app-id:vbin16 application-headers:map
struct acquired 4 size 4 pack 2: transfers:sequence-set
struct message-resume-result 5 size 4 pack 2: offset:uint64
class tx 5
command select 1
command commit 2
command rollback 3
class dtx 6
command select 1
command start 2 -> xa-result: xid:xid join:bit resume:bit
command end 3 -> xa-result: xid:xid fail:bit suspend:bit
command commit 4 -> xa-result: xid:xid one-phase:bit
command forget 5: xid:xid
command get-timeout 6 -> get-timeout-result: xid:xid
command prepare 7 -> xa-result: xid:xid
command recover 8 -> recover-result
command rollback 9 -> xa-result: xid:xid
command set-timeout 10: xid:xid timeout:uint32
struct xa-result 1 size 4 pack 2: status:uint16
struct xid 4 size 4 pack 2: format:uint32 global-id:vbin8 branch-id:vbin8
struct get-timeout-result 2 size 4 pack 2: timeout:uint32
struct recover-result 3 size 4 pack 2: in-doubt:array
class exchange 7
command declare 1: exchange:str8 type:str8 alternate-exchange:str8 passive:bit durable:bit auto-delete:bit arguments:map
command delete 2: exchange:str8 if-unused:bit
command query 3 -> exchange-query-result: name:str8
command bind 4: queue:str8 exchange:str8 binding-key:str8 arguments:map
command unbind 5: queue:str8 exchange:str8 binding-key:str8
command bound 6 -> exchange-bound-result: exchange:str8 queue:str8 binding-key:str8 arguments:map
struct exchange-query-result 1 size 4 pack 2: type:str8 durable:bit not-found:bit arguments:map
struct exchange-bound-result 2 size 4 pack 2: exchange-not-found:bit queue-not-found:bit queue-not-matched:bit key-not-matched:bit args-not-matched:bit
class queue 8
command declare 1: queue:str8 alternate-exchange:str8 passive:bit durable:bit exclusive:bit auto-delete:bit arguments:map
command delete 2: queue:str8 if-unused:bit if-empty:bit
command purge 3: queue:str8
command query 4 -> queue-query-result: queue:str8
struct queue-query-result 1 size 4 pack 2: queue:str8 alternate-exchange:str8 durable:bit exclusive:bit auto-delete:bit arguments:map message-count:uint32 subscriber-count:uint32
class file 9
command qos 1: prefetch-size:uint32 prefetch-count:uint16 global:bit
command qos-ok 2
command consume 3: queue:str8 consumer-tag:str8 no-local:bit no-ack:bit exclusive:bit nowait:bit arguments:map
command consume-ok 4: consumer-tag:str8
command cancel 5: consumer-tag:str8
command open 6: identifier:str8 content-size:uint64
command open-ok 7: staged-size:uint64
command stage 8
command publish 9: exchange:str8 routing-key:str8 mandatory:bit immediate:bit identifier:str8
command return 10: reply-code:uint16 reply-text:str8 exchange:str8 routing-key:str8
command deliver 11: consumer-tag:str8 delivery-tag:uint64 redelivered:bit exchange:str8 routing-key:str8 identifier:str8
command ack 12: delivery-tag:uint64 multiple:bit
command reject 13: delivery-tag:uint64 requeue:bit
struct file-properties 1 size 4 pack 2: content-type:str8 content-encoding:str8 headers:map priority:uint8 reply-to:str8 message-id:str8 filename:str8 timestamp:datetime cluster-id:str8
class stream 10
command qos 1: prefetch-size:uint32 prefetch-count:uint16 consume-rate:uint32 global:bit
command qos-ok 2
command consume 3: queue:str8 consumer-tag:str8 no-local:bit exclusive:bit nowait:bit arguments:map
command consume-ok 4: consumer-tag:str8
command cancel 5: consumer-tag:str8
command publish 6: exchange:str8 routing-key:str8 mandatory:bit immediate:bit
command return 7: reply-code:uint16 reply-text:str8 exchange:str8 routing-key:str8
command deliver 8: consumer-tag:str8 delivery-tag:uint64 exchange:str8 queue:str8
struct stream-properties 1 size 4 pack 2: content-type:str8 content-encoding:str8 headers:map priority:uint8 timestamp:datetime
"""

#: Name → type code. The high half of a code is the class of its width.
TYPES = {
    "bin8": 0x00,
    "int8": 0x01,
    "uint8": 0x02,
    "char": 0x04,
    "boolean": 0x08,
    "bin16": 0x10,
    "int16": 0x11,
    "uint16": 0x12,
    "bin32": 0x20,
    "int32": 0x21,
    "uint32": 0x22,
    "float": 0x23,
    "char-utf32": 0x27,
    "bin64": 0x30,
    "int64": 0x31,
    "uint64": 0x32,
    "double": 0x33,
    "datetime": 0x38,
    "bin128": 0x40,
    "uuid": 0x48,
    "bin256": 0x50,
    "bin512": 0x60,
    "bin1024": 0x70,
    "vbin8": 0x80,
    "str8-latin": 0x84,
    "str8": 0x85,
    "str8-utf16": 0x86,
    "vbin16": 0x90,
    "str16-latin": 0x94,
    "str16": 0x95,
    "str16-utf16": 0x96,
    "vbin32": 0xA0,
    "map": 0xA8,
    "list": 0xA9,
    "array": 0xAA,
    "struct32": 0xAB,
    "bin40": 0xC0,
    "dec32": 0xC8,
    "bin72": 0xD0,
    "dec64": 0xD8,
    "void": 0xF0,
    "bit": 0xF1,
}
TYPE_NAMES = {code: name for name, code in TYPES.items()}

CONTROL, COMMAND = "control", "command"


@dataclass(frozen=True)
class Layout:
    """A control, a command or a struct.

    Args:
        kind: ``control``, ``command`` or ``struct``.
        name: Class and name, ``message.transfer``.
        code: Class in the high octet, code in the low one; None for structs without.
        fields: Names with types, in the order of the wire.
        result: Name of the struct of the result.
        size: Width of the size field of a struct.
        pack: Octets of packing flags.
    """

    kind: str
    name: str
    code: int | None
    fields: tuple[tuple[str, str], ...]
    result: str | None = None
    size: int = 0
    pack: int = 2


def _layouts() -> list[Layout]:
    found = []
    group, high = "", 0
    for line in TEXT.split("\n"):
        words, _, text = line.partition(": ")
        fields = tuple((each.partition(":")[0], each.partition(":")[2]) for each in text.split())
        match words.split():
            case ["class", group, number]:
                high = int(number) << 8
            case ["struct", name, code, "size", size, "pack", pack]:
                full = None if code == "-" else high | int(code)
                layout = Layout("struct", name, full, fields, None, int(size), int(pack))
                found.append(layout)
            case [kind, name, code, *result]:
                last = result[-1] if result else None
                found.append(Layout(kind, f"{group}.{name}", high | int(code), fields, last))
    return found


LAYOUTS = _layouts()
#: (kind, code) → layout.
BY_CODE = {(each.kind, each.code): each for each in LAYOUTS if each.code is not None}
OPERATIONS = {each.name: each for each in LAYOUTS if each.kind != "struct"}
STRUCTS = {each.name: each for each in LAYOUTS if each.kind == "struct"}
