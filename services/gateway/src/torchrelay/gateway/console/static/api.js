// Calls of the gateway with the key of this tab. Session storage keeps the key; it is in no address.
export const key = {
  get: () => sessionStorage.getItem("key"),
  set: (value) => sessionStorage.setItem("key", value),
  forget: () => sessionStorage.removeItem("key"),
};

// What the gateway refused: its status, and the field or file that is at fault, if any.
export const refusal = (status, error) =>
  Object.assign(new Error(error?.message ?? `The gateway answered ${status}.`), { status, field: error?.param });

// A body is sent as JSON, or as it is if it is a Blob.
export async function call(path, { method = "GET", body, headers = {}, signal, as = key.get() } = {}) {
  const isJson = body !== undefined && !(body instanceof Blob);
  const response = await fetch(path, {
    method,
    signal,
    body: isJson ? JSON.stringify(body) : body,
    headers: { ...headers, authorization: `Bearer ${as}`, ...(isJson && { "content-type": "application/json" }) },
  });
  if (response.ok) return response;
  throw refusal(response.status, (await response.json().catch(() => ({}))).error);
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
