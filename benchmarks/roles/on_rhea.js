// The measured roles on rhea, written as its own examples are (see processes.py).
'use strict';

const rhea = require('rhea');

const { message, types } = rhea;

const say = (line) => console.log(JSON.stringify(line));
const now = () => performance.now() / 1000;
const cpu = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };

function filler(size) {
    const octets = Buffer.alloc(size);
    for (let i = 0; i < size; i++) octets[i] = i % 251;
    return octets;
}

function dial(options, extra) {
    const settings = { host: '127.0.0.1', port: options.port, reconnect: false, tcp_no_delay: true, ...extra };
    if (options.sasl) settings.username = 'anonymous';
    return rhea.connect(settings);
}

function listen() {
    const server = rhea.listen({ host: '127.0.0.1', port: 0, tcp_no_delay: true });
    server.on('listening', () => say({ ready: 1, port: server.address().port }));
    return server;
}

function quiet() {
    rhea.on('disconnected', () => {});
    rhea.on('error', () => {});
}

function onInputEnd(result) {
    process.stdin.on('end', () => { say(result); process.exit(0); }).resume();
}

// Counts messages, and times those that come once the virtual machine is warm.
class Tally {
    constructor(options) {
        this.warmup = options.warmup;
        this.result = { n: 0, measured: 0 };
    }

    count() {
        const { result } = this;
        const time = now();
        result.n++;
        if (result.first !== undefined) {
            result.measured++;
            result.last = time;
        } else {
            if (this.came === undefined) this.came = time;
            if (time - this.came >= this.warmup) { result.first = time; this.cpu = cpu(); }
        }
    }

    end() { this.result.cpu = cpu() - this.cpu; }
}

// A server that accepts what comes.
function sink(options) {
    const tally = new Tally(options);
    rhea.options.receiver_options = { credit_window: options.credit };
    rhea.on('message', (context) => {
        void context.message.body;
        tally.count();
    });
    rhea.on('connection_close', () => tally.end());
    quiet();
    listen();
    onInputEnd(tally.result);
}

// A client that sends for a while, as fast as credit allows, or at a rate.
function source(options) {
    const body = filler(options.size);
    const connection = dial(options);
    const sender = connection.open_sender({
        target: { address: options.address || 'bench', durable: options.terminus_durability },
        snd_settle_mode: options.settled ? 1 : 0,
    });
    const all = options.warmup + options.seconds;
    const result = { n: 0 };
    let until = 0;
    let started = 0;
    let startedCpu = 0;
    let warm = 0;
    let confirmed = 0;
    let sent = 0;
    let pace;
    function begin() {
        if (until) return;
        started = now();
        until = started + all;
        if (options.rate) {
            pace = setInterval(() => {
                const time = now();
                const due = Math.min(time - started, all) * options.rate;
                while (sent < due && sender.sendable()) one();
                if (time >= until) { clearInterval(pace); pace = undefined; over(); }
            }, 1);
        }
    }
    function one() {
        const octets = options.rate ? Buffer.from(body) : body;
        if (options.rate) octets.writeBigUInt64BE(process.hrtime.bigint());
        const out = { message_id: types.wrap_ulong(sent), body: message.data_section(octets) };
        if (options.durable) out.durable = true;
        sender.send(out);
        sent++;
        if (!warm && sent % 32 === 0 && now() - started >= options.warmup) { warm = sent; startedCpu = cpu(); }
    }
    sender.on('sendable', () => {
        begin();
        if (options.rate) return;
        while (now() < until && sender.sendable()) for (let i = 0; i < 32 && sender.sendable(); i++) one();
        over();
    });
    sender.on('settled', () => { confirmed++; over(); });
    let closing = false;
    function over() {
        if (closing || pace || now() < until) return;
        if (options.settled) {
            // close() would overtake what rhea has not written.
            const { outgoing } = sender.session;
            if (outgoing.next_pending_delivery !== outgoing.next_delivery_id) { setTimeout(over, 2); return; }
        } else if (confirmed < sent) {
            return;
        }
        closing = true;
        Object.assign(result, { n: sent, measured: sent - warm, cpu: cpu() - startedCpu });
        connection.close();
    }
    connection.on('connection_close', () => { say(result); process.exit(0); });
    say({ ready: 1 });
}

// A client that receives from a broker as many messages as a line of its input says.
function consume(options) {
    const tally = new Tally(options);
    const { result } = tally;
    const latencies = [];
    let expected = Infinity;
    const connection = dial(options);
    const receiver = connection.open_receiver({
        source: { address: options.address, durable: options.terminus_durability },
        credit_window: options.credit,
    });
    receiver.on('receiver_open', () => say({ ready: 1 }));
    receiver.on('message', (context) => {
        const body = context.message.body.content;
        tally.count();
        if (options.latency && result.measured) latencies.push(Number(process.hrtime.bigint() - body.readBigUInt64BE()) / 1e6);
        if (result.n >= expected) over();
    });
    process.stdin.on('data', (line) => {
        expected = Number(line);
        if (result.n >= expected) over();
    });
    function over() {
        tally.end();
        if (latencies.length) {
            latencies.sort((a, b) => a - b);
            result.p50_ms = latencies[Math.floor(latencies.length / 2)];
            result.p99_ms = latencies[Math.floor((latencies.length * 99) / 100)];
        }
        say(result);
        process.exit(0);
    }
}

