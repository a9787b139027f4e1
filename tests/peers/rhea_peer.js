// AMQP clients and a server on rhea; README.md beside this file is the contract.
'use strict';

const crypto = require('crypto');
const fs = require('fs');
const rhea = require('rhea');
const WebSocket = require('ws');

const { message, types } = rhea;

// rhea's message.decode drops the types of what it reads: keep the octets beside its result.
const decode = message.decode;
message.decode = (octets) => Object.assign(decode(octets), { octets });

// ---- typed values -----------------------------------------------------------------------------

const wide = (signed) => (digits) => {
    const octets = Buffer.alloc(8);
    if (signed) octets.writeBigInt64BE(BigInt(digits));
    else octets.writeBigUInt64BE(BigInt(digits));
    return octets;
};
const fromHex = (hex) => Buffer.from(hex, 'hex');
const same = (value) => value;

// type: [rhea's constructor, from the contract's value to rhea's]
const SCALARS = {
    boolean: [types.wrap_boolean, same],
    ubyte: [types.wrap_ubyte, same],
    ushort: [types.wrap_ushort, same],
    uint: [types.wrap_uint, same],
    byte: [types.wrap_byte, same],
    short: [types.wrap_short, same],
    int: [types.wrap_int, same],
    ulong: [types.wrap_ulong, wide(false)],
    long: [types.wrap_long, wide(true)],
    timestamp: [types.wrap_timestamp, Number],
    float: [types.wrap_float, (hex) => fromHex(hex).readFloatBE()],
    double: [types.wrap_double, (hex) => fromHex(hex).readDoubleBE()],
    decimal32: [types.Decimal32, fromHex],
    decimal64: [types.Decimal64, fromHex],
    decimal128: [types.Decimal128, fromHex],
    uuid: [types.wrap_uuid, fromHex],
    binary: [types.wrap_binary, fromHex],
    string: [types.wrap_string, same],
    symbol: [types.wrap_symbol, same],
    char: [types.wrap_char, same],
};

// The one encoding that rhea is asked to use for the elements of an array.
const ARRAY_CODES = {
    boolean: 0x56, ubyte: 0x50, ushort: 0x60, uint: 0x70, byte: 0x51, short: 0x61, int: 0x71,
    ulong: 0x80, long: 0x81, timestamp: 0x83, float: 0x72, double: 0x82, decimal32: 0x74,
    decimal64: 0x84, decimal128: 0x94, uuid: 0x98, binary: 0xb0, string: 0xb1, symbol: 0xb3,
    char: 0x73,
};

// rhea's names of encodings → [type, from rhea's value to the contract's]
const digits = (value) => String(value);
const bigDigits = (signed) => (value) => {
    if (!Buffer.isBuffer(value)) return String(value);
    return String(signed ? value.readBigInt64BE() : value.readBigUInt64BE());
};
const toHex = (value) => Buffer.from(value).toString('hex');
const float = (value) => { const b = Buffer.alloc(4); b.writeFloatBE(value); return toHex(b); };
const double = (value) => { const b = Buffer.alloc(8); b.writeDoubleBE(value); return toHex(b); };
const ENCODINGS = {
    Boolean: ['boolean', Boolean], True: ['boolean', () => true], False: ['boolean', () => false],
    Ubyte: ['ubyte', same], Ushort: ['ushort', same],
    Uint: ['uint', same], SmallUint: ['uint', same], Uint0: ['uint', () => 0],
    Ulong: ['ulong', bigDigits(false)], SmallUlong: ['ulong', digits], Ulong0: ['ulong', () => '0'],
    Byte: ['byte', same], Short: ['short', same], Int: ['int', same], SmallInt: ['int', same],
    Long: ['long', bigDigits(true)], SmallLong: ['long', digits],
    Float: ['float', float], Double: ['double', double],
    Decimal32: ['decimal32', toHex], Decimal64: ['decimal64', toHex], Decimal128: ['decimal128', toHex],
    CharUTF32: ['char', same], Timestamp: ['timestamp', (value) => String(value.getTime())],
    Uuid: ['uuid', toHex], Vbin8: ['binary', toHex], Vbin32: ['binary', toHex],
    Str8: ['string', same], Str32: ['string', same], Sym8: ['symbol', same], Sym32: ['symbol', same],
};

