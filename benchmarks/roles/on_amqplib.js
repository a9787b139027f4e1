// The measured roles of 0-9-1 on amqplib, written as its own examples are (see processes.py).
'use strict';

const fs = require('fs');
const path = require('path');

const amqp = require('amqplib');

const say = (line) => console.log(JSON.stringify(line));
const now = () => performance.now() / 1000;
const cpu = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };

function filler(size) {
    const octets = Buffer.alloc(size);
    for (let i = 0; i < size; i++) octets[i] = i % 251;
    return octets;
}

async function dial(options) {
    return amqp.connect(`amqp://guest:guest@127.0.0.1:${options.port}`, { noDelay: true });
}

// Publishes for a while, as fast as the socket takes it, or with so many that are not confirmed.
async function source091(options) {
    const connection = await dial(options);
    const channel = options.confirmed ? await connection.createConfirmChannel() : await connection.createChannel();
    const body = filler(options.size);
    const persistent = { persistent: Boolean(options.durable) };
    const keys = options.keys || 0;
    say({ ready: 1 });
    const started = now();
    const until = started + options.warmup + options.seconds;
    let sent = 0;
    let confirmed = 0;
    let warm = 0;
    let startedCpu = 0;
    let resume = () => {};
    const told = (error) => { if (error) throw error; confirmed++; resume(); };
    while (now() < until) {
        let room = true;
        for (let i = 0; i < 32; i++) {
            const key = keys ? `k${sent % keys}.a.b` : options.address;
            room = options.confirmed
                ? channel.publish(options.exchange || '', key, body, persistent, told)
                : channel.publish(options.exchange || '', key, body, persistent);
            sent++;
        }
        if (!warm && now() - started >= options.warmup) { warm = sent; startedCpu = cpu(); }
        while (options.confirmed && sent - confirmed >= options.credit) await new Promise((done) => { resume = done; });
        if (!room) await new Promise((done) => channel.once('drain', done));
        else if (sent % 1024 === 0) await new Promise(setImmediate);
    }
    if (options.confirmed) await channel.waitForConfirms();
    const result = { n: sent, measured: sent - warm, cpu: cpu() - startedCpu };
    await channel.close();
    await connection.close();
    say(result);
    process.exit(0);
}

// Takes from a queue, which it declares, as many messages as a line of its input says.
async function consume091(options) {
    const connection = await dial(options);
    const channel = await connection.createChannel();
    const { address, durable } = options;
    await channel.assertQueue(address, { durable: Boolean(durable) });
    await channel.prefetch(options.credit);
    const result = { n: 0, measured: 0 };
    let came;
    let startedCpu;
    let expected = Infinity;
    const over = () => { result.cpu = cpu() - startedCpu; say(result); process.exit(0); };
    process.stdin.on('data', (line) => { expected = Number(line); if (result.n >= expected) over(); });
    await channel.consume(address, (message) => {
        channel.ack(message);
        const time = now();
        result.n++;
        if (result.first !== undefined) {
            result.measured++;
            result.last = time;
        } else {
            if (came === undefined) came = time;
            if (time - came >= options.warmup) { result.first = time; startedCpu = cpu(); }
        }
        if (result.n >= expected) over();
    });
    say({ ready: 1 });
}

// Binds a queue to a topic exchange by so many patterns, which the keys of a source fit one by one.
async function bind091(options) {
    const connection = await dial(options);
    const channel = await connection.createChannel();
    await channel.assertExchange(options.exchange, 'topic', { durable: false });
    await channel.assertQueue(options.address, { durable: false });
    say({ ready: 1 });
    for (let first = 0; first < options.keys; first += 500) {
        const some = [];
        for (let i = first; i < Math.min(first + 500, options.keys); i++) {
            some.push(channel.bindQueue(options.address, options.exchange, `k${i}.*.#`));
        }
        await Promise.all(some);
    }
    say({ n: options.keys });
    process.exit(0);
}

function version() {
    // It exports no package.json.
    const folder = path.dirname(require.resolve('amqplib'));
    const { version: library } = JSON.parse(fs.readFileSync(path.join(folder, 'package.json')));
    say({ ready: 1, version: library, node: process.versions.node });
}

const ROLES = { source091, consume091, bind091, version };
Promise.resolve(ROLES[process.argv[2]](JSON.parse(process.argv[3]))).catch((error) => { console.error(error); process.exit(1); });
