// An application of React, for its test.
import { Realtime } from '@fanfare/client';
import { FanfareProvider, useChannel, useConnectionState, usePresence, usePresenceMembers } from '@fanfare/client/react';
import { StrictMode, useState } from 'react';
import { createRoot } from 'react-dom/client';

function Room({ name, mood }) {
  const [heard, setHeard] = useState([]);
  const { channel, state, publish, discontinuities } = useChannel(name, ({ data }) => setHeard((all) => [...all, data]));
  const { members, error } = usePresence(name, { mood });
  window.publish = publish;
  const names = members.map(({ clientId, data }) => `${clientId}:${data?.mood}`).sort();
  const told = { channel: channel.name, state, heard, names, discontinuities, error: error?.message };
  return <pre id="room">{JSON.stringify(told)}</pre>;
}

function Watch({ name }) {
  return <pre id="watch">{JSON.stringify(usePresenceMembers(name).map(({ clientId }) => clientId))}</pre>;
}

function State() {
  return <b id="state">{useConnectionState()}</b>;
}

function App() {
  const [shown, setShown] = useState({ room: 'one', mood: 'well' });
  window.show = (change) => setShown((before) => ({ ...before, ...change }));
  return (
    <>
      <State />
      {shown.room && <Room key={shown.room} name={shown.room} mood={shown.mood} />}
      {shown.watch && <Watch name={shown.watch} />}
    </>
  );
}

window.begin = (url) => {
  window.fanfare = new Realtime({ url, authUrl: '/auth', reconnectMinMs: 50 });
  createRoot(document.body.appendChild(document.createElement('main'))).render(
    <StrictMode>
      <FanfareProvider client={window.fanfare}>
        <App />
      </FanfareProvider>
    </StrictMode>,
  );
};
