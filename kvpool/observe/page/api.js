// Asks the daemon. The token stays in this tab's sessionStorage and goes in a header, never in a URL.

const TOKEN = "kvpool-token";
const WAIT_MS = 6000;

export class NeedsToken extends Error {}
export class Away extends Error {}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

// The answer's JSON. Throws NeedsToken, Away (nobody there, or not in time), Error (refused).
export async function ask(path) {
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(WAIT_MS) });
  } catch (error) {
    throw new Away(error.message);
  }
  if (answer.status === 401) throw new NeedsToken();
  if (answer.status === 503) throw new Away("it is busy, or it ends");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.message);
  return body;
}