function native([kind, value]) {
    if (kind in SCALARS) {
        const [wrap, convert] = SCALARS[kind];
        return wrap(convert(value));
    }
    switch (kind) {
    case 'null': return types.Null();
    case 'list': return value.length ? types.List32(value.map(native)) : types.List0();
    case 'map': return types.Map32(value.flatMap(([key, item]) => [native(key), native(item)]));
    case 'described': return types.described(native(value[0]), native(value[1]));
    case 'array': {
        const [of, items, descriptor] = value;
        const convert = SCALARS[of][1];
        return types.wrap_array(items.map(convert), ARRAY_CODES[of], descriptor && native(descriptor));
    }
    }
    throw new Error(`no such type: ${kind}`);
}

function typed(value) {
    if (value.descriptor) {
        const bare = Object.assign(Object.create(Object.getPrototypeOf(value)), value);
        delete bare.descriptor;
        return ['described', [typed(value.descriptor), typed(bare)]];
    }
    const name = value.type.name;
    if (name === 'Null') return ['null', null];
    if (name in ENCODINGS) {
        const [kind, convert] = ENCODINGS[name];
        return [kind, convert(value.value)];
    }
    if (name.startsWith('List')) return ['list', value.value.map(typed)];
    if (name.startsWith('Map')) return ['map', pairs(value).map((pair) => pair.map(typed))];
    if (name.startsWith('Array')) {
        const { typecode, descriptor } = value.array_constructor;
        const items = value.value.map((item) => typed(item));
        const of = items.length ? items[0][0] : ENCODINGS[types.by_code[typecode].name][0];
        return ['array', [of, items.map((item) => item[1]), descriptor ? typed(descriptor) : null]];
    }
    throw new Error(`rhea gave ${name}`);
}

function pairs(map) {
    const found = [];
    for (let i = 0; i < map.value.length; i += 2) found.push([map.value[i], map.value[i + 1]]);
    return found;
}

// ---- messages ---------------------------------------------------------------------------------

const TYPED_PROPERTIES = ['message_id', 'correlation_id'];
const PLAIN_PROPERTIES = ['to', 'subject', 'reply_to', 'content_type', 'group_id', 'group_sequence'];
const PROPERTY_FIELDS = ['message_id', 'user_id', 'to', 'subject', 'reply_to', 'correlation_id'];

function filler(size) {
    const octets = Buffer.alloc(size);
    for (let i = 0; i < size; i++) octets[i] = i % 251;
    return octets;
}

function outgoing(shown) {
    const made = { ...(shown.header || {}) };
    const [section, value] = shown.body;
    if (section === 'data') made.body = message.data_section(fromHex(value));
    else if (section === 'sequence') made.body = message.sequence_section(value.map(native));
    else made.body = native(value);
    for (const [name, property] of Object.entries(shown.properties || {})) {
        made[name] = TYPED_PROPERTIES.includes(name) ? native(property) : property;
    }
    if (shown.application_properties) made.application_properties = natives(shown.application_properties);
    if (shown.message_annotations) made.message_annotations = natives(shown.message_annotations);
    return made;
}

function natives(values) {
    return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, native(value)]));
}

function show(received) {
    const reader = new types.Reader(received.octets);
    const shown = { body: null, properties: {}, application_properties: {} };
    while (reader.remaining()) {
        const section = reader.read();
        const code = Number(section.descriptor.value);
        delete section.descriptor;
        if (code === 0x73) {
            TYPED_PROPERTIES.forEach((name) => {
                const value = section.value[PROPERTY_FIELDS.indexOf(name)];
                if (value && value.type.name !== 'Null') shown.properties[name] = typed(value);
            });
        } else if (code === 0x74) {
            pairs(section).forEach(([key, value]) => { shown.application_properties[key.value] = typed(value); });
        } else if (code === 0x75) {
            const octets = section.value;
            const hash = crypto.createHash('sha256').update(octets).digest('hex');
            shown.body = octets.length > 64 ? ['data', octets.length, hash] : ['data', toHex(octets)];
        } else if (code === 0x76) {
            shown.body = ['sequence', section.value.map(typed)];
        } else if (code === 0x77) {
            shown.body = ['value', typed(section)];
        }
    }
    PLAIN_PROPERTIES.forEach((name) => { if (received[name] !== undefined) shown.properties[name] = received[name]; });
    shown.header = {
        durable: received.durable || false,
        priority: received.priority === undefined ? 4 : received.priority,
        ttl: received.ttl || 0,
        delivery_count: received.delivery_count || 0,
    };
    return shown;
}

