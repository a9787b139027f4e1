// amqplib does what its users do; prints what came of it.
const amqp = require('amqplib');

async function main(url) {
  const connection = await amqp.connect(url);
  const channel = await connection.createConfirmChannel();
  await channel.assertExchange('from-node', 'topic', {durable: false});
  const {queue} = await channel.assertQueue('', {exclusive: true});
  await channel.bindQueue(queue, 'from-node', 'a.#');
  for (let i = 0; i < 50; i++) {
    channel.publish('from-node', 'a.' + i, Buffer.from('m' + i), {headers: {i}, persistent: true});
  }
  await channel.waitForConfirms();
  await channel.prefetch(5);
  let count = 0;
  await new Promise((done) => channel.consume(queue, (message) => {
    if (message.properties.headers.i !== count) throw new Error('out of order');
    channel.ack(message);
    if (++count === 50) done();
  }));
  console.log('received', count);
  const returned = new Promise((done) => channel.on('return', done));
  channel.publish('', 'nobody', Buffer.from('x'), {mandatory: true});
  console.log('returned', (await returned).fields.replyCode);
  const other = await connection.createChannel();
  other.on('error', (error) => console.log('error', error.code));
  await other.checkQueue('nowhere').catch(() => {});
  await connection.close();
  console.log('closed');
}

main(process.argv[2]).catch((error) => { console.error(error); process.exit(1); });
