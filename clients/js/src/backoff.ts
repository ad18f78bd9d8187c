/** Milliseconds before an attempt, at random between zero and a bound that doubles with each attempt. */
export class Backoff {
  #attempt = 0;
  readonly #min: number;
  readonly #max: number;

  constructor(minMs: number, maxMs: number) {
    this.#min = minMs;
    this.#max = maxMs;
  }

  next(): number {
    const bound = Math.min(this.#max, this.#min * 2 ** this.#attempt);
    this.#attempt += this.#attempt < 30 ? 1 : 0;
    return Math.random() * bound;
  }

  reset(): void {
    this.#attempt = 0;
  }
}
