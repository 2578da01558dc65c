// node steps.mjs RUNTIME FOLDER BATCHES OUTPUT: trains on the batches of a safetensors file, called 0/field, 1/field, ...
import fs from 'node:fs';
import { pathToFileURL } from 'node:url';
import { runtime } from './runtime.mjs';

const [name, folder, batches, output] = process.argv.slice(2);
const { Training, readState } = await import(pathToFileURL(`${folder}/training.mjs`));
const { ort, sessionOptions } = await runtime(name);
const training = await Training.load(folder, { ort, sessionOptions });
const [values] = await readState(fs.readFileSync(batches));
const steps = [];
for (const [key, { dtype, data, shape }] of Object.entries(values)) {
  const [number, field] = [Number(key.slice(0, key.indexOf('/'))), key.slice(key.indexOf('/') + 1)];
  (steps[number] ??= {})[field] = new ort.Tensor(dtype, data, shape);
}
const losses = [], times = [];
for (const batch of steps) {
  const start = performance.now();
  losses.push((await training.step(batch)).loss);
  times.push(performance.now() - start);
}
const evaluation = training.about.models.evaluation ? await training.evaluate(steps[0]) : {};
fs.writeFileSync(`${output}.json`, JSON.stringify({ losses, times, evaluation, updates: training.updates }));
await training.save(`${output}.safetensors`);
