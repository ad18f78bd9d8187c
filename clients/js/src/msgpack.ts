/**
 * MessagePack for the frames of a `Realtime`.
 *
 * @packageDocumentation
 */
import { decode, encode } from '@msgpack/msgpack';
import type { Codec } from '@fanfare/client';

/** To be given as the option `codec`: frames are smaller than in JSON. */
export const msgpack: Codec = {
  format: 'msgpack',
  encode: (frame) => encode(frame, { ignoreUndefined: true }) as Uint8Array<ArrayBuffer>,
  decode: (data) => decode(new Uint8Array(data as ArrayBuffer)),
};
