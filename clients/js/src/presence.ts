import type { Host } from './channel.js';
import { passes } from './channel.js';
import { call } from './emitter.js';
import { ErrorCode, FanfareError, asError, badRequest } from './error.js';
import { Op, type PresenceEvent, type PresenceMember, type Request, type ServerFrame } from './frame.js';

/** `present`: was there before. The others are what a member did. */
export type PresenceAction = 'present' | PresenceEvent['action'];
export type PresenceMessage = PresenceMember & { action: PresenceAction };
export type PresenceListener = (event: PresenceMessage) => void;

const AGAIN_MS = 1_000;
/** Why an event stream refuses to enter. */
export const NEEDS_SOCKET = 'websocket_needed';

/** Who is at a channel. */
export class Presence {
  readonly #channel: string;
  readonly #host: Host;
  readonly #attach: () => Promise<void>;
  readonly #listeners = new Map<PresenceAction | undefined, Set<PresenceListener>>();
  #members = new Map<string, PresenceMember>();
  /** The members as a list, until they change. */
  #snapshot: readonly PresenceMember[] | undefined;
  readonly #watchers = new Set<() => void>();
  /** Those of the list that is being received. */
  #list: Map<string, PresenceMember> | undefined;
  /** The list is known. */
  #isSynced = false;
  /** Why the node tells no list. */
  #refusal: FanfareError | undefined;
  #waiting: { resolve: () => void; reject: (error: FanfareError) => void }[] = [];
  /** Members of this connection by client id; empty for the connection's own. They enter again on each connection. */
  readonly #own = new Map<string, unknown>();

  /** @internal */
  constructor(channel: string, host: Host, attach: () => Promise<void>) {
    this.#channel = channel;
    this.#host = host;
    this.#attach = attach;
  }

  /** Enters as the connection's client id. Members see `data`. It needs no attach. */
  enter(data?: unknown): Promise<void> {
    return this.#ask('enter', '', data);
  }

  /** Replaces the data of the member. */
  update(data?: unknown): Promise<void> {
    return this.#ask('update', '', data);
  }

  leave(data?: unknown): Promise<void> {
    return this.#ask('leave', '', data);
  }

  /** Enters under another client id, which the credential must leave open. */
  enterClient(clientId: string, data?: unknown): Promise<void> {
    return this.#ask('enter', clientId, data);
  }

  updateClient(clientId: string, data?: unknown): Promise<void> {
    return this.#ask('update', clientId, data);
  }

  leaveClient(clientId: string, data?: unknown): Promise<void> {
    return this.#ask('leave', clientId, data);
  }