function toSend(options) {
    if (options.messages) return options.messages.map(outgoing);
    const bodies = Array.from({ length: options.count || 1 }, (_, number) => types.wrap_long(number));
    if (options.to) return options.to.map((to, number) => ({ to, body: types.wrap_long(number) }));
    if (options.size === undefined) return bodies.map((body) => ({ body }));
    const body = message.data_section(filler(options.size));
    return bodies.map(() => ({ body }));
}

function withValues(values) {
    const simple = Object.entries(values).filter(
        ([, [kind]]) => !['list', 'map', 'array', 'described'].includes(kind));
    return {
        body: native(['list', Object.values(values)]),
        application_properties: natives(Object.fromEntries(simple)),
    };
}

function stateOf(delivery) {
    const state = delivery.remote_state;
    const kind = state && state.constructor.composite_type;
    if (kind === 'rejected') return ['rejected', conditionOf(state.error)];
    if (kind === 'modified') {
        return ['modified', {
            failed: Boolean(state.delivery_failed), undeliverable: Boolean(state.undeliverable_here),
        }];
    }
    return kind ? [kind] : null;
}

function conditionOf(error) {
    return error ? { condition: error.condition, description: error.description } : null;
}

function settle(delivery, outcome) {
    if (outcome === 'accept') delivery.accept();
    else if (outcome === 'reject') delivery.reject({ condition: 'test:unwanted', description: 'not wanted' });
    else if (outcome === 'release') delivery.release();
    else if (outcome === 'modify') delivery.modified({ delivery_failed: true, undeliverable_here: true });
}

const say = (line) => console.log(JSON.stringify(line));

// The end. A long line may not have left when exit() is called.
const sayLast = (line) => process.stdout.write(`${JSON.stringify(line)}\n`, () => process.exit(0));

const SETTLE_MODES = { unsettled: 0, settled: 1, mixed: 2 };
const settlement = (options) => ({
    snd_settle_mode: SETTLE_MODES[options.settle || 'mixed'],
    rcv_settle_mode: options.second ? 1 : 0,
});

// ---- clients ----------------------------------------------------------------------------------

// A connection with a result, which is printed when it is over.
function connect(options, result) {
    const container = rhea.create_container({ id: options.container || `rhea-${rhea.generate_uuid()}` });
    const settings = {
        host: options.host || '127.0.0.1', port: options.port, reconnect: false, tcp_no_delay: true,
    };
    if (options.user) Object.assign(settings, { username: options.user, password: options.password });
    else if (options.sasl !== false) settings.username = 'anonymous'; // rhea's ANONYMOUS; else no SASL
    if (options.tls) {
        const { ca, cert } = options.tls;
        Object.assign(settings, { transport: 'tls', host: 'localhost', servername: 'localhost', ca: fs.readFileSync(ca) });
        if (cert) {
            const pem = fs.readFileSync(cert);
            delete settings.username;
            Object.assign(settings, { cert: pem, key: pem, enable_sasl_external: true });
        }
    }
    if (options.websocket) {
        const trust = options.tls ? { ca: fs.readFileSync(options.tls.ca) } : {};
        const url = `${options.tls ? 'wss://localhost' : 'ws://127.0.0.1'}:${options.port}${options.websocket}`;
        settings.connection_details = container.websocket_connect(WebSocket)(url, ['amqp'], trust);
    }
    if (options.max_frame_size) settings.max_frame_size = options.max_frame_size;
    const connection = container.connect(settings);
    connection.result = result;
    let finished = false;
    const finish = () => {
        if (finished) return;
        finished = true;
        clearTimeout(timer);
        sayLast(result);
    };
    const timer = setTimeout(() => { result.timeout = true; finish(); }, (options.timeout_s || 20) * 1000);
    connection.end = () => { if (!connection.is_closed()) connection.close(); };
    const failed = (scope, endpoint) => {
        if (!result.error) result.error = { scope, ...conditionOf(endpoint.error) };
        connection.end();
    };
    connection.on('connection_error', (context) => failed('connection', context.connection));
    connection.on('session_error', (context) => failed('session', context.session));
    connection.on('sender_error', (context) => failed('link', context.sender));
    connection.on('receiver_error', (context) => failed('link', context.receiver));
    connection.on('sender_close', (context) => failed('link', context.sender));
    connection.on('receiver_close', (context) => {
        // It answers a detach of ours, too.
        if (context.receiver.error || !context.receiver.is_closed()) failed('link', context.receiver);
    });
    connection.on('connection_close', finish);
    container.on('error', (error) => {
        if (!result.error) result.error = { scope: 'transport', condition: error.condition, description: error.message };
        finish();
    });
    connection.on('disconnected', (context) => {
        if (!result.error) result.error = { scope: 'transport', ...conditionOf(context.error) };
        finish();
    });
    say({ ready: 1 });
    return connection;
}

