// The upload of a model's files: look for an unfinished one, digest, declare, send what is missing, publish. It goes on
// while its user looks at other pages. The gateway knows what it has received of each file: a broken upload goes on
// there, in any browser.
import { call, json, refusal } from "/console/api.js";
import { escaped, modelRoute } from "/console/format.js";

const MIN_PART_BYTES = 1 << 18;
const FIRST_PART_BYTES = 1 << 20;
const MAX_PART_BYTES = 64 << 20;
const PART_S = 1; // parts grow and shrink towards it: a part is as much as a broken connection can cost
const MAX_FAILURES = 5; // without progress while the gateway answers: another tab sends the file, or it has changed on disk
const MAX_PAUSE_S = 10;
const NUM_WORKERS = Math.min(4, navigator.hardwareConcurrency);
const NUM_SENDERS = 3; // of the six connections that a browser has to a host; live figures take one of each tab
const DECLARED = ["path", "size", "sha256"];

const isLost = ({ name, status }) => name === "TypeError" || [502, 503, 504].includes(status); // fetch throws a TypeError
const isOf = (fullName, name) => fullName === name || fullName.endsWith(`/${name}`);
const isOfFiles = (upload, files, fields) =>
  upload.files.length === files.length &&
  files.every((file) => upload.files.some((state) => fields.every((field) => state[field] === file[field])));

// The work for each of the files, a number of them at once.
function inParallel(number, files, work) {
  const left = [...files];
  const next = async () => {
    for (let file; (file = left.shift());) await work(file);
  };
  return Promise.all(Array.from({ length: number }, next));
}

function digest(file, signal, onDone) {
  return new Promise((resolve, reject) => {
    const worker = new Worker("/console/sha256_worker.js", { type: "module" });
    const end = (settle, value) => {
      worker.terminate();
      settle(value);
    };
    signal.addEventListener("abort", () => end(reject, signal.reason));
    worker.onerror = () => end(reject, new Error("The browser does not run the worker that digests files."));
    worker.onmessage = ({ data: { done, sha256, error } }) => {
      if (error) end(reject, new Error(`${file.name}: ${error}`));
      else if (sha256) end(resolve, sha256);
      else onDone(done);
    };
    worker.postMessage(file);
  });
}

// Open uploads whose files have these fields. The list gives sizes: only uploads of the same size are asked for theirs.
async function openUploads(files, fields, signal) {
  const numBytes = files.reduce((sum, { size }) => sum + size, 0);
  const listed = (await json("/v1/uploads", { signal })).data.filter((upload) => upload.size_bytes === numBytes);
  const described = await Promise.all(listed.map(({ id }) => json(`/v1/uploads/${id}`, { signal })));
  return described.filter((upload) => isOfFiles(upload, files, fields));
}

export class ModelUpload {
  // Stages: look, name (it waits for `publish`), digest, send, the stages of a commit, published; what ended it
  // otherwise is the `error`. It needs no name if the files, by their digests, are those of one unfinished upload that
  // this tab has begun, unless it `mustAsk`. The tab knows what the gateway does not: how its weights are published.
  constructor(folder, mustAsk, onChange) {
    this.folder = folder;
    this.model = this.begun = this.base = this.quantize = "";
    this.stage = "look";
    this.files = folder.chosen.map(([path, file]) => ({
      path,
      file,
      size: file.size,
      sha256: "",
      digested: 0,
      sent: 0,
    }));
    this.numBytes = folder.numBytes;
    this.id = this.error = this.field = this.trouble = "";
    this.published = null;
    this.bytesPerS = 0;
    this.committed = [0, 0]; // bytes done and in total, of the stage of the commit
    this._mustAsk = mustAsk;
    this._onChange = onChange;
    this._partBytes = FIRST_PART_BYTES;
    this.proceed();
  }