  /** The members as far as they are known, in a list that is another one after each change. */
  get members(): readonly PresenceMember[] {
    return (this.#snapshot ??= [...this.#members.values()]);
  }

  /** Calls `changed` after each change of `members`. Attaches the channel. Gives a function that ends it. */
  onMembers(changed: () => void): () => void {
    this.#watchers.add(changed);
    this.#attach().catch(() => {});
    return () => void this.#watchers.delete(changed);
  }

  #changed(): void {
    this.#snapshot = undefined;
    for (const changed of [...this.#watchers]) call(changed);
  }

  /** The members. Attaches the channel, and waits until the node has told all of them. */
  async get(): Promise<PresenceMember[]> {
    await this.#attach();
    if (this.#refusal) throw this.#refusal;
    if (!this.#isSynced) await new Promise<void>((resolve, reject) => this.#waiting.push({ resolve, reject }));
    return [...this.#members.values()];
  }

  /**
   * Calls `listener` for each change, or for one kind of them; first with `present` for each member that is there. Attaches the
   * channel.
   * @returns a promise of the attach, which a caller may leave alone
   */
  subscribe(listener: PresenceListener): Promise<void>;
  subscribe(action: PresenceAction, listener: PresenceListener): Promise<void>;
  subscribe(action: PresenceAction | PresenceListener, listener?: PresenceListener): Promise<void> {
    const [of, added] = typeof action === 'string' ? [action, listener] : [undefined, action];
    if (typeof added !== 'function') throw badRequest('listener must be a function');
    const listeners = this.#listeners.get(of) ?? new Set();
    this.#listeners.set(of, listeners.add(added));
    if (this.#isSynced) {
      for (const member of this.#members.values()) if (!of || of === 'present') call(added, { ...member, action: 'present' });
    }
    return this.#attach();
  }

  /** Removes a listener, or all of one kind, or all. */
  unsubscribe(listener?: PresenceListener): void;
  unsubscribe(action: PresenceAction, listener?: PresenceListener): void;
  unsubscribe(action?: PresenceAction | PresenceListener, listener?: PresenceListener): void {
    const [of, removed] = typeof action === 'string' ? [action, listener] : [undefined, action];
    if (removed) this.#listeners.get(of)?.delete(removed);
    else if (of === undefined) this.#listeners.clear();
    else this.#listeners.delete(of);
  }

  async #ask(action: PresenceEvent['action'], clientId: string, data: unknown): Promise<void> {
    await this.#host.ask(this.#request(action, clientId, data));
    if (action === 'leave') this.#own.delete(clientId);
    else this.#own.set(clientId, data);
  }

  #request(action: PresenceEvent['action'], clientId: string, data: unknown): Request {
    const named = clientId === '' ? {} : { clientId };
    return { op: Op.presence, channel: this.#channel, action, ...named, ...(data === undefined ? {} : { data }) };
  }

  /** @internal A connection is there: own members enter again. */
  linked(): void {
    for (const clientId of this.#own.keys()) this.#enterAgain(clientId);
  }

  #enterAgain(clientId: string): void {
    if (!this.#own.has(clientId)) return;
    this.#host.ask(this.#request('enter', clientId, this.#own.get(clientId)), true).catch((error: unknown) => {
      const reason = asError(error, ErrorCode.internal);
      if (reason.code === ErrorCode.disconnected) return;
      if (passes(reason)) return void setTimeout(() => this.#enterAgain(clientId), AGAIN_MS);
      // The next connection may be a socket again.
      if (reason.reason === NEEDS_SOCKET) return;
      this.#own.delete(clientId);
      console.warn(`fanfare: ${clientId || 'the client'} is no member of ${this.#channel} any more`, reason);
    });
  }

  /** @internal The channel was attached; `follows`: the list of members comes next. */
  attached(isGranted: boolean, follows: boolean): void {
    this.#refusal = isGranted ? undefined : new FanfareError('the channel is attached without presence', ErrorCode.forbidden);
    if (this.#refusal) this.#giveUp(this.#refusal);
    else if (follows) this.#list = new Map();
    else this.#replace(new Map());
  }

  /** @internal */
  take(frame: ServerFrame): void {
    if (frame.op === Op.sync) {
      // An event stream tells the list without an answer before it.
      const list = (this.#list ??= new Map());
      for (const member of frame.members ?? []) list.set(keyOf(member), member);
      if (!frame.more) this.#replace(list);
      return;
    }
    for (const event of Array.isArray(frame.presence) ? frame.presence : []) {
      const { action, ...member } = event;
      if (action === 'leave') this.#members.delete(keyOf(member));
      else this.#members.set(keyOf(member), member);
      this.#tell(event);
    }
    this.#changed();
  }

  /** Takes the node's list for what was known, and tells how it differs. */
  #replace(list: Map<string, PresenceMember>): void {
    const before = this.#members;
    this.#members = list;
    this.#list = undefined;
    const wasSynced = this.#isSynced;
    this.#isSynced = true;
    for (const [key, member] of before) if (!list.has(key)) this.#tell({ ...member, action: 'leave' });
    for (const [key, member] of list) {
      const known = before.get(key);
      if (!known) this.#tell({ ...member, action: wasSynced ? 'enter' : 'present' });
      else if (known.timestamp !== member.timestamp) this.#tell({ ...member, action: 'update' });
    }
    this.#changed();
    for (const { resolve } of this.#waiting.splice(0)) resolve();
  }

  #tell(event: PresenceMessage): void {
    const all = [...(this.#listeners.get(undefined) ?? []), ...(this.#listeners.get(event.action) ?? [])];
    for (const listener of all) call(listener, event);
  }

  #giveUp(error: FanfareError): void {
    this.#list = undefined;
    this.#isSynced = false;
    this.#members.clear();
    this.#changed();
    for (const { reject } of this.#waiting.splice(0)) reject(error);
  }

  /** @internal The channel is not attached any more. */
  detached(): void {
    this.#refusal = undefined;
    this.#giveUp(new FanfareError('the channel was detached', ErrorCode.disconnected));
  }

}

function keyOf({ connectionId, clientId }: PresenceMember): string {
  return `${connectionId}\n${clientId}`;
}
