// What the page asks of the manager. The token stays in this tab, and is sent in a header, never in an address.

const TOKEN = "gpupool.token";
const ASK_WITHIN_MS = 8000; // the manager answers at once, or it is away
const ORDER_WITHIN_MS = 60000; // an order answers after 50 s that it goes on
const SILENCE_MS = 25000; // the stream of events has a sign of life every 10 s

// The manager has answered, and not done it.
export class Refused extends Error {
  constructor(status, error) {
    super(error.hint ? `${error.message} (${error.hint})` : error.message);
    this.status = status;
    this.code = error.code;
  }
  get wantsToken() {
    return this.status === 401 || this.code === "too_many_wrong_tokens";
  }
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

// Takes a line of a token file as well: "operator: gpt_…".
export function keepToken(text) {
  const line = text.trim().split("\n", 1)[0].replace(/^[^:\s]+:\s+/, "");
  if (line === "") sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, line);
}

function headers() {
  return token() === "" ? {} : { Authorization: `Bearer ${token()}` };
}

async function answerOf(response) {
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, answer.error);
  return answer;
}

export async function ask(path) {
  const signal = AbortSignal.timeout(ASK_WITHIN_MS);
  return answerOf(await fetch(path, { headers: headers(), cache: "no-store", signal }));
}

export async function order(path, body = {}) {
  const signal = AbortSignal.timeout(ORDER_WITHIN_MS);
  return answerOf(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
}

// All leases, a page after the other.
export async function askLeases() {
  const all = [];
  let cursor = "";
  do {
    const page = await ask(`/v1/leases?limit=1000${cursor}`);
    all.push(...page.leases);
    cursor = page.nextCursor === undefined ? "" : `&cursor=${page.nextCursor}`;
  } while (cursor !== "");
  return all;
}

// Reads events until the stream ends, is silent or fails. EventSource would do, but sends no Authorization.
// begun: the stream is there. news: something has happened; the lists say what.
export async function readEvents(begun, news) {
  const silent = new AbortController();
  let timer = setTimeout(() => silent.abort(), ASK_WITHIN_MS);
  try {
    const response = await fetch("/v1/events", { headers: headers(), cache: "no-store", signal: silent.signal });
    if (!response.ok) await answerOf(response);
    begun();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let line = "";
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENCE_MS);
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (line + value).split("\n");
      line = lines.pop();
      if (lines.some((one) => one.startsWith("event:"))) news();
    }
  } finally {
    clearTimeout(timer);
  }
}
