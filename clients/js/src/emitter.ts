/** A function that hears of an event. */
export type Listener<Args extends unknown[]> = (...args: Args) => void;

/** Events by name. A listener that throws is reported on the console and keeps no other from its event. */
export class Emitter<Events extends { [name: string]: unknown[] }> {
  readonly #listeners = new Map<keyof Events, Set<Listener<never>>>();

  /**
   * Calls `listener` at each event of this name.
   * @returns a function that removes the listener
   */
  on<Name extends keyof Events>(name: Name, listener: Listener<Events[Name]>): () => void {
    const listeners = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, listeners.add(listener));
    return () => this.off(name, listener);
  }

  /** Calls `listener` at the next event of this name alone. */
  once<Name extends keyof Events>(name: Name, listener: Listener<Events[Name]>): () => void {
    const off = this.on(name, (...args) => {
      off();
      listener(...args);
    });
    return off;
  }

  /** Removes a listener, or without one all of this name. */
  off<Name extends keyof Events>(name: Name, listener?: Listener<Events[Name]>): void {
    if (listener) this.#listeners.get(name)?.delete(listener);
    else this.#listeners.delete(name);
  }

  /** The number of listeners of this name. */
  listenerCount(name: keyof Events): number {
    return this.#listeners.get(name)?.size ?? 0;
  }

  /** @internal */
  emit<Name extends keyof Events>(name: Name, ...args: Events[Name]): void {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) call(listener as Listener<Events[Name]>, ...args);
  }
}

/** Calls a function of the application, whose errors are its own. */
export function call<Args extends unknown[]>(listener: Listener<Args>, ...args: Args): void {
  const failed = (error: unknown): void => console.error('fanfare: a listener failed', error);
  try {
    const result = listener(...args) as unknown;
    if (result instanceof Promise) result.catch(failed);
  } catch (error) {
    failed(error);
  }
}
