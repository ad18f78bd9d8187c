// Programs of applications have types, and the compiler sees their mistakes.
import { ErrorCode, FanfareError, type Message, type PresenceMember, Realtime, Rest, type TokenRequest } from '@fanfare/client';
import { msgpack } from '@fanfare/client/msgpack';
import { FanfareProvider, useChannel, useConnectionState, usePresence } from '@fanfare/client/react';

export async function browser(): Promise<void> {
  const client = new Realtime({ url: 'https://rt.example.com', authUrl: '/auth', codec: msgpack, echo: false });
  const channel = client.channels.get('room', { rewind: '2m', modes: ['subscribe', 'presence'] });
  await channel.subscribe('greeting', (message: Message) => console.log(message.data));
  await channel.subscribe<{ text: string }>('greeting', ({ data }) => console.log(data.text.length));
  await channel.publish('greeting', { text: 'hello' });
  await channel.publish([{ name: 'a', extras: { trace: 'x' } }]);
  const members: PresenceMember[] = await channel.presence.get();
  await channel.presence.enter({ members });
  const off: () => void = client.connection.on('failed', ({ reason, retryInMs }) => console.log(reason.code, retryInMs));
  off();
  channel.on('discontinuity', ({ channel: name }) => console.log(name.length));
  for await (const { timestamp } of await channel.history({ direction: 'forwards' })) console.log(timestamp + 1);
  await client.close();
  // @ts-expect-error: there is no such state
  client.connection.on('conected', () => {});
  // @ts-expect-error: a listener gets a message
  await channel.subscribe((message: string) => message);
  // @ts-expect-error: there is no such option
  new Realtime({ url: 'https://rt.example.com', authUri: '/auth' });
}

export async function server(): Promise<TokenRequest> {
  const rest = new Rest({ url: 'https://rt.example.com', key: 'secret.k1' });
  try {
    await rest.channels.get('room').publish('greeting', 1);
  } catch (error) {
    if (error instanceof FanfareError && error.code === ErrorCode.forbidden) console.log(error.statusCode, error.reason);
  }
  // @ts-expect-error: a token that is signed here says what it allows
  await rest.auth.signToken({});
  return rest.auth.createTokenRequest({ capability: { 'room:*': ['subscribe'] }, clientId: 'ann', ttl: 60_000 });
}

export function useRoom(): string {
  const { publish, state } = useChannel('room', ({ data }) => console.log(data));
  const { members } = usePresence('room', { status: 'here' });
  void publish('greeting', members.length);
  return `${state} ${useConnectionState()} ${typeof FanfareProvider}`;
}
