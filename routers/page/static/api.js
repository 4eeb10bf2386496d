// How the page speaks to the gateway. The key, if there is one, lives here and nowhere else.

let key = "";

export const setKey = (value) => { key = value.trim(); };
export const hasKey = () => key !== "";
export const authorized = () => (key ? { Authorization: `Bearer ${key}` } : {});

export class ApiError extends Error {
  constructor(status, error = {}, retryAfter = 0) {
    super(error.message || `The gateway answered with ${status}.`);
    Object.assign(this, { status, code: error.code, param: error.param, retryAfter });
  }
}

// A gateway that cannot be reached is an ApiError of status 0.
export async function request(path, { headers = {}, ...options } = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...authorized(), ...headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The gateway cannot be reached." });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error, Number(response.headers.get("Retry-After")) || 0);
}

export const get = async (path) => (await request(path)).json();

export const post = async (path, body) => (await request(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).json();

// Feed text as it comes; every `data:` line's JSON goes to `tell`, but for the closing [DONE].
export function eventReader(tell) {
  let rest = "";
  return (text) => {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") tell(JSON.parse(line.slice(6)));
    }
  };
}

// Follow events that need a key, which an EventSource cannot send.
export async function follow(path, tell, signal) {
  const response = await request(path, { signal });
  const read = eventReader(tell);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) read(chunk.value);
}