function open(options) {
    const connection = connect(options, {});
    connection.on('connection_open', () => {
        Object.assign(connection.result, {
            container: connection.container_id,
            offered_capabilities: [].concat(connection.offered_capabilities || []),
            max_frame_size: connection.max_frame_size,
        });
        connection.end();
    });
}

function send(options) {
    const waiting = toSend(options);
    const wanted = waiting.length;
    const states = waiting.map(() => null);
    const connection = connect(options, { sent: 0, states, settled: 0 });
    const { result } = connection;
    const numbers = new Map();
    let settled = 0;
    const target = options.to ? {} : { address: options.address };
    // Settling is left to rhea: in second mode it settles when the receiver has spoken.
    const sender = connection.open_sender({ target, ...settlement(options) });
    sender.on('sender_open', () => {
        say({ attached: sender.target && sender.target.address, size_max: Number(sender.max_message_size || 0) });
    });
    sender.on('sendable', () => {
        while (waiting.length && sender.sendable()) {
            numbers.set(sender.send(waiting.shift()), result.sent++);
        }
        if (waiting.length) return;
        if (options.hasty) connection.end();
        else if (options.settle === 'settled') endWhenWritten();
    });
    // close() overtakes what rhea has not written yet, so wait until nothing is left to send.
    function endWhenWritten() {
        const { outgoing: out } = sender.session;
        if (out.next_pending_delivery === out.next_delivery_id) connection.end();
        else setTimeout(endWhenWritten, 5);
    }
    const spoken = (context) => {
        states[numbers.get(context.delivery)] = stateOf(context.delivery);
        if (options.second && !context.delivery.remote_settled && !context.delivery.settled) {
            context.delivery.update(true);
            over();
        }
    };
    ['accepted', 'rejected', 'released', 'modified'].forEach((name) => sender.on(name, spoken));
    sender.on('settled', () => { result.settled++; over(); });
    function over() {
        settled++;
        if (settled === wanted) connection.end();
    }
}

function receive(options) {
    const connection = connect(options, { received: 0, settled: 0, messages: [] });
    const { result } = connection;
    const source = { address: options.address };
    if (options.browse) source.distribution_mode = 'copy';
    if (options.durable) Object.assign(source, { durable: 2, expiry_policy: 'never' });
    if (options.expiry_policy) Object.assign(source, { expiry_policy: options.expiry_policy, timeout: options.timeout || 0 });
    if (options.selector) source.filter = rhea.filter.selector(options.selector);
    if (options.filter) {
        source.filter = Object.fromEntries(Object.entries(options.filter).map(([name, value]) => [name, native(value)]));
    }
    const receiver = connection.open_receiver({
        source, credit_window: 0, autoaccept: false, autosettle: false, ...settlement(options),
        ...(options.name && { name: options.name }),
    });
    const outcomes = options.outcomes || ['accept'];
    let toGrant = options.count || 2 ** 30;
    let last = Date.now();
    let over = false;
    function grant() {
        const credit = Math.min(options.credit || 100, toGrant);
        toGrant -= credit;
        receiver.add_credit(credit);
    }
    function finish() {
        if (over) return;
        over = true;
        result.credit = receiver.credit;
        if (options.unsubscribe) receiver.close();
        else if (options.durable || options.expiry_policy) receiver.detach();
        connection.end();
    }
    receiver.on('receiver_open', () => {
        say({ attached: receiver.source && receiver.source.address });
        if (options.drain) {
            receiver.add_credit(options.credit);
            receiver.drain_credit();
        } else {
            grant();
        }
    });
    receiver.on('message', (context) => {
        last = Date.now();
        result.messages.push(show(context.message));
        const outcome = outcomes[result.received % outcomes.length];
        result.received++;
        if (!context.delivery.remote_settled) settle(context.delivery, outcome);
        if (result.received === options.count && !options.second) finish();
        else if (!options.drain && receiver.credit === 0) grant();
    });
    receiver.on('settled', (context) => {
        if (!options.second) return;
        context.delivery.settled = true;
        result.settled++;
        if (result.settled === options.count) finish();
    });
    receiver.on('receiver_drained', () => { result.drained = true; finish(); });
    if (options.quiet_ms) {
        const watch = setInterval(() => {
            if (Date.now() - last < options.quiet_ms) return;
            clearInterval(watch);
            finish();
        }, options.quiet_ms / 4);
    }
}

