// The gateway of the shop, on rhea: a plain AMQP client of one member, which knows nothing of the mesh.
//
//     node gateway.js --check                print the version of rhea that was found
//     node gateway.js HOST PORT COUNT        place COUNT orders, and print each sale as a line of JSON
'use strict';

const path = require('path');

function load(file) {
    const paths = [process.cwd(), __dirname, path.join(__dirname, '..', '..', 'tests', 'peers')];
    return require(require.resolve(file, { paths }));
}

const rhea = load('rhea');

function main(host, port, count) {
    const SKUS = ['teapot', 'cup', 'kettle', 'strainer'];
    const connection = rhea.connect({ host, port, container_id: 'gateway', reconnect: false });
    const orders = connection.open_sender('order');
    let replyTo;
    let placed = 0;
    let answered = 0;

    function place() {
        placed += 1;
        const order = { number: placed, sku: SKUS[placed % SKUS.length], count: 1 + placed % 3 };
        orders.send({
            message_id: String(placed),
            reply_to: replyTo,
            content_type: 'application/json',
            body: rhea.message.data_section(Buffer.from(JSON.stringify(order))),
        });
        if (placed < count) setTimeout(place, 100);
    }

    // The member creates an address for the answers, as for any client.
    connection.open_receiver({ source: { dynamic: true } }).on('receiver_open', ({ receiver }) => {
        replyTo = receiver.source.address;
        place();
    });
    connection.on('message', ({ message }) => {
        const failed = (message.application_properties || {}).statusCode >= 400;
        console.log(failed ? JSON.stringify({ failed: message.application_properties.statusDescription })
            : message.body.content.toString());
        answered += 1;
        if (answered === count) connection.close();
    });
    for (const bad of ['connection_error', 'disconnected', 'sender_error', 'rejected', 'released', 'modified']) {
        connection.on(bad, (context) => {
            console.error(`${bad}: ${context.error || ''}`);
            process.exit(1);
        });
    }
    connection.on('connection_close', () => process.exit(0));
}

if (process.argv[2] === '--check') console.log(load('rhea/package.json').version);
else main(process.argv[2], Number(process.argv[3]), Number(process.argv[4]));
