// Calls of the gateway with the key of this tab. Session storage keeps the key; it is in no address.
export const key = {
  get: () => sessionStorage.getItem("key"),
  set: (value) => sessionStorage.setItem("key", value),
  forget: () => sessionStorage.removeItem("key"),
};

export async function call(path, { method = "GET", body, signal, as = key.get() } = {}) {
  const headers = { authorization: `Bearer ${as}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.ok) return response;
  const refusal = await response.json().catch(() => ({}));
  throw Object.assign(new Error(refusal.error?.message ?? `The gateway answered ${response.status}.`), { status: response.status });
}

export const json = async (path, options) => (await call(path, options)).json();

// The data of each server-sent event of a response; `onComment` gets the text of the comments between them.
export async function* events(response, onComment = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
      else if (part.startsWith(": ")) onComment(part.slice(2));
    }
  }
}