  get isRunning() {
    return !this._stopped.signal.aborted && !this.published && this.stage !== "name";
  }
  get numDigested() {
    return this.files.reduce((sum, { digested }) => sum + digested, 0);
  }
  get numSent() {
    return this.files.reduce((sum, { sent }) => sum + sent, 0);
  }
  get done() {
    return this.stage === "digest"
      ? [this.numDigested, this.numBytes]
      : this.stage === "send"
        ? [this.numSent, this.numBytes]
        : this.committed;
  }

  stop() {
    this._stopped.abort();
    this._onChange();
  }

  // Frees what was sent; true if nothing of it is left. The gateway answers 404 if it has freed it already.
  async abort() {
    try {
      await call(`/v1/uploads/${this.id}`, { method: "DELETE" });
    } catch (failure) {
      if (failure.status !== 404) this._fail(failure);
      return failure.status === 404;
    }
    return true;
  }

  // Goes on as the upload of this model.
  publish(model, base, quantize) {
    [this.model, this.base, this.quantize] = [model, base, quantize];
    this.proceed();
  }

  // Begins, or goes on after an error or a stop.
  async proceed() {
    const stopped = (this._stopped = new AbortController());
    this.error = this.field = this.trouble = "";
    try {
      if (!this.model && !(await this._look())) return this._set("name");
      await this._digest();
      const before = await this._version();
      await this._begin();
      this._set("send");
      await inParallel(NUM_SENDERS, this.files, (file) => this._send(file));
      this.published = await this._commit(before);
      this._set("published");
    } catch (failure) {
      if (!stopped.signal.aborted) this._fail(failure);
    }
  }

  _fail(failure) {
    [this.error, this.field, this.trouble] = [failure.message, failure.field ?? "", ""];
    this.isRefused = failure.status === 422 || this.field === "quantize";
    if (this.field === "quantize") sessionStorage.removeItem(this.id); // to be asked again
    this.stop();
  }

  _set(stage) {
    this.stage = stage;
    this._onChange();
  }

  _call(path, options) {
    return call(path, { ...options, signal: this._stopped.signal });
  }

  async _state() {
    return (await this._call(`/v1/uploads/${this.id}`)).json();
  }

  // Whether the model is known without a question. Files are read only where an unfinished upload may be theirs.
  async _look() {
    this._set("look");
    if ((await openUploads(this.files, ["path", "size"], this._stopped.signal)).length) {
      await this._digest();
      const open = await openUploads(this.files, DECLARED, this._stopped.signal);
      this.begun = open.length === 1 ? open[0].model : "";
      const quantize = this.begun && sessionStorage.getItem(open[0].id);
      if (!this._mustAsk && quantize !== null) [this.model, this.quantize] = [this.begun, quantize];
    }
    return this.model !== "";
  }

  async _digest() {
    this._set("digest");
    const left = this.files.filter(({ sha256 }) => !sha256);
    await inParallel(NUM_WORKERS, left, async (file) => {
      const tell = (done) => {
        file.digested = done;
        this._onChange();
      };
      file.sha256 = await digest(file.file, this._stopped.signal, tell);
    });
  }

  // The version that the model has, of the list: the browser would show a 404 for a new model as an error.
  async _version() {
    const { data } = await (await this._call("/v1/models")).json();
    return data.find(({ id }) => isOf(id, this.model))?.version;
  }

  async _begin() {
    const declared = this.files.map(({ path, size, sha256 }) => ({ path, size, sha256 }));
    const open = await openUploads(declared, DECLARED, this._stopped.signal);
    const create = {
      method: "POST",
      body: { model: this.model, files: declared, quantize: this.quantize || undefined },
    };
    const upload =
      open.find(({ model }) => isOf(model, this.model)) ?? (await (await this._call("/v1/uploads", create)).json());
    this.id = upload.id;
    sessionStorage.setItem(this.id, this.quantize);
    this.model = upload.model;
    this._received(upload, this.files);
  }

  _received(upload, files) {
    for (const file of files) {
      const state = upload.files.find(({ path }) => path === file.path);
      [file.sent, file.isComplete] = [state.received, state.complete];
    }
  }

