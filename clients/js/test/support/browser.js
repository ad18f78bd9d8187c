// A browser, and what its pages load.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { join } from 'node:path';

import { chromium } from 'playwright-core';

const DIST = join(import.meta.dirname, '../../dist');
const PATHS = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'];

/** A page, the scripts `/client.js` and others by their paths, and the application's token server. */
export async function servePages(rest, scripts = {}) {
  const server = createServer(async (request, response) => {
    if (request.url.startsWith('/auth')) {
      const ttl = Number(new URL(request.url, 'http://localhost').searchParams.get('ttl') ?? 3_600_000);
      const asked = await rest.auth.createTokenRequest({ clientId: 'ann', ttl });
      return response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(asked));
    }
    const script = request.url === '/client.js' ? readFileSync(join(DIST, 'index.js')) : scripts[request.url];
    if (script) return response.writeHead(200, { 'content-type': 'text/javascript' }).end(script);
    response.writeHead(200, { 'content-type': 'text/html' }).end('<!doctype html><title>page</title>');
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  return { server, url: `http://127.0.0.1:${server.address().port}` };
}

/** A real browser. Undefined where there is none, which is an error in CI. */
export async function openBrowser() {
  for (const executablePath of PATHS) {
    try {
      return await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] });
    } catch (error) {
      if (!/executable doesn't exist/i.test(error.message)) throw error;
    }
  }
  assert.notEqual(process.env.CI, 'true', `none of ${PATHS} is here`);
  return undefined;
}
