// The files of a dropped or picked folder that make up a model, by the same rule as `torchrelay upload`.
const DOCUMENTS = new Set([
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "vocab.json",
  "merges.txt",
  "model.safetensors.index.json",
  "modules.json",
]);
const POOLING = "1_Pooling/config.json"; // beside modules.json: how texts are embedded
const TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja";
const FOLDERS = new Set([POOLING, TOOL_TEMPLATE].map((path) => path.split("/")[0]));
const ADAPTER = ["adapter_config.json", "adapter_model.safetensors"];
const INDEX = "model.safetensors.index.json";
const SINGLE = "model.safetensors";

// A folder: its name, and its files by their paths beneath it.
export function folderOfPicked(list) {
  const files = new Map([...list].map((file) => [file.webkitRelativePath.split("/").slice(1).join("/"), file]));
  return { name: list[0].webkitRelativePath.split("/")[0], files };
}

// Must be called before the drop's event has ended, since the browser then takes its entries away.
export function folderOfDropped(transfer) {
  const entry = transfer.items[0]?.webkitGetAsEntry?.();
  if (!entry?.isDirectory) return Promise.reject(new Error("Drop the folder of a model, not a file."));
  const files = new Map();
  return filesBeneath(entry, "", files).then(() => ({ name: entry.name, files }));
}

async function filesBeneath(folder, path, files) {
  const reader = folder.createReader();
  for (;;) {
    // a reader gives its entries in parts
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (part.length === 0) return;
    for (const entry of part) {
      if (entry.isFile)
        files.set(path + entry.name, await new Promise((resolve, reject) => entry.file(resolve, reject)));
      else if (path === "" && FOLDERS.has(entry.name)) await filesBeneath(entry, `${entry.name}/`, files);
    }
  }
}

// What is to be sent, [path, file] each, what is left out, and whether it is a LoRA adapter. Throws what the folder lacks.
export async function modelFiles({ name, files }) {
  const isAdapter = !files.has("config.json") && files.has(ADAPTER[0]);
  const paths = new Set(isAdapter ? ADAPTER : [...DOCUMENTS].filter((path) => files.has(path)));
  const lacks = (what) => {
    throw new Error(`${name} has no ${what}.`);
  };
  const require = (path, hint = "") => {
    if (!files.has(path)) lacks(path + hint);
  };
  if (isAdapter) require(ADAPTER[1]);
  else {
    require("config.json", ": give the folder of a Hugging Face model");
    require("tokenizer.json", ": save a fast tokenizer into it");
    for (const path of await weights(files, lacks)) paths.add(path);
    if (files.has("modules.json") && files.has(POOLING)) paths.add(POOLING);
    if (files.has(TOOL_TEMPLATE)) paths.add(TOOL_TEMPLATE);
  }
  const chosen = [...paths].sort().map((path) => [path, files.get(path)]);
  const leftOut = [...files.keys()].filter((path) => !paths.has(path) && !path.includes("/")).sort();
  return { name, chosen, leftOut, isAdapter, numBytes: chosen.reduce((sum, [, file]) => sum + file.size, 0) };
}

async function weights(files, lacks) {
  if (!files.has(INDEX))
    return files.has(SINGLE) ? [SINGLE] : lacks(`safetensors weights (${SINGLE}, or shards with ${INDEX})`);
  let named;
  try {
    named = [...new Set(Object.values(JSON.parse(await files.get(INDEX).text()).weight_map))];
  } catch {
    throw new Error(`${INDEX} is not an index of weights.`);
  }
  const missing = named.find((path) => !files.has(path));
  if (missing === undefined) return named;
  // The shards that the index names may have been merged.
  return files.has(SINGLE) && !named.some((path) => files.has(path))
    ? [SINGLE]
    : lacks(`${missing}, which ${INDEX} names`);
}