  async _send(file) {
    for (let numFailures = 0; !file.isComplete;) {
      const [before, begin] = [file.sent, performance.now()];
      try {
        const part = file.file.slice(before, before + this._partBytes);
        const headers = { "upload-offset": String(before) };
        const state = await (
          await this._call(`/v1/uploads/${this.id}/files/${escaped(file.path)}`, { method: "PUT", body: part, headers })
        ).json();
        [file.sent, file.isComplete, this.trouble] = [state.received, state.complete, ""];
        this._measured(part.size, (performance.now() - begin) / 1000);
      } catch (failure) {
        if (++numFailures > MAX_FAILURES)
          throw new Error(`${file.path} cannot be sent: ${failure.message}. Drop the folder again.`);
        await this._wait(failure);
        this._received(await this._persist(() => this._state()), [file]);
      }
      if (file.sent > before) numFailures = 0;
      this._onChange();
    }
  }

  _measured(numBytes, tookS) {
    const numSending = Math.min(this.files.filter(({ isComplete }) => !isComplete).length || 1, NUM_SENDERS);
    this.bytesPerS = this.bytesPerS * 0.7 + (numBytes / tookS) * numSending * 0.3;
    if (numBytes < this._partBytes) return; // the last part of a file
    this._partBytes = Math.min(
      Math.max(
        tookS < PART_S / 2 ? this._partBytes * 2 : tookS > PART_S * 2 ? this._partBytes / 2 : this._partBytes,
        MIN_PART_BYTES,
      ),
      MAX_PART_BYTES,
    );
  }

  // Publishes. If the connection breaks meanwhile the gateway may publish without us: the version tells.
  async _commit(before) {
    for (let numTries = 1; ; numTries++) {
      try {
        if (numTries > 1) await this._persist(() => this._state());
        return await this._committed();
      } catch (failure) {
        if (numTries > 1 && failure.status === 404) return this._publishedSince(before);
        if (numTries > MAX_FAILURES && isLost(failure)) throw failure;
        await this._wait(failure, numTries > 1);
      }
    }
  }

  async _committed() {
    const body = { base: this.base || undefined, quantize: this.quantize || undefined };
    const response = await this._call(`/v1/uploads/${this.id}/commit`, {
      method: "POST",
      body,
      headers: { accept: "application/x-ndjson" },
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new TypeError("The gateway ended the commit early.");
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines.map(JSON.parse)) {
        if (line.error) throw refusal(line.status, line.error);
        if (line.model) return line.model;
        this.committed = [line.done, line.total];
        this.trouble = "";
        this._set(line.stage);
      }
    }
  }

  async _publishedSince(before) {
    const model = await (await this._call(modelRoute(this.model))).json();
    if (model.version === before)
      throw new Error("The upload has ended, and the model is as before. Upload the folder again.");
    return model;
  }

  async _persist(ask) {
    for (;;) {
      try {
        return await ask();
      } catch (failure) {
        await this._wait(failure);
      }
    }
  }

  // Waits before the next try, and shows why; a failure that a further try cannot change is thrown.
  async _wait(failure, mayConflict = true) {
    this._stopped.signal.throwIfAborted();
    if (!isLost(failure) && !(mayConflict && failure.status === 409)) throw failure;
    this._pauseS = this.trouble ? Math.min(this._pauseS * 2, MAX_PAUSE_S) : 0.5;
    this.trouble = failure.status ? failure.message : "The connection is broken.";
    this._onChange();
    const over = new AbortController(); // removes the listeners
    const { signal } = this._stopped;
    let timer;
    await new Promise((resolve, reject) => {
      timer = setTimeout(resolve, this._pauseS * 1000);
      addEventListener("online", resolve, { signal: over.signal });
      signal.addEventListener("abort", () => reject(signal.reason), { signal: over.signal });
    }).finally(() => {
      over.abort();
      clearTimeout(timer);
    });
  }
}
