import { WebSocket } from 'ws';
import { usePlatform } from './websocket.js';

// Node has a WebSocket of its own from version 22 on.
usePlatform(WebSocket);

export * from './index.js';