function rpc(options) {
    const replies = options.requests.map(() => null);
    const connection = connect(options, { replies });
    const { result } = connection;
    let next = 0;
    const sender = connection.open_sender({ target: { address: options.address } });
    const receiver = connection.open_receiver({ source: { dynamic: true } });
    function request(count) {
        while (count-- && next < replies.length && sender.sendable()) {
            sender.send({
                message_id: types.wrap_ulong(next), reply_to: result.reply_to, body: native(options.requests[next]),
            });
            next++;
        }
    }
    const start = () => { if (result.reply_to && next === 0) request(options.in_flight || 1); };
    receiver.on('receiver_open', () => { result.reply_to = receiver.source.address; start(); });
    sender.on('sendable', start);
    receiver.on('message', (context) => {
        replies[Number(context.message.correlation_id)] = show(context.message);
        if (replies.every(Boolean)) connection.end();
        else request(1);
    });
}

// Serves an address as a receiver: sends each message back to where its replies go.
function answer(options) {
    const connection = connect(options, { answered: 0 });
    const { result } = connection;
    const replies = connection.open_sender({ target: {} });
    const receiver = connection.open_receiver({ source: { address: options.address }, credit_window: 0 });
    let settled = 0;
    receiver.on('receiver_open', () => {
        say({ attached: receiver.source && receiver.source.address });
        receiver.add_credit(options.credit || 10);
    });
    receiver.on('message', ({ message: request, delivery }) => {
        replies.send({ to: request.reply_to, correlation_id: types.wrap_ulong(request.message_id), body: request.body });
        result.answered++;
        receiver.add_credit(1);
    });
    replies.on('settled', () => { if (++settled === options.count) connection.end(); });
}

function mirror(options) {
    const connection = connect(options, { messages: [] });
    const sender = connection.open_sender({ target: { address: options.address } });
    const receiver = connection.open_receiver({ source: { address: options.address }, credit_window: 0 });
    receiver.on('receiver_open', () => receiver.add_credit(1));
    sender.once('sendable', () => sender.send(withValues(options.values)));
    receiver.on('message', (context) => {
        connection.result.messages.push(show(context.message));
        // The accept leaves with the next pass.
        setImmediate(connection.end);
    });
}

// ---- server -----------------------------------------------------------------------------------

class Queue {
    constructor() { this.messages = []; this.consumers = []; }

    put(octets) { this.messages.push(octets); this.dispatch(); }

    dispatch() {
        for (let turns = this.consumers.length; turns > 0; turns--) {
            const link = this.consumers[0];
            while (this.messages.length && link.sendable()) sendOctets(link, this.messages.shift());
            this.consumers.push(this.consumers.shift());
        }
    }
}

function sendOctets(link, octets) {
    const delivery = link.send(octets, undefined, 0);
    delivery.octets = octets;
}

// The fields of a terminus that we answer with. A terminus that came as an empty list shares that list
// with every other empty list that rhea decodes: to answer with it as it is would fill them all.
function terminus(asked) {
    return asked ? { address: asked.address, capabilities: asked.capabilities } : {};
}

