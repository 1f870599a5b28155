// Digests a file in slices, so that it never has to fit in memory; tells how much of it is done.
import { sha256 } from "/console/vendor/sha256.js";

const SLICE_BYTES = 4 << 20;
const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

onmessage = async ({ data: file }) => {
  try {
    const digest = sha256.create();
    for (let at = 0; at < file.size; at += SLICE_BYTES) {
      digest.update(new Uint8Array(await file.slice(at, at + SLICE_BYTES).arrayBuffer()));
      postMessage({ done: Math.min(at + SLICE_BYTES, file.size) });
    }
    postMessage({ sha256: hex(digest.digest()) });
  } catch (failure) {
    postMessage({ error: failure.message });
  }
};
