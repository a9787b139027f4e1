// Performs steps with ServiceBusClient as they are read, a line of JSON each, and answers each with a line.
//
//   node messaging.js CONNECTION_STRING [websocket]
//
// A step is [method, ...arguments] of the table below. Senders, receivers and messages keep the names that the
// steps give them.
const readline = require("node:readline");
const { ServiceBusClient } = require("@azure/service-bus");

const [, , text, transport] = process.argv;
const retryOptions = { maxRetries: 0, timeoutInMs: 10000 };
const webSocketOptions = transport === "websocket" ? { webSocket: WebSocket } : undefined;
const client = new ServiceBusClient(text, { retryOptions, webSocketOptions });
const senders = new Map();
const receivers = new Map();
const messages = new Map();

function sender(name) {
  if (!senders.has(name)) senders.set(name, client.createSender(name));
  return senders.get(name);
}

function shown(message) {
  const key = `${message.sequenceNumber}`;
  messages.set(key, message);
  return {
    key,
    body: Buffer.isBuffer(message.body) ? message.body.toString() : message.body,
    deliveryCount: message.deliveryCount,
    state: message.state,
    subject: message.subject,
    applicationProperties: message.applicationProperties,
    deadLetterReason: message.deadLetterReason,
    deadLetterErrorDescription: message.deadLetterErrorDescription,
    deadLetterSource: message.deadLetterSource,
  };
}

const steps = {
  send: async (name, body) => void (await sender(name).sendMessages(body)),
  schedule: async (name, body, inMs) => {
    const at = new Date(Date.now() + inMs);
    return (await sender(name).scheduleMessages(body, at)).map(String);
  },
  cancel: async (name, numbers) =>
    void (await sender(name).cancelScheduledMessages(numbers.map((each) => Long(each)))),
  open: async (name, path, options = {}) => {
    receivers.set(name, client.createReceiver(...path, options));
  },
  accept: async (name, path, session, options = {}) => {
    const receiver =
      session === null
        ? await client.acceptNextSession(...path, options)
        : await client.acceptSession(...path, session, options);
    receivers.set(name, receiver);
    return receiver.sessionId;
  },
  receive: async (name, count, maxWaitTimeInMs = 5000) =>
    (await receivers.get(name).receiveMessages(count, { maxWaitTimeInMs })).map(shown),
  // Resolves with the bodies of the first messages, whose handler fails if asked.
  subscribe: (name, count, options = {}, fails = false) =>
    new Promise((resolve, reject) => {
      const found = [];
      const subscription = receivers.get(name).subscribe(
        {
          processMessage: async (message) => {
            found.push(shown(message).body);
            if (found.length === count) subscription.close().then(() => resolve(found), reject);
            if (fails) throw new Error("the handler fails");
          },
          processError: async ({ error }) => {
            if (!fails) reject(error);
          },
        },
        options,
      );
    }),
  deferred: async (name, key) => {
    const number = messages.get(key).sequenceNumber;
    return (await receivers.get(name).receiveDeferredMessages(number)).map(shown);
  },
  peek: async (name, count, { from, ...options } = {}) => {
    if (from) options.fromSequenceNumber = Long(from);
    return (await receivers.get(name).peekMessages(count, options)).map(shown);
  },
  settle: async (name, how, key, options) =>
    void (await receivers.get(name)[`${how}Message`](messages.get(key), options)),
  renew: async (name, key) =>
    (await receivers.get(name).renewMessageLock(messages.get(key))).getTime(),
  session: async (name, method, value) => {
    const result = await receivers.get(name)[method](value);
    return result instanceof Date ? result.getTime() : (result ?? null);
  },
  rules: async (topic, subscription, method, ...args) => {
    const manager = client.createRuleManager(topic, subscription);
    if (method !== "list") return (await manager[method](...args)) ?? null;
    return manager.getRules();
  },
  close: async (name) => void (await receivers.get(name).close()),
};

function Long(text) {
  return require("long").fromString(text);
}

async function main() {
  const lines = readline.createInterface({ input: process.stdin });
  for await (const line of lines) {
    const [method, ...args] = JSON.parse(line);
    let answer;
    try {
      answer = { value: (await steps[method](...args)) ?? null };
    } catch (error) {
      const { name, code, message } = error;
      answer = { error: { name, code, message } };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
  await client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