function serve(options) {
    const container = rhea.create_container({ id: 'rhea-server' });
    const queues = new Map();
    const sinks = {};
    const queue = (address) => {
        if (!queues.has(address)) queues.set(address, new Queue());
        return queues.get(address);
    };

    container.sasl_server_mechanisms.enable_anonymous();
    container.on('sender_open', ({ sender }) => {
        const asked = sender.source;
        let address = (asked && asked.address) || '';
        if (address === 'refuse') {
            sender.close({ condition: 'amqp:not-found', description: 'no such node' });
            return;
        }
        if (asked.dynamic) address = `dynamic-${rhea.generate_uuid()}`;
        // What the client asked for is what it gets: rhea attaches with these after this event.
        sender.set_source({ address, dynamic: asked.dynamic, distribution_mode: asked.distribution_mode });
        sender.set_target(terminus(sender.target));
        sender.local.attach.snd_settle_mode = sender.snd_settle_mode;
        sender.local.attach.rcv_settle_mode = sender.rcv_settle_mode;
        sender.address = address;
        const [head, rest] = address.split('/');
        const encode = (made) => message.encode(made);
        if (head === 'count') {
            sender.waiting = Array.from({ length: Number(rest) }, (_, i) => encode({ body: types.wrap_long(i) }));
        } else if (head === 'large') {
            sender.waiting = [encode({ body: message.data_section(filler(Number(rest))) })];
        } else if (head === 'values') {
            sender.waiting = [encode(withValues(options.values))];
        } else if (asked.distribution_mode === 'copy') {
            sender.waiting = [...queue(address).messages];
        } else {
            queue(address).consumers.push(sender);
        }
    });
    const flush = ({ sender }) => {
        if (!sender.waiting) return queue(sender.address).dispatch();
        while (sender.waiting.length && sender.sendable()) sendOctets(sender, sender.waiting.shift());
        return undefined;
    };
    container.on('sendable', flush);
    // rhea may give the credit back only after what was sent above has left.
    container.on('sender_draining', (context) => {
        flush(context);
        const returned = () => {
            const { outgoing: out } = context.session;
            if (out.next_pending_delivery === out.next_delivery_id) context.sender.set_drained(true);
            else setImmediate(returned);
            context.connection._register();
        };
        setImmediate(returned);
    });
    const requeue = ({ sender, delivery }) => {
        if (!delivery.octets || sender.waiting) return;
        queue(sender.address).messages.unshift(delivery.octets);
        delete delivery.octets;
        queue(sender.address).dispatch();
    };
    container.on('released', requeue); // rhea reports modified here too
    ['accepted', 'rejected', 'released', 'modified'].forEach((name) => {
        container.on(name, ({ sender, delivery }) => {
            if (sender.rcv_settle_mode === 1 && !delivery.remote_settled && !delivery.settled) delivery.update(true);
        });
    });

    container.on('receiver_open', ({ receiver }) => {
        const address = (receiver.target && receiver.target.address) || '';
        if (address === 'refuse') {
            receiver.close({ condition: 'amqp:not-found', description: 'no such node' });
            return;
        }
        receiver.set_source(terminus(receiver.source));
        receiver.set_target(terminus(receiver.target));
        receiver.local.attach.snd_settle_mode = receiver.snd_settle_mode;
        receiver.local.attach.rcv_settle_mode = receiver.rcv_settle_mode;
        if (address === 'small') receiver.local.attach.max_message_size = 100;
        receiver.address = address;
        receiver.add_credit(address === 'slow' ? 1 : 100);
    });
    container.on('message', (context) => {
        const { receiver, delivery, connection } = context;
        const { address } = receiver;
        const [head, outcome] = address.split('/');
        if (address === 'detach') {
            receiver.close({ condition: 'amqp:resource-deleted', description: 'the first message was enough' });
            return;
        }
        if (address === 'close') {
            connection.close({ condition: 'amqp:internal-error', description: 'told to' });
            return;
        }
        if (address === 'slow') {
            setTimeout(() => { settle(delivery, 'accept'); receiver.add_credit(1); }, 20);
            return;
        }
        if (head === 'sink') {
            sinks[address] = sinks[address] || { received: 0, settled: 0, messages: [] };
            const sink = sinks[address];
            sink.received++;
            if (sink.messages.length < 10) sink.messages.push(show(context.message));
        } else if (address === 'echo') {
            const request = context.message;
            const id = request.correlation_id === undefined ? request.message_id : request.correlation_id;
            const reply = message.encode({
                to: request.reply_to,
                correlation_id: Buffer.isBuffer(id) && id.length === 8 ? types.wrap_ulong(id) : id,
                application_properties: request.application_properties,
                body: echoed(request),
            });
            queue(request.reply_to).put(reply);
        } else {
            queue(address || context.message.to).put(context.message.octets);
        }
        if (!delivery.remote_settled) settle(delivery, outcome || 'accept');
        receiver.add_credit(1);
    });
    container.on('settled', ({ receiver, delivery }) => {
        if (receiver && receiver.rcv_settle_mode === 1) {
            delivery.settled = true;
            if (sinks[receiver.address]) sinks[receiver.address].settled++;
        }
    });

    const forget = (gone) => queues.forEach((found) => {
        found.consumers = found.consumers.filter((link) => !gone(link));
    });
    container.on('sender_close', ({ sender }) => forget((link) => link === sender));
    container.on('sender_error', ({ sender }) => forget((link) => link === sender));
    container.on('disconnected', ({ connection }) => forget((link) => link.connection === connection));
    container.on('connection_close', ({ connection }) => forget((link) => link.connection === connection));
    ['receiver_error', 'session_error', 'connection_error', 'error', 'protocol_error'].forEach((name) => {
        container.on(name, () => {});
    });

    const pem = options.tls && fs.readFileSync(options.tls.cert);
    const server = container.listen({
        ...(pem ? { transport: 'tls', cert: pem, key: pem } : {}),
        host: '127.0.0.1', port: options.port || 0, receiver_options: { credit_window: 0, autoaccept: false, autosettle: false },
        tcp_no_delay: true,
    });
    server.on('listening', () => say({ ready: 1, port: server.address().port }));
    const end = () => sayLast({ sinks });
    process.stdin.on('end', end).resume();
}

