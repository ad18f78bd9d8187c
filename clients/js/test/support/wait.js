const DEADLINE_MS = 60_000;

/** Waits until `holds` gives something true, which it returns. */
export async function until(holds, what, detail = () => '', deadlineMs = DEADLINE_MS) {
  const end = Date.now() + deadlineMs;
  for (;;) {
    let last;
    try {
      const value = await holds();
      if (value) return value;
    } catch (error) {
      last = error;
    }
    if (Date.now() > end) throw new Error(`waited ${deadlineMs} ms in vain for ${what}\n${last ?? ''}\n${detail()}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** The next event of an emitter; its first argument. */
export function next(emitter, name, deadlineMs = DEADLINE_MS) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no ${name} within ${deadlineMs} ms`)), deadlineMs);
    emitter.once(name, (event) => {
      clearTimeout(timer);
      resolve(event);
    });
  });
}
