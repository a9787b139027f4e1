// Performs steps with ServiceBusAdministrationClient, and prints what each returned or threw.
//
//   node administration.js CONNECTION_STRING <steps.json >results.json
//   node administration.js HOST:PORT TOKEN <steps.json >results.json
//
// A step is [method, ...arguments]; {"$date": "…"} stands for a Date. Lists are collected; a step
// ["byPage", method, pageSize, ...arguments] collects the pages, each a list.
const { ServiceBusAdministrationClient } = require("@azure/service-bus");

function revive(key, value) {
  return value && typeof value === "object" && "$date" in value ? new Date(value.$date) : value;
}

async function collect(iterable) {
  const found = [];
  for await (const each of iterable) found.push(each);
  return found;
}

async function perform(client, [method, ...args]) {
  if (method === "byPage") {
    const [list, maxPageSize, ...rest] = args;
    return collect(client[list](...rest).byPage({ maxPageSize }));
  }
  const result = client[method](...args);
  return Symbol.asyncIterator in result ? collect(result) : result;
}

async function main() {
  let text = "";
  for await (const chunk of process.stdin) text += chunk;
  // An error of the service is a result; repeating it would only take time.
  const [, , place, token] = process.argv;
  const options = { retryOptions: { maxRetries: 0 } };
  const getToken = async () => ({ token, expiresOnTimestamp: Date.now() + 3600_000 });
  const client = token
    ? new ServiceBusAdministrationClient(place, { getToken }, options)
    : new ServiceBusAdministrationClient(place, options);
  const results = [];
  for (const step of JSON.parse(text, revive)) {
    try {
      results.push({ value: await perform(client, step) });
    } catch (error) {
      const { name, code, statusCode, message } = error;
      results.push({ error: { name, code, statusCode, message } });
    }
  }
  process.stdout.write(JSON.stringify(results));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
