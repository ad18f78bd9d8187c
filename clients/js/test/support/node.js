// Real nodes for tests: the binary that cargo builds, on ports of the system's choice.
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

import { until } from './wait.js';

const ROOT = resolve(import.meta.dirname, '../../../..');
const BINARY = process.env.FANFARE_BINARY ?? join(process.env.CARGO_TARGET_DIR ?? join(ROOT, 'target'), 'debug/fanfare');

export const KEY = 'hush.k1';

const DIRECTORY = `
[[tenants]]
id = "acme"
[[tenants.accounts]]
id = "acme"
[[tenants.accounts.keys]]
name = "k1"
secret = "hush"
capability = { "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }
[[tenants.accounts.keys]]
name = "k2"
secret = "shush"
capability = { "open:*" = ["subscribe"] }
`;

export class Node {
  #folder = mkdtempSync(join(tmpdir(), 'fanfare-js-'));
  #environment;
  #process;
  #log = '';

  /** Starts a node. `environment`: further settings, by the names of their variables. */
  static async start(environment = {}) {
    const node = new Node();
    const directory = join(node.#folder, 'directory.toml');
    writeFileSync(directory, DIRECTORY);
    node.#environment = { FANFARE_DIRECTORY: directory, FANFARE_LISTEN: '127.0.0.1:0', ...environment };
    await node.#begin();
    return node;
  }

  async #begin() {
    rmSync(join(this.#folder, 'node.json'), { force: true });
    const environment = {
      PATH: process.env.PATH,
      FANFARE_DATA_DIR: this.#folder,
      FANFARE_ADMIN_LISTEN: '127.0.0.1:0',
      FANFARE_LIMITS_PUBLISHES_PER_SECOND: '0',
      FANFARE_DRAIN_TIMEOUT: '5s',
      ...this.#environment,
    };
    this.#process = spawn(BINARY, ['serve'], { env: environment, stdio: ['ignore', 'ignore', 'pipe'] });
    this.#process.stderr.on('data', (data) => (this.#log += data));
    this.exited = new Promise((done) => this.#process.on('exit', done));
    await until(() => this.#addresses(), `a node that is up: ${BINARY}`, () => this.#log);
    const { listen, admin, gossip } = this.#addresses();
    Object.assign(this, { listen, admin, gossip, url: `http://${listen}` });
    await until(async () => (await fetch(`http://${admin}/ready`)).ok, 'a node that is ready', () => this.#log);
  }

  #addresses() {
    try {
      return JSON.parse(readFileSync(join(this.#folder, 'node.json'), 'utf8'));
    } catch {
      return undefined;
    }
  }

  /** Ends the process at once. */
  async kill() {
    this.#process.kill('SIGKILL');
    await this.exited;
  }

  /** Lets the clients go elsewhere, and ends. */
  async drain() {
    this.#process.kill('SIGTERM');
    await this.exited;
  }

  /** Starts it again, at the same address. */
  async restart() {
    this.#environment.FANFARE_LISTEN = this.listen;
    await this.#begin();
  }

  async [Symbol.asyncDispose]() {
    await this.end();
  }

  async end() {
    if (this.#process.exitCode === null && this.#process.signalCode === null) await this.kill();
    rmSync(this.#folder, { recursive: true, force: true });
  }
}

/** Nodes that know each other. */
export async function startCluster(count, environment = {}) {
  const nodes = [];
  try {
    await fill(nodes, count, environment);
  } catch (error) {
    await Promise.all(nodes.map((node) => node.end()));
    throw error;
  }
  return nodes;
}

async function fill(nodes, count, environment) {
  const key = join(mkdtempSync(join(tmpdir(), 'fanfare-js-')), 'cluster.key');
  writeFileSync(key, randomBytes(32).toString('base64'), { mode: 0o600 });
  for (let number = 0; number < count; number++) {
    const seed = nodes.length > 0 ? { FANFARE_SEED: nodes[0].gossip } : {};
    nodes.push(
      await Node.start({
        FANFARE_NODE_ID: `n${number}`,
        FANFARE_STORE: 'none',
        FANFARE_GOSSIP_LISTEN: '127.0.0.1:0',
        FANFARE_PEER_LISTEN: '127.0.0.1:0',
        FANFARE_CLUSTER_KEY_FILE: key,
        ...seed,
        ...environment,
      }),
    );
  }
  const areLinked = async (node) => {
    const page = await (await fetch(`http://${node.admin}/metrics`)).text();
    return page.match(/^fanfare_peers_known(?:\{[^}]*\})? (\d+)$/m)?.[1] === String(count - 1);
  };
  for (const node of nodes) await until(() => areLinked(node), 'nodes that know each other');
}
