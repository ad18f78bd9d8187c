// Serves an example, and signs tokens for its pages: node examples/server.js chat
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { Rest } from '@fanfare/client';

const url = process.env.FANFARE_URL ?? 'http://127.0.0.1:8080';
const key = process.env.FANFARE_KEY ?? readFileSync(new URL('../../../data/dev-key', import.meta.url), 'utf8').trim();
const example = process.argv[2] ?? 'chat';
const rest = new Rest({ url, key });
const files = { '/': `./${example}/index.html`, '/client.js': '../dist/index.js' };
const types = { '/': 'text/html; charset=utf-8', '/client.js': 'text/javascript' };
const server = createServer(async (request, response) => {
  const { pathname, searchParams } = new URL(request.url, 'http://localhost');
  if (pathname === '/token') {
    // A real server takes the name from its session.
    const clientId = searchParams.get('clientId');
    if (!clientId) return response.writeHead(403).end('clientId is missing');
    const capability = { [`${example}:*`]: ['subscribe', 'publish', 'presence', 'history'] };
    return response.end(JSON.stringify(await rest.auth.createTokenRequest({ clientId, capability })));
  }
  if (pathname === '/node') return response.end(url);
  if (!files[pathname]) return response.writeHead(404).end();
  response.setHeader('content-type', types[pathname]).end(readFileSync(new URL(files[pathname], import.meta.url)));
});
server.listen(Number(process.env.PORT ?? 4000), '127.0.0.1', () => console.log(`http://127.0.0.1:${server.address().port}`));
