// The settings of a client's script, and the lines of JSON by which it reports.

const { TORCHRELAY_URL, TORCHRELAY_KEY, TORCHRELAY_LIMITED_KEY, TORCHRELAY_MODEL, TORCHRELAY_EMBEDDING_MODEL } = process.env;

export const url = TORCHRELAY_URL;
export const key = TORCHRELAY_KEY;
export const limitedKey = TORCHRELAY_LIMITED_KEY;
export const model = TORCHRELAY_MODEL;
export const embeddingModel = TORCHRELAY_EMBEDDING_MODEL;

export function report(name, value) {
  console.log(JSON.stringify({ [name]: value ?? null }));
}

export async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, type: error.type, retryAfter: error.headers?.get?.("retry-after") };
  }
  return null;
}
