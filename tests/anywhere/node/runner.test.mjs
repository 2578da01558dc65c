// FOLDER is an export of tests/anywhere/modules.py's DigitsCNN; test_in_node.py sets it, and OTHER, one of another module.
import assert from 'node:assert/strict';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import test from 'node:test';
import { pathToFileURL } from 'node:url';
import { runtime } from './runtime.mjs';

const { FOLDER, OTHER } = process.env;
const { Training, TrainingError, readState } = await import(pathToFileURL(`${FOLDER}/training.mjs`));
const copy = () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'training-'));
  fs.cpSync(FOLDER, folder, { recursive: true });
  return folder;
};
const batch = (rows) => ({
  batch_0: { data: Float32Array.from({ length: rows * 64 }, (_, i) => Math.sin(i)), dims: [rows, 1, 8, 8] },
  batch_1: Array.from({ length: rows }, (_, i) => i % 10),
});

for (const name of ['web', 'node']) {
  const options = await runtime(name);

  test(`${name}: trains, evaluates, predicts, saves and goes on`, async () => {
    const folder = copy();
    const training = await Training.load(folder, options);
    const first = await training.step(batch(6));
    assert.equal(first.loss, first.train_loss);
    const seen = [];
    await training.fit([batch(6), batch(3), batch(6), batch(6)], {
      lr: (updates) => 1e-2 / (1 + updates),
      progress: (number, { loss }) => { seen.push(loss); return number < 2; },
    });
    assert.equal(seen.length, 3);
    assert.equal(training.updates, 4);
    assert.ok(seen[2] < first.loss);
    const { val_loss: loss } = await training.evaluate(batch(6));
    assert.deepEqual((await training.predict([batch(2).batch_0])).output.dims, [2, 10]);
    await training.save();
    const again = await Training.load(folder, options);
    assert.equal(again.updates, 4);
    assert.equal((await again.evaluate(batch(6))).val_loss, loss);
    const fromBytes = await Training.load(folder, { ...options, state: await training.bytes() });
    assert.deepEqual((await fromBytes.step(batch(6))).loss, (await training.step(batch(6))).loss);
  });

  test(`${name}: a batch that does not fit is refused, and changes nothing`, async () => {
    const training = await Training.load(FOLDER, options);
    const before = await training.bytes();
    const { batch_0: images, batch_1: labels } = batch(6);
    for (const [wrong, message] of [
      [{ batch_0: images }, /has the fields batch_0; expected are batch_0: float32\[batch,1,8,8\], batch_1/],
      [[images], /has 1 fields/],
      [null, /pass a batch with the fields/],
      [{ batch_0: { data: images.data, dims: [6, 1, 64] }, batch_1: labels }, /'batch_0' has shape \[6,1,64\], but the model takes/],
      [{ batch_0: images, batch_1: labels.slice(1) }, /'batch_1' has shape \[5\], but the model takes \[batch\] with {"batch":6}/],
      [{ batch_0: { data: new Float64Array(384), dims: [6, 1, 8, 8] }, batch_1: labels }, /is a Float64Array, but the model takes float32/],
      [{ batch_0: images, batch_1: [0.5, 1, 2, 3, 4, 5] }, /not whole; the model takes int64/],
      [{ batch_0: { data: images.data, dims: [5, 1, 8, 8] }, batch_1: labels }, /has 384 numbers for the shape/],
      [{ batch_0: images, batch_1: [[1], [2, 3]] }, /have different lengths/],
      [{ batch_0: images, batch_1: ['1', 2, 3, 4, 5, 6] }, /'batch_1' has "1", which is no number; the model takes int64/],
      [{ batch_0: { data: Array(384).fill(undefined), dims: [6, 1, 8, 8] }, batch_1: labels }, /has undefined, which is no number/],
      [{ batch_0: { data: images.data, dims: [6, 1, 8, undefined] }, batch_1: labels }, /pass whole numbers/],
      [{ batch_0: images, batch_1: [2 ** 70, 1, 2, 3, 4, 5] }, /which is no int64/],
    ]) {
      await assert.rejects(training.step(wrong), (error) => message.test(error.message) || assert.fail(error.message));
    }
    await assert.rejects(training.predict(images, labels), /has 2 fields; expected are/);
    await assert.rejects(training.evaluate(images), /has the fields data, dims; expected are batch_0/);
    await assert.rejects(training.step(batch(6), 1e-3), /0.001: pass options as { lr, update }/);
    await assert.rejects(training.fit([batch(6)], { learningRate: 1 }), /learningRate: pass options as { lr, progress }/);
    await assert.rejects(training.step(batch(6), { lr: NaN }), /must be a number of float32/);
    await assert.rejects(training.step(batch(6), { lr: 1e39 }), /must be a number of float32/);
    await assert.rejects(training.step(batch(6), { lr: [1, 2] }), /pass a number, or 1 of them/);
    assert.deepEqual(await training.bytes(), before);
  });

  test(`${name}: a folder that is damaged or of something else is refused`, async () => {
    await assert.rejects(Training.load('/nowhere', options), (error) => error instanceof TrainingError && /training\.json cannot be read/.test(error.message));
    await assert.rejects(Training.load(FOLDER, {}), /pass \{ ort \}/);
    const change = async (file, edit, message) => {
      const folder = copy(), target = path.join(folder, file);
      edit(target);
      await assert.rejects(Training.load(folder, options), (error) => error instanceof TrainingError && (message.test(error.message) || assert.fail(error.message)));
    };
    await change('training.json', (file) => fs.writeFileSync(file, '{"format": 99}'), /has format 99/);
    await change('training.json', (file) => fs.writeFileSync(file, '{'), /training\.json cannot be read/);
    await change('training.onnx', (file) => fs.rmSync(file), /training\.onnx cannot be read/);
    await change('training.onnx', (file) => fs.truncateSync(file, 1000), /has 1000 bytes instead of \d+: it is damaged/);
    await change('training.onnx', (file) => {
      const bytes = fs.readFileSync(file);
      bytes[bytes.length >> 1] ^= 255;
      fs.writeFileSync(file, bytes);
    }, /is damaged, or of another export/);
    await change('training.json', (file) => fs.writeFileSync(file, '{"format": 2}'), /has no 'fields': it is damaged/);
    await change('training.json', (file) => {
      const about = JSON.parse(fs.readFileSync(file));
      about.models.training.file = '../training.onnx';
      fs.writeFileSync(file, JSON.stringify(about));
    }, /names '\.\.\/training\.onnx', which is not in the folder/);
    await change('state.safetensors', (file) => {
      const bytes = fs.readFileSync(file);
      bytes[bytes.length - 1] ^= 1;
      fs.writeFileSync(file, bytes);
    }, /its content is not what its metadata's sha256 says/);
    await change('state.safetensors', (file) => fs.truncateSync(file, 500), /no safetensors file, or it is damaged/);
    await change('state.safetensors', (file) => fs.cpSync(`${OTHER}/state.safetensors`, file), /the state is of another model/);
  });

  test(`${name}: a model that this runtime does not know says what is needed`, async () => {
    const folder = copy();
    const about = JSON.parse(fs.readFileSync(`${folder}/training.json`));
    const bytes = fs.readFileSync(`${folder}/training.onnx`);
    bytes[1] = 99; // the IR version, the first field of a model
    fs.writeFileSync(`${folder}/training.onnx`, bytes);
    delete about.files['training.onnx'];
    fs.writeFileSync(`${folder}/training.json`, JSON.stringify(about));
    await assert.rejects(Training.load(folder, options), /training\.onnx cannot be loaded by this runtime, which has to be 1\.17 or later/);
  });
}

test('a save that fails leaves the state as it was', async () => {
  const folder = copy();
  const training = await Training.load(folder, await runtime('node'));
  await training.step(batch(6));
  const before = fs.readFileSync(`${folder}/state.safetensors`);
  await assert.rejects(training.save(`${folder}/no/such/folder`));
  fs.mkdirSync(`${folder}/taken`);
  await assert.rejects(training.save(`${folder}/taken`)); // a folder of that name
  assert.deepEqual(fs.readFileSync(`${folder}/state.safetensors`), before);
  assert.deepEqual(fs.readdirSync(folder).filter((name) => name.includes('.part')), []);
  await training.save();
  const [, metadata] = await readState(fs.readFileSync(`${folder}/state.safetensors`));
  assert.equal(metadata.step, '1');
});

test('a state of a training that has failed does not replace a good one, and the rest of a killed process goes', async () => {
  const folder = copy(), before = fs.readFileSync(`${folder}/state.safetensors`);
  fs.writeFileSync(`${folder}/.state.safetensors.4194305.part`, 'half');
  const training = await Training.load(folder, await runtime('node'));
  for (let i = 0; i < 20; i++) await training.step(batch(6), { lr: 1e38 });
  await assert.rejects(training.save(), /the training has failed, and nothing is saved/);
  assert.deepEqual(fs.readFileSync(`${folder}/state.safetensors`), before);
  await (await Training.load(folder, await runtime('node'))).save();
  assert.deepEqual(fs.readdirSync(folder).filter((name) => name.includes('.part')), []);
});

test('random numbers are drawn, and sizes for which the step does something else are refused', async () => {
  let seed = 0;
  const random = () => (seed = (seed * 16807 + 7) % 2147483647) / 2147483647;
  const training = await Training.load(process.env.NOISY, { ...(await runtime('web')), random });
  const x = { data: new Float32Array(40 * 4), dims: [40, 4] }, found = [];
  for (let i = 0; i < 50; i++) found.push(await training.step({ x }, { lr: 0 }));
  const mean = (name) => found.reduce((total, each) => total + each[name], 0) / found.length;
  assert.ok(new Set(found.map(({ noise }) => noise)).size > 45);
  assert.ok(Math.abs(mean('noise')) < 0.1 && Math.abs(mean('spread') - 1) < 0.1 && Math.abs(mean('dropped') - 0.25) < 0.05);
  await assert.rejects(training.step({ x: { data: x.data.slice(0, 20), dims: [5, 4] } }), /has batch 5; the model is right where batch != 5, the module does something else \(test_in_node\.py:\d+\)/);
});

test('a folder as bytes by name, as a page that was given files has them', async () => {
  const files = Object.fromEntries(fs.readdirSync(FOLDER).map((name) => [name, fs.readFileSync(`${FOLDER}/${name}`)]));
  const training = await Training.load(files, await runtime('web'));
  assert.ok((await training.step(batch(4))).loss > 0);
  await assert.rejects(training.save(), /use bytes\(\)/);
});
