// SPDX-License-Identifier: Apache-2.0
// A Node.js server with 300,000 objects, a map over them and a counter in memory. It listens on :8080:
//
//   GET /ask?key=N   {"count": C, "value": {...}}
//   GET /checksum    {"count": C, "checksum": "..."} over all objects
'use strict';
const http = require('http');
const crypto = require('crypto');

const size = 300000;
const items = new Map();
for (let i = 0; i < size; i++) {
  items.set('key-' + i, { id: i, name: 'item ' + i, tags: ['t' + (i % 97), 't' + (i % 89)], score: (i * 2654435761) % 1000003 });
}
let count = 0;

http.createServer((request, response) => {
  const url = new URL(request.url, 'http://localhost');
  const reply = { count };
  if (url.pathname === '/ask') {
    reply.count = ++count;
    reply.value = items.get('key-' + url.searchParams.get('key'));
  } else if (url.pathname === '/checksum') {
    const sum = crypto.createHash('sha256');
    for (const [key, value] of items) sum.update(key + JSON.stringify(value));
    reply.checksum = sum.digest('hex');
  } else {
    response.writeHead(404).end();
    return;
  }
  response.writeHead(200, { 'Content-Type': 'application/json' }).end(JSON.stringify(reply) + '\n');
}).listen(8080, () => console.log('ready'));
