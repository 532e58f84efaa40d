// The server's events, for ever: a lost connection is made again.
//
// An EventSource cannot send the API key, so this reads the stream of a fetch.

const AGAIN_MS = 2000;
const SILENCE_MS = 10000;
const KEY = "heterocache-key";

export const keepKey = (key) => sessionStorage.setItem(KEY, key);

// Call on.event(object), on.lost(sentences), on.broken(sentence) if on.event fails, and on.key(wasRefused), which
// resolves once there is a key.
export async function follow(url, on) {
  for (;;) {
    const sentence = await listen(url, on).catch((error) => (error.name === "AbortError"
      ? `The server has sent nothing for ${SILENCE_MS / 1000} s.`
      : "The server does not answer."));
    if (sentence === null) continue;
    on.lost(`${sentence} Trying again every ${AGAIN_MS / 1000} s.`);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

// Returns why it has ended; null if there is a new key to try.
async function listen(url, on) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(url, { headers, cache: "no-store", signal: silence.signal });
    if (answer.status === 401) {
      clearTimeout(timer);
      sessionStorage.removeItem(KEY);
      await on.key(key !== null);
      return null;
    }
    if (!answer.ok) return await refusal(answer);
    const decoder = new TextDecoder();
    const reader = answer.body.getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "The server has ended the connection.";
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) show(event, on);
    }
  } finally {
    clearTimeout(timer);
  }
}

function show(event, on) {
  try {
    on.event(JSON.parse(event.slice("data: ".length)));
  } catch (error) { // a defect of the page, or a server of another version
    console.error(error);
    on.broken("This page cannot show what the server sends: reload it.");
  }
}

async function refusal(answer) {
  try {
    return `The server answers: ${(await answer.json()).error.message}`;
  } catch {
    return `The server answers with status ${answer.status}.`;
  }
}