// The body of *request* with the types it came with.
function echoed(request) {
    const reader = new types.Reader(request.octets);
    while (reader.remaining()) {
        const section = reader.read();
        const code = Number(section.descriptor.value);
        delete section.descriptor;
        if (code === 0x75) return message.data_section(section.value);
        if (code === 0x76) return message.sequence_section(section.value);
        if (code === 0x77) return section;
    }
    return undefined;
}

// ---- a restart --------------------------------------------------------------------------------

// Half of the numbers pass before the connection is lost, half after; links are rhea's to attach again.
function survive(options) {
    const { count } = options;
    const container = rhea.create_container();
    const received = new Set();
    let accepted = 0, waiting = false, connections = 0, halfway = false;
    const timer = setTimeout(() => sayLast({ timeout: true }), (options.timeout_s || 20) * 1000);
    const connection = container.connect({
        host: '127.0.0.1', port: options.port, username: 'anonymous', max_reconnect_delay: 200,
    });
    const sender = connection.open_sender(options.address);
    const receiver = connection.open_receiver(options.address);
    const go = () => {
        const limit = connections > 1 ? count : count / 2;
        if (!waiting && accepted < limit && sender.sendable()) {
            waiting = true;
            sender.send({ durable: true, body: types.wrap_long(accepted) });
        } else if (accepted === limit && received.size === limit) {
            if (limit === count) {
                clearTimeout(timer);
                receiver.close();
                sender.close();
                connection.close();
                sayLast({ received: [...received], connections });
            } else if (!halfway) {
                halfway = true;
                say({ halfway });
            }
        }
    };
    container.on('connection_open', () => { connections++; waiting = false; });
    container.on('sendable', go);
    container.on('accepted', () => { waiting = false; accepted++; go(); });
    container.on('message', (context) => { received.add(Number(context.message.body)); go(); });
    // rhea tells of a close with amqp:connection:forced as of any other, and connects again by itself.
    ['receiver_close', 'sender_close', 'receiver_error', 'sender_error'].forEach(
        (name) => container.on(name, () => sayLast({ ended: name })),
    );
    say({ ready: 1 });
}

const ROLES = { open, send, receive, rpc, answer, mirror, serve, survive };
ROLES[process.argv[2]](JSON.parse(process.argv[3]));