// A server that sends requests back to their reply-to.
function echo(options) {
    const tally = new Tally(options);
    const replies = new Map();
    rhea.options.receiver_options = { credit_window: options.credit };
    rhea.on('sender_open', ({ sender }) => {
        const address = rhea.generate_uuid();
        sender.set_source({ address });
        replies.set(address, sender);
    });
    rhea.on('message', (context) => {
        tally.count();
        const request = context.message;
        replies.get(request.reply_to).send({
            to: request.reply_to, correlation_id: request.message_id, body: message.data_section(request.body.content),
        });
    });
    rhea.on('connection_close', () => tally.end());
    quiet();
    listen();
    onInputEnd(tally.result);
}

// A client with a number of requests in flight.
function call(options) {
    const body = message.data_section(filler(options.size));
    const connection = dial(options);
    const sender = connection.open_sender('echo');
    const receiver = connection.open_receiver({ source: { dynamic: true }, credit_window: options.credit });
    const times = new Map();
    const latencies = [];
    let sent = 0;
    let until = 0;
    let started = 0;
    let warm = 0;
    let startedCpu = 0;
    let address;
    function begin() {
        if (until || !address || !sender.sendable()) return;
        started = now();
        until = started + options.warmup + options.seconds;
        for (let i = 0; i < options.in_flight; i++) request();
    }
    function request() {
        times.set(sent, now());
        sender.send({ message_id: types.wrap_ulong(sent), reply_to: address, body });
        sent++;
    }
    receiver.on('receiver_open', () => { address = receiver.source.address; begin(); });
    sender.on('sendable', begin);
    receiver.on('message', (context) => {
        const time = now();
        const id = Number(context.message.correlation_id);
        if (warm) latencies.push((time - times.get(id)) * 1000);
        else if (time - started >= options.warmup) { warm = time; startedCpu = cpu(); }
        times.delete(id);
        if (time < until) { request(); return; }
        if (times.size) return;
        latencies.sort((a, b) => a - b);
        const result = {
            n: latencies.length, elapsed: time - warm, cpu: cpu() - startedCpu,
            p50_ms: latencies[Math.floor(latencies.length / 2)],
            p99_ms: latencies[Math.floor((latencies.length * 99) / 100)],
        };
        connection.on('connection_close', () => { say(result); process.exit(0); });
        connection.close();
    });
    say({ ready: 1 });
}

// A client that connects, attaches a sender and closes, again and again.
function repeat(options) {
    const result = { n: 0 };
    say({ ready: 1 });
    const started = now();
    const startedCpu = cpu();
    (function again() {
        const connection = dial(options);
        const sender = connection.open_sender(options.address || 'bench');
        sender.on('sender_open', () => connection.close());
        connection.on('connection_close', () => {
            result.n++;
            const elapsed = now() - started;
            if (elapsed < options.seconds) { again(); return; }
            say({ ...result, elapsed, cpu: cpu() - startedCpu });
            process.exit(0);
        });
    }());
}

// Nanoseconds for the message that everybody codes.
function codec(options) {
    const body = filler(100);
    const encode = () => message.encode({
        message_id: types.wrap_ulong(17), user_id: Buffer.from('guest'), to: 'orders', subject: 'new',
        content_type: 'application/octet-stream',
        application_properties: { region: 'eu', attempt: 3, urgent: true },
        body: message.data_section(body),
    });
    const encoded = encode();
    const decode = () => { const m = message.decode(encoded); return [m.message_id, m.to, m.application_properties, m.body]; };
    say({ ready: 1 });
    say({
        message_encode: nanoseconds(encode, options.seconds), message_decode: nanoseconds(decode, options.seconds),
        size: encoded.length,
    });
}

function nanoseconds(operation, seconds) {
    for (let i = 0; i < 20000; i++) operation();
    let done = 0;
    const started = cpu();
    let elapsed = 0;
    while (elapsed < seconds) {
        for (let i = 0; i < 1000; i++) operation();
        done += 1000;
        elapsed = cpu() - started;
    }
    return (elapsed / done) * 1e9;
}

function version() {
    say({ version: require('rhea/package.json').version, node: process.version.slice(1) });
}

const ROLES = { sink, source, consume, echo, call, dial: repeat, codec, version };
ROLES[process.argv[2]](JSON.parse(process.argv[3] || '{}'));
