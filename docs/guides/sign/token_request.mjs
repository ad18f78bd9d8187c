// FANFARE_KEY=<secret>.<keyName> node token_request.mjs [CLIENT_ID] [CAPABILITY]
import { createHmac, randomBytes } from 'node:crypto';

/** A request for a token that lasts an hour. An empty capability asks for everything that the key allows. */
function tokenRequest(key, clientId, capability) {
  const dot = key.lastIndexOf('.');
  if (dot < 1) throw new Error('FANFARE_KEY must be <secret>.<keyName>');
  const [secret, keyName] = [key.slice(0, dot), key.slice(dot + 1)];
  const ttl = 60 * 60 * 1000;
  const timestamp = Date.now();
  const nonce = randomBytes(16).toString('hex');
  const text = [keyName, ttl, capability, clientId, timestamp, nonce].map((value) => `${value}\n`).join('');
  const mac = createHmac('sha256', secret).update(text).digest('base64');
  return { keyName, ttl, capability, clientId, timestamp, nonce, mac };
}

const [clientId = '', capability = ''] = process.argv.slice(2);
console.log(JSON.stringify(tokenRequest(process.env.FANFARE_KEY ?? '', clientId, capability)));
