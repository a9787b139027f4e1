// amqplib has persistent messages confirmed, and one nacked; prints what came of it.
const amqp = require('amqplib');

async function main(url) {
  const connection = await amqp.connect(url);
  const channel = await connection.createConfirmChannel();
  await channel.assertQueue('q', {durable: true});
  let confirmed = 0;
  for (let i = 0; i < 100; i++) {
    channel.sendToQueue('q', Buffer.from('m' + i), {persistent: true}, (error) => {
      if (!error) confirmed++;
    });
  }
  await channel.waitForConfirms();
  console.log('confirmed', confirmed);
  console.log('waiting', (await channel.checkQueue('q')).messageCount);
  await channel.assertQueue('full', {
    durable: true, arguments: {'x-max-length': 1, 'x-overflow': 'reject-publish'},
  });
  const outcomes = {acknowledged: 0, nacked: 0};
  for (let i = 0; i < 2; i++) {
    await new Promise((done) => channel.sendToQueue(
      'full', Buffer.from('x'), {persistent: true}, (error) => {
        outcomes[error ? 'nacked' : 'acknowledged']++;
        done();
      }));
  }
  console.log('acknowledged', outcomes.acknowledged);
  console.log('nacked', outcomes.nacked);
  await connection.close();
}

main(process.argv[2]).catch((error) => { console.error(error); process.exit(1); });
