// Requests to this server, with the API key if it wants one. The key lives in this tab alone.

const NAME = "atom-api-key";

/** The server's refusal: `status`, and its message. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let current = stored(() => sessionStorage.getItem(NAME)) ?? "";

export const key = {
  get: () => current,
  set(value) {
    current = value;
    stored(() => sessionStorage.setItem(NAME, value));
  },
  forget() {
    current = "";
    stored(() => sessionStorage.removeItem(NAME));
  },
};

/** What `use` returns; null where storage is off: the key lasts until the page is left. */
function stored(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

/** A response with status 2xx; throws ApiError for others, and TypeError without a connection. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

/** The same, with a JSON body. */
export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server responded with status ${response.status}`;
  }
}
