import { WebSocket } from 'ws';
import { usePlatform } from './websocket.js';

// Node's own, from version 22 on, tells late that a connection was refused.
usePlatform(WebSocket);

export * from './index.js';
