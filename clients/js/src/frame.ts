/** Operations of the socket protocol. */
export const Op = {
  heartbeat: 0,
  ack: 1,
  nack: 2,
  connected: 3,
  disconnected: 4,
  close: 5,
  closed: 6,
  error: 7,
  attach: 8,
  attached: 9,
  detach: 10,
  detached: 11,
  presence: 12,
  message: 13,
  sync: 14,
  auth: 15,
  occupancy: 16,
} as const;

/** What a connection receives of a channel. */
export type ChannelMode = 'subscribe' | 'publish' | 'presence';

/** A message to be published. */
export interface MessageDraft {
  /** The event's name, up to 256 bytes. */
  name?: string;
  /** Any JSON. */
  data?: unknown;
  /** Passed through to subscribers. */
  extras?: Record<string, unknown>;
  /** An id of your own, up to 128 bytes: a second publish with it within two minutes goes nowhere. */
  id?: string;
}

/** A message that was published. `Data` is what the application expects its data to be; nothing checks that. */
export interface Message<Data = unknown> {
  id: string;
  name?: string;
  data: Data;
  extras?: Record<string, unknown>;
  /** The publisher's identity, if it has one. */
  clientId?: string;
  /** The publisher's connection. */
  connectionId: string;
  /** Epoch milliseconds, of the node. */
  timestamp: number;
}

/** A member of a channel. */
export interface PresenceMember {
  clientId: string;
  connectionId: string;
  data?: unknown;
  /** Epoch milliseconds, of the node: when it entered or was last updated. */
  timestamp: number;
}

/** The counts of a channel. */
export interface Occupancy {
  /** Connections that are attached. */
  connections: number;
  /** Connections whose credential may publish. */
  publishers: number;
  /** Connections that receive messages. */
  subscribers: number;
  /** Presence members. */
  members: number;
  /** All nodes, or, where another one does not answer, the connections of this node alone. */
  source: 'cluster' | 'node';
}

export type PresenceEvent = PresenceMember & { action: 'enter' | 'update' | 'leave' };

/** A frame of the client without its `id`. */
export type Request =
  | { op: typeof Op.attach; channel: string; serial?: string; rewind?: string; modes?: ChannelMode[]; occupancy?: boolean }
  | { op: typeof Op.detach; channel: string }
  | { op: typeof Op.message; channel: string; messages: MessageDraft[] }
  | { op: typeof Op.presence; channel: string; action: 'enter' | 'update' | 'leave'; clientId?: string; data?: unknown }
  | { op: typeof Op.auth; accessToken: string }
  | { op: typeof Op.heartbeat }
  | { op: typeof Op.close };

export type ClientFrame = Request & { id?: string };

/** A frame of the node: the fields of every operation, so that a frame of a later version is read too. */
export interface ServerFrame {
  op: number;
  id?: string;
  channel?: string;
  error?: string;
  code?: number;
  reason?: string;
  serial?: string;
  serials?: string[];
  resumed?: boolean;
  warning?: string;
  modes?: ChannelMode[];
  messages?: Message[];
  members?: PresenceMember[];
  more?: boolean;
  /** Whether members follow (op 9), or events (op 12). */
  presence?: boolean | PresenceEvent[];
  occupancy?: Omit<Occupancy, 'source'>;
  source?: Occupancy['source'];
  connectionId?: string;
  connectionKey?: string;
  clientId?: string;
  nodeId?: string;
  heartbeatMs?: number;
  resumeWindowMs?: number;
  maxMessageBytes?: number;
  expires?: number;
  serverTime?: number;
  reconnectAfterMs?: number;
}

/** A frame as it is sent. */
export type Encoded = string | Uint8Array<ArrayBuffer>;

/** How frames are written on a socket. */
export interface Codec {
  /** The value of the parameter `format`. */
  readonly format: 'json' | 'msgpack';
  encode(frame: object): Encoded;
  decode(data: string | ArrayBuffer): unknown;
}

export const json: Codec = {
  format: 'json',
  encode: (frame) => JSON.stringify(frame),
  decode: (data) => JSON.parse(data as string),
};
