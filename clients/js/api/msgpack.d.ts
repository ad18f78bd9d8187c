import type { Codec } from '@fanfare/client';
/** To be given as the option `codec`: frames are smaller than in JSON. */
export declare const msgpack: Codec;
