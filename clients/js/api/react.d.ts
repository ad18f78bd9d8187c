/**
 * React hooks over a `Realtime`, for React 18 and later.
 *
 * @packageDocumentation
 */
import type { Channel, ChannelOptions, ChannelState, ConnectionState, MessageDraft, MessageListener, PresenceMember, Realtime } from '@fanfare/client';
import { type FunctionComponentElement, type ProviderProps, type ReactNode } from 'react';
/** Gives its children a client. Who made the client closes it. */
export declare function FanfareProvider(props: {
    client: Realtime;
    children?: ReactNode;
}): FunctionComponentElement<ProviderProps<Realtime | undefined>>;
/** The client of the provider around. */
export declare function useFanfare(): Realtime;
/** The state of the connection. */
export declare function useConnectionState(): ConnectionState;
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
export declare function useChannel(name: string, listener?: MessageListener, options?: ChannelOptions): UseChannel;
/** The members of a channel, without being one. */
export declare function usePresenceMembers(name: string): readonly PresenceMember[];
export interface UsePresence {
    members: readonly PresenceMember[];
    /** Replaces the data of this member. */
    update: (data?: unknown) => Promise<void>;
    /** Why this client could not enter. */
    error: Error | undefined;
}
/** Enters a channel while the component is mounted, under the connection's client id. A change of `data` is an update. */
export declare function usePresence(name: string, data?: unknown): UsePresence;
