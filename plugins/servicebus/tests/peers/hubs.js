// Performs steps with the clients of Event Hubs, and prints what each returned or threw.
//
//   node hubs.js CONNECTION_STRING HUB <steps.json >results.json
//
// A step is [operation, ...arguments]; the operations are below. Producers have names and live until the end.
const {
  EventHubBufferedProducerClient,
  EventHubConsumerClient,
  EventHubProducerClient,
} = require("@azure/event-hubs");

const path = require("node:path");

const sdk = path.join(__dirname, "node_modules/@azure/event-hubs/dist/commonjs");
const [, , connection, hub] = process.argv;
// An error of the service is a result; repeating the operation would only take time.
const once = { retryOptions: { maxRetries: 0, timeoutInMs: 10_000 } };
const producers = new Map();

const operations = {
  // Make a producer. The SDK has idempotent producers behind properties that its buffered client sets.
  async producer(name, { idempotent = false, partitions = undefined } = {}) {
    const client = new EventHubProducerClient(connection, hub, once);
    client._enableIdempotentRetries = idempotent;
    client._partitionOptions = partitions;
    producers.set(name, client);
  },

  async send(name, bodies, options = {}) {
    const events = bodies.map((body) => ({ body }));
    await producers.get(name).sendBatch(events, options);
    return events.map((event) => event._publishedSequenceNumber ?? null);
  },

  async batch(name, bodies, options = {}) {
    const batch = await producers.get(name).createBatch(options);
    for (const body of bodies) {
      if (!batch.tryAdd({ body, messageId: `m-${body}` })) throw new Error("the batch is full");
    }
    await producers.get(name).sendBatch(batch);
    return {
      most: batch.maxSizeInBytes,
      started: batch.startingPublishedSequenceNumber ?? null,
    };
  },

  // The state that the link of an idempotent producer was answered with, and has counted since.
  async publishing(name, partition) {
    return producers.get(name).getPartitionPublishingProperties(partition);
  },

  // Forget that the last batch was sent, as after the loss of its outcome.
  async forget(name, partition, count) {
    const sender = producers.get(name)._sendersMap.get(partition);
    sender._localPublishingProperties.lastPublishedSequenceNumber -= count;
  },

  async buffered(bodies, keys, options = {}) {
    const failed = [];
    const client = new EventHubBufferedProducerClient(connection, hub, {
      ...once,
      ...options,
      maxWaitTimeInMs: 100,
      onSendEventsErrorHandler: async (context) => failed.push(String(context.error)),
    });
    for (const [index, body] of bodies.entries()) {
      await client.enqueueEvent({ body }, keys.length ? { partitionKey: keys[index] } : {});
    }
    await client.close({ flush: true });
    return failed;
  },

  async receive(group, partition, position, count, options = {}) {
    const client = new EventHubConsumerClient(group, connection, hub, once);
    const found = [];
    let last = null;
    let error = null;
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 10_000);
      const end = () => {
        clearTimeout(timer);
        resolve();
      };
      client.subscribe(
        partition,
        {
          async processEvents(events, context) {
            found.push(...events);
            last = context.lastEnqueuedEventProperties ?? null;
            if (found.length >= count) end();
          },
          async processError(failure) {
            error = { code: failure.code, message: failure.message };
            end();
          },
        },
        { startPosition: position, maxWaitTimeInSeconds: 1, ...options },
      );
    });
    await client.close();
    return {
      error,
      last,
      events: found.map((event) => ({
        body: event.body,
        number: event.sequenceNumber,
        offset: event.offset,
        key: event.partitionKey ?? null,
        time: event.enqueuedTimeUtc.getTime(),
        properties: event.systemProperties ?? {},
        annotations: event.getRawAmqpMessage().messageAnnotations ?? {},
      })),
    };
  },

  // The partitions that the SDK computes for keys.
  async partitions(keys, count) {
    const { mapPartitionKeyToId } = require(path.join(sdk, "impl/partitionKeyToIdMapper.js"));
    return keys.map((key) => mapPartitionKeyToId(key, count));
  },

  async hub() {
    const client = new EventHubConsumerClient("$Default", connection, hub, once);
    try {
      return await client.getEventHubProperties();
    } finally {
      await client.close();
    }
  },

  async partition(id) {
    const client = new EventHubConsumerClient("$Default", connection, hub, once);
    try {
      return await client.getPartitionProperties(id);
    } finally {
      await client.close();
    }
  },
};

async function main() {
  let text = "";
  for await (const chunk of process.stdin) text += chunk;
  const results = [];
  for (const [operation, ...args] of JSON.parse(text)) {
    try {
      results.push({ value: (await operations[operation](...args)) ?? null });
    } catch (error) {
      const { name, code, message } = error;
      results.push({ error: { name, code, message } });
    }
  }
  for (const client of producers.values()) await client.close();
  process.stdout.write(JSON.stringify(results));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
