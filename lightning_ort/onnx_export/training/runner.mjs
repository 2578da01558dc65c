// Trains the model of this folder with onnxruntime-web or onnxruntime-node; `lightning-ort export --training` has put it here.
//
//     import * as ort from 'onnxruntime-web'; // or onnxruntime-node
//     import { Training } from './classifier_training/training.mjs';
//
//     const training = await Training.load('./classifier_training', { ort });
//     const { loss } = await training.step({ images: { data: new Float32Array(64), dims: [1, 1, 8, 8] }, labels: [3] }, { lr: 1e-3 });
//     const { output } = await training.predict({ images });
//     const bytes = await training.bytes(); // a state.safetensors, which Training.load and lightning_ort read
//
// Numbers are in float32. What a step draws (dropout, noise) is drawn here, from the distributions that the module draws from; the
// numbers are not PyTorch's. A step that fails leaves the state as it was.

const FORMAT = 2;
const ARRAYS = {
  bool: Uint8Array, uint8: Uint8Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  float32: Float32Array, float64: Float64Array,
};
const CODES = {
  bool: 'BOOL', uint8: 'U8', int8: 'I8', int16: 'I16', int32: 'I32', int64: 'I64', float32: 'F32', float64: 'F64',
};
const LIMITS = {
  bool: [0, 1], uint8: [0, 255], int8: [-128, 127], int16: [-(2 ** 15), 2 ** 15 - 1], int32: [-(2 ** 31), 2 ** 31 - 1],
  int64: [-(2 ** 63), 2 ** 63 - 1024],
};
const KEYS = ['fields', 'files', 'models', 'state', 'optimizer', 'accumulate', 'threads', 'needs'];
const inNode = typeof process !== 'undefined' && !!process.versions?.node;

/** A folder or a state cannot be used; the message says why. */
export class TrainingError extends Error {}

/** A model that trains: its parameters, buffers and optimizer states, which a step replaces. */
export class Training {
  #files; #options; #state; #pending; #random; #busy = false; #sessions = {};

