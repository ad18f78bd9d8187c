import assert from 'node:assert/strict';

/** Remembers what a channel gives, and whether anything is missing, doubled or out of order. */
export class Recorder {
  /** Numbers by publisher. */
  heard = new Map();
  gaps = 0;
  faults = [];

  constructor(channel) {
    channel.on('discontinuity', () => this.#gap());
    channel.subscribe(({ data }) => this.#take(data));
  }

  #gap() {
    this.gaps += 1;
    // From here on each publisher may begin anywhere.
    for (const heard of this.heard.values()) heard.isFree = true;
  }

  #take({ publisher, number }) {
    const heard = this.heard.get(publisher) ?? { last: -1, isFree: false, all: new Set() };
    this.heard.set(publisher, heard);
    if (!heard.isFree && number !== heard.last + 1) {
      this.faults.push(`${publisher}: ${number} after ${heard.last}`);
    }
    heard.isFree = false;
    heard.last = number;
    heard.all.add(number);
  }

  /** All up to `count` of each publisher, in order, each once. */
  assertComplete(count, publishers) {
    assert.deepEqual(this.faults, []);
    for (const publisher of publishers) assert.equal(this.heard.get(publisher)?.last, count - 1, publisher);
  }
}

/** Publishes numbers one after another until `stop()`. */
export class Publisher {
  published = 0;
  #isStopped = false;

  constructor(channel, name, pauseMs = 2) {
    this.name = name;
    this.running = this.#run(channel, pauseMs);
  }

  async #run(channel, pauseMs) {
    while (!this.#isStopped) {
      await channel.publish('n', { publisher: this.name, number: this.published });
      this.published += 1;
      if (pauseMs > 0) await new Promise((done) => setTimeout(done, pauseMs));
    }
  }

  async stop() {
    this.#isStopped = true;
    await this.running;
    return this.published;
  }
}
