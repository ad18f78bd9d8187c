/**
 * Client of Fanfare for browsers and Node.
 *
 * @packageDocumentation
 */
export { Channel } from './channel.js';
export type {
  AttachedEvent,
  ChannelEvents,
  ChannelOptions,
  ChannelState,
  DiscontinuityEvent,
  MessageListener,
} from './channel.js';
export type { ConnectionState } from './driver.js';
export { Emitter, type Listener } from './emitter.js';
export { ErrorCode, FanfareError } from './error.js';
export type { ChannelMode, Codec, Encoded, Message, MessageDraft, Occupancy, PresenceEvent, PresenceMember } from './frame.js';
export type { AuthOptions, RealtimeOptions, RestOptions, TokenAnswer, WebSocketLike } from './options.js';
export { Presence } from './presence.js';
export type { PresenceAction, PresenceListener, PresenceMessage } from './presence.js';
export { Channels, Connection, Realtime } from './realtime.js';
export type { ConnectionEvents, ConnectionLoss, ConnectionStateChange } from './realtime.js';
export { Page, Queues, Rest, RestAuth, RestChannel, RestPresence } from './rest.js';
export type { BatchResult, HistoryParams, MetricRow, Queue, QueueFilter, QueueRule } from './rest.js';
export type { Capability, JwtParams, TokenDetails, TokenParams, TokenRequest } from './sign.js';