  constructor(files, about, state, counts, ort, options, random) {
    this.#random = random;
    this.#files = files;
    this.#state = state;
    this.#options = options;
    [this.updates, this.#pending] = counts;
    this.about = about;
    this.ort = ort;
    this.gradients = {}; // those of the last step, if the model has no optimizer
    /** What a batch has, by name: dtype and shape, in which a name stands for a size that may change. */
    this.fields = Object.fromEntries(about.fields.map(({ name, dtype, shape }) => [name, { dtype, shape }]));
  }

  /**
   * Load a folder.
   * @param folder its URL, in Node also its path, or an object of its files' bytes by name
   * @param ort the runtime: the module onnxruntime-web or onnxruntime-node
   * @param state bytes of another state than the folder's state.safetensors
   * @param sessionOptions options of onnxruntime's sessions, such as { executionProviders: ['wasm'] }
   * @param random returns a number from 0 to 1, for what steps draw
   */
  static async load(folder, { ort, state, sessionOptions = {}, random = Math.random } = {}) {
    if (!ort?.InferenceSession) throw new TypeError('Training.load: pass { ort }, the module onnxruntime-web or onnxruntime-node');
    const files = new Files(folder);
    const about = await readAbout(files);
    const [values, metadata] = await readState(state ?? (await files.read('state.safetensors')));
    checkState(values, about);
    const counts = [metadata.step ?? '0', metadata.pending ?? '0'].map(Number);
    if (!counts.every((count) => Number.isSafeInteger(count) && count >= 0)) throw new TrainingError("the state's number of steps is damaged");
    const tensors = Object.fromEntries(
      Object.entries(values).map(([name, { dtype, data, shape }]) => [name, new ort.Tensor(dtype, data, shape)]),
    );
    const training = new Training(files, about, tensors, counts, ort, sessionOptions, random);
    await training.#session('training');
    return training;
  }

  /**
   * Train on a batch, and return the loss and what the module logs, by name.
   * @param batch an object of fields, or an array of them in order: tensors, { data, dims }, or nested arrays
   * @param lr the learning rate: a number, one for each parameter group, or none for those of the export
   * @param update whether to update the parameters now, where the model adds up gradients of several batches
   */
  async step(batch, options = {}) {
    const { lr, update: now } = checked(options, 'lr', 'update');
    const { optimizer, accumulate } = this.about;
    if (!optimizer && lr !== undefined) throw new RangeError('lr: this model has no optimizer; it returns gradients');
    const rates = optimizer ? this.#rates(lr) : [];
    const update = now === undefined || accumulate === 1 ? this.#pending + 1 >= accumulate : now;
    const settings = {
      'optimizer/learning_rate': new this.ort.Tensor('float32', Float32Array.from(rates), [rates.length]),
      'optimizer/step': new this.ort.Tensor('int64', BigInt64Array.of(BigInt(this.updates + 1)), []),
      'optimizer/update': new this.ort.Tensor('bool', Uint8Array.of(update ? 1 : 0), []),
    };
    const results = await this.#run('training', batch, settings);
    const state = { ...this.#state }, found = {}, replaced = [];
    for (const { name, role, key } of this.about.models.training.outputs) {
      if (isState(role)) {
        replaced.push(state[key]);
        state[key] = results[name];
      } else if (role === 'check') continue;
      else if (role === 'gradient') this.gradients[key] = results[name];
      else found[key] = Number(results[name].data[0]);
    }
    this.#state = state;
    for (const tensor of replaced) if (tensor.location === 'gpu-buffer') tensor.dispose();
    this.#pending = update ? 0 : this.#pending + 1;
    this.updates += update ? 1 : 0;
    return found;
  }

  /**
   * Train on some batches, and return the mean loss.
   * @param batches an iterable, which may be asynchronous
   * @param lr as in `step`, or a function of the number of updates so far
   * @param progress called after each step with its number and results; if it returns false, the training ends
   */
  async fit(batches, options = {}) {
    const { lr, progress } = checked(options, 'lr', 'progress');
    let total = 0, count = 0;
    for await (const batch of batches) {
      const results = await this.step(batch, { lr: typeof lr === 'function' ? lr(this.updates) : lr });
      total += results.loss;
      count += 1;
      if (progress && (await progress(count - 1, results)) === false) break;
    }
    return count ? total / count : NaN;
  }

  /** Return what the module's validation step logs for a batch. */
  async evaluate(...batch) {
    const results = await this.#run('evaluation', batch.length === 1 ? batch[0] : batch, {});
    return Object.fromEntries(this.about.models.evaluation.outputs.filter(({ role }) => role !== 'check').map(({ name, key }) => [key, Number(results[name].data[0])]));
  }

  /** Return the results of the module's forward, by name, as tensors. */
  async predict(...inputs) {
    return this.#run('prediction', inputs.length === 1 ? inputs[0] : inputs, {});
  }

  /** The parameters, buffers and optimizer states, by name, as tensors; on a GPU, those that the next step replaces. */
  get state() {
    return { ...this.#state };
  }

  /** Replace some parameters, buffers or states; values as in a batch. */
  setState(values) {
    const found = {};
    for (const [name, value] of Object.entries(values)) {
      const now = this.#state[name];
      if (!now) throw new RangeError(`there is no '${name}' in the state`);
      found[name] = this.#tensor(value, now.type, `state '${name}'`);
      if (`${found[name].dims}` !== `${now.dims}`) {
        throw new RangeError(`state '${name}' has shape [${now.dims}], not [${found[name].dims}]`);
      }
    }
    this.#state = { ...this.#state, ...found };
  }

  /** Return the state as the bytes of a safetensors file. */
  async bytes() {
    const entries = Object.entries(this.#state);
    const arrays = await Promise.all(entries.map(async ([name, tensor]) => [name, { type: tensor.type, dims: tensor.dims, data: await tensor.getData(true) }]));
    const roles = Object.fromEntries(this.about.state.map((each) => [each.name, each.role]));
    for (const [name, { type, data }] of arrays) {
      const wrong = (value) => (roles[name] === 'buffer' ? Number.isNaN(value) : !Number.isFinite(value));
      if (type.startsWith('float') && data.some(wrong)) {
        throw new TrainingError(`'${name}' has ${data.find(wrong)}: the training has failed, and nothing is saved. Load the last state, and take a smaller learning rate`);
      }
    }
    return writeState(Object.fromEntries(arrays), { step: `${this.updates}`, pending: `${this.#pending}` });
  }

  /** In Node: write the state, by default over the folder's; a file of that name stays until the new one is complete. */
  async save(path) {
    return this.#files.write(path ?? 'state.safetensors', await this.bytes(), path !== undefined);
  }

  async #session(name) {
    const model = this.about.models[name];
    if (!model) throw new TrainingError(`the folder was exported without ${name}.onnx`);
    this.#sessions[name] ??= this.#create(name, model);
    return this.#sessions[name];
  }

  async #create(name, model) {
    const options = { ...this.#options };
    const isWeb = !!this.ort.env?.versions?.web;
    if (name === 'training' && isWeb && options.executionProviders?.some((each) => (each.name ?? each) === 'webgpu')) {
      // elsewhere the runtimes have no way to leave results where they are: they copy them to JavaScript
      const stay = model.outputs.filter(({ role, dtype }) => isState(role) && dtype === 'float32');
      options.preferredOutputLocation ??= Object.fromEntries(stay.map((output) => [output.name, 'gpu-buffer']));
    }
    try {
      // onnxruntime-web finds no file beside a model, in Node neither
      if (this.#files.path && !isWeb) return await this.ort.InferenceSession.create(`${this.#files.path}/${model.file}`, options);
      if (this.about.files['frozen.data']) {
        options.externalData = [{ path: 'frozen.data', data: await this.#files.read('frozen.data') }];
      }
      return await this.ort.InferenceSession.create(await this.#files.read(model.file), options);
    } catch (error) {
      delete this.#sessions[name];
      if (error instanceof TrainingError) throw error;
      throw new TrainingError(`${model.file} cannot be loaded by this runtime, which has to be ${this.about.needs}: ${error.message}`);
    }
  }

  async #run(name, batch, settings) {
    const session = await this.#session(name);
    const model = this.about.models[name], sizes = {};
    const fields = this.#checked(batch, model, sizes);
    const value = ({ name, role, key, shape }) => {
      if (role === 'field') return fields[key];
      if (role === 'random') return this.#drawn(key, shape.map((size) => computed(size, sizes)));
      return settings[name] ?? this.#state[name];
    };
    const feeds = Object.fromEntries(model.inputs.map((input) => [input.name, value(input)]));
    if (this.#busy) throw new TrainingError('the last call has not ended: await it');
    this.#busy = true;
    let results;
    try {
      results = await session.run(feeds);
    } finally {
      this.#busy = false;
    }
    for (const { name: output, role, key } of model.outputs) {
      if (role !== 'check') continue;
      if (!(await results[output].getData())[0]) throw new RangeError(`the step raises an error for this batch, at ${key.split(': ')[1]}`);
      delete results[output];
    }
    return results;
  }

  #drawn(kind, dims) {
    const data = new Float32Array(dims.reduce((product, size) => product * size, 1));
    for (let i = 0; i < data.length; i++) {
      if (kind === 'uniform') {
        data[i] = Math.min(this.#random(), 1 - 2 ** -24); // float32 would round up to 1
        continue;
      }
      const radius = Math.sqrt(-2 * Math.log(1 - this.#random())), angle = 2 * Math.PI * this.#random();
      data[i] = radius * Math.cos(angle);
      if (i + 1 < data.length) data[++i] = radius * Math.sin(angle);
    }
    return new this.ort.Tensor('float32', data, dims);
  }

  #rates(lr) {
    const groups = this.about.optimizer.groups;
    const rates = lr === undefined ? groups.map((group) => group.learning_rate) : Array.isArray(lr) ? lr : groups.map(() => lr);
    if (rates.length !== groups.length) {
      throw new RangeError(`lr: pass a number, or ${groups.length} of them, one for each parameter group`);
    }
    if (!rates.every((rate) => typeof rate === 'number' && Number.isFinite(Math.fround(rate)) && rate >= 0)) {
      throw new RangeError(`lr=${lr}: a learning rate must be a number of float32 that is not negative`);
    }
    return rates;
  }

  #checked(batch, model, sizes) {
    const { fields } = model;
    const listed = fields.map(({ name, dtype, shape }) => `${name}: ${dtype}[${shape}]`).join(', ');
    if (batch === null || typeof batch !== 'object') throw new TypeError(`pass a batch with the fields ${listed}`);
    if (Array.isArray(batch)) {
      if (batch.length !== fields.length) throw new RangeError(`the batch has ${batch.length} fields; expected are ${listed}`);
      batch = Object.fromEntries(fields.map(({ name }, index) => [name, batch[index]]));
    }
    const given = Object.keys(batch);
    if (given.length !== fields.length || !fields.every(({ name }) => name in batch)) {
      throw new RangeError(`the batch has the fields ${given.join(', ')}; expected are ${listed}`);
    }
    const found = {};
    for (const field of fields) {
      found[field.name] = this.#tensor(batch[field.name], field.dtype, `field '${field.name}'`);
      checkShape(found[field.name].dims, field, sizes);
    }
    const reason = refused(sizes, model);
    if (reason) throw new RangeError(`the batch has ${reason}`);
    return found;
  }

  #tensor(value, dtype, what) {
    const Kind = ARRAYS[dtype];
    if (value instanceof this.ort.Tensor) {
      if (value.type !== dtype) throw new TypeError(`${what} is ${value.type}, but the model takes ${dtype}: convert it`);
      return value;
    }
    let { data, dims } = Array.isArray(value) || ArrayBuffer.isView(value) ? flattened(value, what) : value ?? {};
    if (data === undefined || !Array.isArray(dims)) throw new TypeError(`${what}: pass a tensor, { data, dims } or nested arrays`);
    if (!(data instanceof Kind)) {
      // numbers without a type, or of a narrower one, are converted where nothing is lost
      const narrower = Array.isArray(data) || (dtype === 'int64' && data instanceof Int32Array);
      if (!narrower) throw new TypeError(`${what} is a ${data.constructor.name}, but the model takes ${dtype}, a ${Kind.name}: convert it`);
      data = Kind.from(data, (item) => converted(item, dtype, what));
    }
    if (!dims.every((size) => Number.isSafeInteger(size) && size >= 0)) throw new RangeError(`${what} has the shape [${dims}]: pass whole numbers`);
    const count = dims.reduce((product, size) => product * size, 1);
    if (count !== data.length) throw new RangeError(`${what} has ${data.length} numbers for the shape [${dims}]`);
    return new this.ort.Tensor(dtype, data, dims);
  }
}

/** Return options, or say which ones there are. */
function checked(options, ...known) {
  const wrong = options === null || typeof options !== 'object' ? [options] : Object.keys(options).filter((name) => !known.includes(name));
  if (wrong.length) throw new TypeError(`${wrong[0]}: pass options as { ${known.join(', ')} }`);
  return options;
}

/** Return a number, or say why it is none of a dtype. */
function converted(item, dtype, what) {
  if (!['number', 'bigint', 'boolean'].includes(typeof item)) {
    throw new TypeError(`${what} has ${typeof item === 'string' ? JSON.stringify(item) : item}, which is no number; the model takes ${dtype}`);
  }
  if (dtype.startsWith('float')) return Number(item);
  const number = Number(item), limits = LIMITS[dtype];
  if (!Number.isInteger(number)) throw new TypeError(`${what} has numbers that are not whole; the model takes ${dtype}`);
  if (number < limits[0] || number > limits[1]) throw new RangeError(`${what} has ${item}, which is no ${dtype}`);
  return dtype === 'int64' ? BigInt(item) : number;
}

function checkShape(dims, { name, shape }, sizes) {
  const fits = dims.length === shape.length && dims.every((size, i) => size === (typeof shape[i] === 'number' ? shape[i] : (sizes[shape[i]] ??= size)));
  if (!fits) throw new RangeError(`field '${name}' has shape [${dims}], but the model takes [${shape}] with ${JSON.stringify(sizes)}`);
}

const OPERATORS = {
  '+': (x, y) => x + y, '*': (x, y) => x * y, '//': (x, y) => Math.floor(x / y), '%': (x, y) => ((x % y) + y) % y, '**': (x, y) => x ** y,
  '==': (x, y) => x === y, '!=': (x, y) => x !== y, '<': (x, y) => x < y, '<=': (x, y) => x <= y, '>': (x, y) => x > y, '>=': (x, y) => x >= y,
  and: (x, y) => x && y, or: (x, y) => x || y, max: (x, y) => Math.max(x, y), min: (x, y) => Math.min(x, y),
};

/** Return what a formula of training.json is for some sizes. */
function computed(formula, sizes) {
  if (typeof formula === 'string') return sizes[formula];
  if (!Array.isArray(formula)) return formula;
  const parts = formula.slice(1).map((part) => computed(part, sizes));
  return formula[0] === 'not' ? !parts[0] : parts.reduce(OPERATORS[formula[0]]);
}

function written(formula) {
  if (!Array.isArray(formula)) return `${formula}`;
  const parts = formula.slice(1).map((part) => (Array.isArray(part) ? `(${written(part)})` : `${part}`));
  return parts.length > 1 ? parts.join(` ${formula[0]} `) : `${formula[0]} ${parts[0]}`;
}

/** Return why a model is not right for some sizes, or undefined. */
function refused(sizes, { sizes: limits, conditions }) {
  for (const [name, size] of Object.entries(sizes)) {
    const [lowest, highest] = limits[name] ?? [1, null];
    if (size < lowest) return `${name} ${size}; it must be at least ${lowest}`;
    if (highest !== null && size > highest) return `${name} ${size}; it must be at most ${highest}`;
  }
  for (const { formula, line } of conditions) {
    if (computed(formula, sizes)) continue;
    const listed = Object.entries(sizes).map(([name, size]) => `${name} ${size}`).join(', ');
    return `${listed}; the model is right where ${written(formula)}, the module does something else${line ? ` (${line})` : ''}`;
  }
}

function isState(role) {
  return role === 'parameter' || role === 'buffer' || role === 'state';
}

function flattened(value, what) {
  if (ArrayBuffer.isView(value)) return { data: value, dims: [value.length] };
  const dims = [];
  for (let part = value; Array.isArray(part) || ArrayBuffer.isView(part); part = part[0]) dims.push(part.length);
  const data = [];
  const collect = (part, depth) => {
    if (depth === dims.length) data.push(part);
    else if (part?.length !== dims[depth]) throw new RangeError(`${what}: the nested arrays have different lengths`);
    else for (const item of part) collect(item, depth + 1);
  };
  collect(value, 0);
  return { data, dims };
}

// files

/** The files of a folder: at a path (Node), at a URL, or given as bytes. */
class Files {
  constructor(folder) {
    if (folder instanceof URL) folder = inNode && folder.protocol === 'file:' ? decodeURIComponent(folder.pathname) : folder.href;
    if (typeof folder !== 'string' && (folder === null || typeof folder !== 'object')) {
      throw new TypeError('Training.load: pass the URL or path of a folder, or its files as an object');
    }
    this.bytes = typeof folder === 'object' ? folder : null;
    this.path = typeof folder === 'string' && inNode && !/^[a-z]+:\/\//i.test(folder) ? folder.replace(/\/$/, '') : null;
    this.url = typeof folder === 'string' ? folder.replace(/\/$/, '') : null;
  }

  async read(name) {
    try {
      if (this.bytes) {
        if (!this.bytes[name]) throw new Error('it is missing');
        return new Uint8Array(this.bytes[name]);
      }
      if (this.path) {
        const { readFile } = await import('node:fs/promises');
        return new Uint8Array(await readFile(`${this.path}/${name}`));
      }
      const response = await fetch(`${this.url}/${name}`);
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      return new Uint8Array(await response.arrayBuffer());
    } catch (error) {
      throw new TrainingError(`${this.url ?? ''}/${name} cannot be read: ${error.message}`);
    }
  }

  async write(name, bytes, isPath) {
    if (!inNode || !(this.path || isPath)) throw new TrainingError('save writes files in Node; elsewhere use bytes()');
    const { open, readdir, rename, rm } = await import('node:fs/promises');
    const { basename, dirname, join } = await import('node:path');
    const path = isPath ? name : `${this.path}/${name}`, start = `.${basename(path)}.`;
    const temporary = join(dirname(path), `${start}${process.pid}.part`);
    for (const rest of await readdir(dirname(path))) { // of processes that were killed while they wrote
      const number = rest.startsWith(start) && /^(\d+)\.part$/.exec(rest.slice(start.length))?.[1];
      if (number && !isRunning(Number(number))) await rm(join(dirname(path), rest), { force: true });
    }
    try {
      const file = await open(temporary, 'w');
      try {
        await file.writeFile(bytes);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(temporary, path);
    } catch (error) {
      await rm(temporary, { force: true });
      throw error;
    }
    return path;
  }
}

function isRunning(process_) {
  try {
    process.kill(process_, 0);
    return true;
  } catch (error) {
    return error.code === 'EPERM';
  }
}

/** Return a checksum, or undefined: browsers have it on secure and on local pages. */
async function sha256(bytes) {
  if (!globalThis.crypto?.subtle) return undefined;
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** Return the checksum of tensors, which their order does not change. */
async function checksum(tensors) {
  const encoder = new TextEncoder(), parts = [];
  const order = (x, y) => { // as Python's, by code points
    const [a, b] = [[...x], [...y]].map((name) => name.map((letter) => letter.codePointAt(0)));
    const i = a.findIndex((code, k) => code !== b[k]);
    return i < 0 ? a.length - b.length : a[i] - (b[i] ?? -1);
  };
  for (const name of Object.keys(tensors).sort(order)) {
    const { dtype, shape, data } = tensors[name];
    parts.push(encoder.encode(`${name} ${CODES[dtype]} [${[...shape].join(', ')}] `), new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
  const all = new Uint8Array(parts.reduce((total, part) => total + part.length, 0));
  let offset = 0;
  for (const part of parts) {
    all.set(part, offset);
    offset += part.length;
  }
  return sha256(all);
}

async function readAbout(files) {
  let about;
  try {
    about = JSON.parse(new TextDecoder().decode(await files.read('training.json')));
  } catch (error) {
    if (error instanceof TrainingError) throw new TrainingError(`${error.message}: this is no folder of \`lightning-ort export --training\``);
    throw new TrainingError(`training.json cannot be read: ${error.message}`);
  }
  if (about?.format !== FORMAT) {
    throw new TrainingError(`training.json has format ${about?.format}; this file reads format ${FORMAT}. Take training.mjs from the folder.`);
  }
  const missing = KEYS.find((key) => !(key in about));
  if (missing) throw new TrainingError(`training.json has no '${missing}': it is damaged`);
  for (const name of [...Object.keys(about.files), ...Object.values(about.models).map(({ file }) => file)]) {
    if (/[\\/]|^\.*$/.test(name)) throw new TrainingError(`training.json names '${name}', which is not in the folder: it is damaged, or not to be trusted`);
  }
  for (const [name, expected] of Object.entries(about.files)) {
    if (expected.bytes >= 1 << 24) continue; // the session says if it is missing
    const content = await files.read(name);
    if (content.length !== expected.bytes) {
      throw new TrainingError(`${name} has ${content.length} bytes instead of ${expected.bytes}: it is damaged, or of another export`);
    }
    if (((await sha256(content)) ?? expected.sha256) !== expected.sha256) {
      throw new TrainingError(`${name} is damaged, or of another export: its content is not what training.json says`);
    }
  }
  return about;
}

function checkState(values, about) {
  const described = (each) => (each ? `${each.dtype}[${each.shape}]` : 'nothing');
  const expected = Object.fromEntries(about.state.map((each) => [each.name, each]));
  for (const name of new Set([...Object.keys(values), ...Object.keys(expected)])) {
    if (described(values[name]) !== described(expected[name])) {
      throw new TrainingError(
        `the state is of another model: '${name}' is ${described(values[name])} in the state and ${described(expected[name])} in training.json`,
      );
    }
  }
}

/** Return the tensors of a safetensors file, and its metadata. */
export async function readState(bytes) {
  try {
    bytes = new Uint8Array(bytes);
    if (bytes.length < 8) throw new Error('it ends too early');
    const length = Number(new DataView(bytes.buffer).getBigUint64(0, true));
    if (length > bytes.length - 8) throw new Error('it ends too early');
    const { __metadata__: metadata = {}, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const found = {};
    let end = 8 + length;
    for (const [name, { dtype: code, shape, data_offsets: [first, last] }] of Object.entries(header)) {
      const dtype = Object.keys(CODES).find((key) => CODES[key] === code);
      if (!dtype) throw new Error(`'${name}' is of type ${code}`);
      const count = shape.reduce((product, size) => product * size, 1), Kind = ARRAYS[dtype];
      if (last - first !== count * Kind.BYTES_PER_ELEMENT || first < 0 || 8 + length + last > bytes.length) {
        throw new Error(`the bytes of '${name}' are not there`);
      }
      found[name] = { dtype, shape, data: new Kind(bytes.slice(8 + length + first, 8 + length + last).buffer) };
      end = Math.max(end, 8 + length + last);
    }
    if (end !== bytes.length) throw new Error('it has bytes that belong to nothing');
    if (metadata.sha256 && ((await checksum(found)) ?? metadata.sha256) !== metadata.sha256) {
      throw new Error("its content is not what its metadata's sha256 says; what changes it must write that anew");
    }
    return [found, metadata];
  } catch (error) {
    throw new TrainingError(`the state is no safetensors file, or it is damaged: ${error.message}`);
  }
}

/** Return tensors and metadata as the bytes of a safetensors file. */
export async function writeState(tensors, metadata) {
  const named = Object.entries(tensors).map(([name, { type, dims, data }]) => [name, { dtype: type, shape: dims, data }]);
  const digest = await checksum(Object.fromEntries(named));
  const header = { __metadata__: digest ? { ...metadata, sha256: digest } : metadata };
  let offset = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    header[name] = { dtype: CODES[type], shape: [...dims], data_offsets: [offset, offset + data.byteLength] };
    offset += data.byteLength;
  }
  let text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(text.length + ((8 - (text.length % 8)) % 8)).fill(32);
  padded.set(text);
  const bytes = new Uint8Array(8 + padded.length + offset);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(padded.length), true);
  bytes.set(padded, 8);
  offset = 8 + padded.length;
  for (const { data } of Object.values(tensors)) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
    offset += data.byteLength;
  }
  return bytes;
}
