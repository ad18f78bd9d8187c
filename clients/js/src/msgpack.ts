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
  // By way of JSON, so that data has the same form in both.
  encode: (frame) => encode(JSON.parse(JSON.stringify(frame))) as Uint8Array<ArrayBuffer>,
  decode: (data) => decode(new Uint8Array(data as ArrayBuffer)),
};
