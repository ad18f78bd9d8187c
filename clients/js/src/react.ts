/**
 * React hooks over a `Realtime`, for React 18 and later.
 *
 * @packageDocumentation
 */
import type {
  Channel,
  ChannelOptions,
  ChannelState,
  ConnectionState,
  MessageDraft,
  MessageListener,
  PresenceMember,
  Realtime,
} from '@fanfare/client';
import {
  type FunctionComponentElement,
  type ProviderProps,
  type ReactNode,
  createContext,
  createElement,
  useCallback,
  useContext,
  useEffect,
  useRef,
  useState,
  useSyncExternalStore,
} from 'react';

const Context = createContext<Realtime | undefined>(undefined);

/** Gives its children a client. Who made the client closes it. */
export function FanfareProvider(props: {
  client: Realtime;
  children?: ReactNode;
}): FunctionComponentElement<ProviderProps<Realtime | undefined>> {
  return createElement(Context.Provider, { value: props.client }, props.children);
}

/** The client of the provider around. */
export function useFanfare(): Realtime {
  const client = useContext(Context);
  if (!client) throw new Error('useFanfare: there is no FanfareProvider around this component');
  return client;
}

/** The state of the connection. */
export function useConnectionState(): ConnectionState {
  const { connection } = useFanfare();
  const subscribe = useCallback((changed: () => void) => connection.on('change', changed), [connection]);
  const state = (): ConnectionState => connection.state;
  return useSyncExternalStore(subscribe, state, state);
}

/** Milliseconds that a channel outlives its last component, so that one which is mounted again finds it attached. */
const LINGER_MS = 200;

interface Use {
  count: number;
  /** Leaves the channel. */
  ending: ReturnType<typeof setTimeout> | undefined;
}
const uses = new WeakMap<Realtime, Map<string, Use>>();

/** Counts a use of something of a client. Gives a function that ends it; `end` is called a moment after the last one. */
function hold(client: Realtime, key: string, end: () => void): () => void {
  const all = uses.get(client) ?? new Map<string, Use>();
  uses.set(client, all);
  const use = all.get(key) ?? { count: 0, ending: undefined };
  all.set(key, use);
  clearTimeout(use.ending);
  use.count += 1;
  return () => {
    use.count -= 1;
    if (use.count > 0) return;
    use.ending = setTimeout(() => {
      all.delete(key);
      end();
    }, LINGER_MS);
  };
}

function holdChannel(client: Realtime, channel: Channel): () => void {
  // A failure is told by the channel's events.
  return hold(client, `channel ${channel.name}`, () => void channel.detach().catch(() => {}));
}

export interface UseChannel {
  channel: Channel;
  state: ChannelState;
  /** Publishes; resolves when the node has stored it. */
  publish: (name: string, data?: unknown) => Promise<void>;
  publishAll: (messages: MessageDraft | MessageDraft[]) => Promise<void>;
  /** How often messages may have been missed: an effect that depends on it can reload them. */
  discontinuities: number;
}

/**
 * A channel, attached while the component is mounted.
 * @param options - count when the channel is got for the first time
 */
export function useChannel(name: string, listener?: MessageListener, options?: ChannelOptions): UseChannel {
  const client = useFanfare();
  const channel = client.channels.get(name, options);
  const latest = useRef(listener);
  useEffect(() => {
    latest.current = listener;
  });
  const [discontinuities, setDiscontinuities] = useState(0);
  useEffect(() => {
    const release = holdChannel(client, channel);
    const hear: MessageListener = (message) => latest.current?.(message);
    const off = channel.on('discontinuity', () => setDiscontinuities((count) => count + 1));
    void channel.subscribe(hear).catch(() => {});
    return () => {
      channel.unsubscribe(hear);
      off();
      release();
    };
  }, [client, channel]);
  const subscribe = useCallback(
    (changed: () => void) => {
      const offs = (['attached', 'detached', 'failed'] as const).map((event) => channel.on(event, changed));
      return () => offs.forEach((off) => off());
    },
    [channel],
  );
  const current = (): ChannelState => channel.state;
  const state = useSyncExternalStore(subscribe, current, current);
  const publish = useCallback((event: string, data?: unknown) => channel.publish(event, data), [channel]);
  const publishAll = useCallback((messages: MessageDraft | MessageDraft[]) => channel.publish(messages), [channel]);
  return { channel, state, publish, publishAll, discontinuities };
}

const NOBODY: readonly PresenceMember[] = [];

/** The members of a channel, without being one. */
export function usePresenceMembers(name: string): readonly PresenceMember[] {
  const client = useFanfare();
  const channel = client.channels.get(name);
  const subscribe = useCallback(
    (changed: () => void) => {
      const release = holdChannel(client, channel);
      const off = channel.presence.onMembers(changed);
      return () => {
        off();
        release();
      };
    },
    [client, channel],
  );
  return useSyncExternalStore(
    subscribe,
    () => channel.presence.members,
    () => NOBODY,
  );
}

export interface UsePresence {
  members: readonly PresenceMember[];
  /** Replaces the data of this member. */
  update: (data?: unknown) => Promise<void>;
  /** Why this client could not enter. */
  error: Error | undefined;
}

/** Enters a channel while the component is mounted, under the connection's client id. A change of `data` is an update. */
export function usePresence(name: string, data?: unknown): UsePresence {
  const client = useFanfare();
  const { presence } = client.channels.get(name);
  const members = usePresenceMembers(name);
  const [error, setError] = useState<Error>();
  const text = JSON.stringify(data);
  useEffect(() => {
    const release = hold(client, `member ${name}`, () => void presence.leave().catch(() => {}));
    return release;
  }, [client, name, presence]);
  useEffect(() => {
    presence.enter(text === undefined ? undefined : JSON.parse(text)).then(() => setError(undefined), setError);
  }, [presence, text]);
  const update = useCallback((changed?: unknown) => presence.update(changed), [presence]);
  return { members, update, error };
}
