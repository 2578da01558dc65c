// Draws, predicts and trains; the model, its optimizer and the runner come from `lightning_ort.export_training`.
import * as ort from './onnxruntime/ort.wasm.min.mjs';
import { Training } from './model/training.mjs';

const STEPS = 8; // for each digit that is taught
const BESIDE = 24; // images of the first training that each batch has beside the user's
const $ = (id) => document.getElementById(id);
const pad = $('pad'), pen = pad.getContext('2d', { willReadFrequently: true });
let training, practice, isBusy = false;
const taught = [], losses = [];

ort.env.wasm.wasmPaths = new URL('./onnxruntime/', import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need a page that is isolated from others

// drawing

function clear() {
  pen.fillStyle = '#fff';
  pen.fillRect(0, 0, 256, 256);
  pad.dataset.ink = '';
  show(null);
}

let last = null;
const place = ({ clientX, clientY }) => {
  const box = pad.getBoundingClientRect();
  return [((clientX - box.left) * 256) / box.width, ((clientY - box.top) * 256) / box.height];
};
pad.addEventListener('pointerdown', (event) => { pad.setPointerCapture(event.pointerId); last = place(event); stroke(event); });
pad.addEventListener('pointermove', (event) => { if (last) stroke(event); });
pad.addEventListener('pointerup', () => { last = null; predict(); });
pad.addEventListener('pointercancel', () => { last = null; });

function stroke(event) {
  const next = place(event);
  Object.assign(pen, { lineWidth: 22, lineCap: 'round', lineJoin: 'round', strokeStyle: '#000' });
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...next);
  pen.stroke();
  last = next;
  pad.dataset.ink = 'yes';
}

/** The drawing as the digits of the first training are: how many of 4 x 4 points of a square have ink. */
function pixels() {
  const { data } = pen.getImageData(0, 0, 256, 256);
  const isInk = (x, y) => data[4 * (y * 256 + x)] < 128;
  let [left, top, right, bottom] = [256, 256, 0, 0];
  for (let y = 0; y < 256; y += 2) for (let x = 0; x < 256; x += 2) if (isInk(x, y)) {
    [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
  }
  // centred, and as high as those are
  const size = Math.max(bottom - top, right - left, 1) * 1.05;
  const [x0, y0] = [(left + right - size) / 2, (top + bottom - size) / 2];
  const found = new Float32Array(64);
  for (let i = 0; i < 32; i++) for (let j = 0; j < 32; j++) {
    const x = Math.round(x0 + ((j + 0.5) * size) / 32), y = Math.round(y0 + ((i + 0.5) * size) / 32);
    if (x >= 0 && y >= 0 && x < 256 && y < 256 && isInk(x, y)) found[(i >> 2) * 8 + (j >> 2)] += 1 / 16;
  }
  return found;
}

// the model

const images = (rows) => {
  const data = new Float32Array(64 * rows.length);
  rows.forEach((row, index) => data.set(row, 64 * index));
  return { data, dims: [rows.length, 1, 8, 8] };
};

async function predict() {
  if (!training || isBusy || !pad.dataset.ink) return;
  const { output } = await training.predict([images([pixels()])]);
  show([...output.data]);
}

async function teach(label) {
  if (isBusy || !training) return;
  if (!pad.dataset.ink) return say('Draw a digit first.');
  setBusy(true);
  try {
    taught.push({ row: pixels(), label });
    for (let step = 0; step < STEPS; step++) {
      const rows = [...taught.slice(-16)];
      for (let i = 0; i < BESIDE; i++) rows.push(practice[Math.floor(Math.random() * practice.length)]);
      const batch = { images: images(rows.map(({ row }) => row)), labels: rows.map((each) => each.label) };
      const { loss } = await training.step(batch);
      losses.push(loss);
      plot();
      await new Promise(requestAnimationFrame);
    }
    say(`Learned your ${label}.`);
  } catch (error) {
    say(error.message, true);
  } finally {
    setBusy(false);
  }
  await predict();
}

async function load(state) {
  training = await Training.load(new URL('./model', import.meta.url).href, { ort, state, sessionOptions: { executionProviders: ['wasm'] } });
  say(`Ready, after ${training.updates} steps of training.`);
  figures();
}

// what is shown

function say(text, isError = false) {
  $('status').textContent = text;
  $('status').classList.toggle('error', isError);
}

function setBusy(value) {
  isBusy = value;
  for (const button of document.querySelectorAll('#labels button, #save')) button.disabled = value || !training;
  if (value) say('Learning …');
}

function show(shares) {
  const best = shares ? shares.indexOf(Math.max(...shares)) : -1;
  $('bars').replaceChildren(...Array.from({ length: 10 }, (_, digit) => {
    const row = document.createElement('div'), share = shares ? shares[digit] : 0;
    row.className = digit === best ? 'best' : '';
    row.innerHTML = `<span>${digit}</span><i style="width:${(100 * share).toFixed(1)}%"></i><span>${shares ? `${(100 * share).toFixed(0)} %` : ''}</span>`;
    return row;
  }));
  document.body.dataset.best = best;
}

function plot() {
  const top = Math.max(...losses, 0.1), wide = Math.max(losses.length - 1, 1);
  const points = losses.map((loss, index) => `${((100 * index) / wide).toFixed(2)},${(96 - (92 * loss) / top).toFixed(2)}`);
  $('plot').innerHTML = `<polyline points="${points.join(' ')}"/>`;
  figures();
}

function figures() {
  const now = losses.length ? `Loss ${losses.at(-1).toFixed(3)} after ${losses.length} steps here, ` : 'No step here yet, ';
  $('figures').textContent = `${now}${training.updates} in all.`;
  document.body.dataset.updates = training.updates;
}

for (let digit = 0; digit < 10; digit++) {
  const button = document.createElement('button');
  button.textContent = digit;
  button.disabled = true;
  button.addEventListener('click', () => teach(digit));
  $('labels').append(button);
}
$('clear').addEventListener('click', clear);
$('save').addEventListener('click', async () => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([await training.bytes()]));
  link.download = 'state.safetensors';
  link.click();
  URL.revokeObjectURL(link.href);
});
$('open').addEventListener('change', async ({ target }) => {
  try {
    await load(new Uint8Array(await target.files[0].arrayBuffer()));
    await predict();
  } catch (error) {
    say(error.message, true);
  }
});

clear();
try {
  const given = await (await fetch('./practice.json')).json();
  practice = given.images.map((row, index) => ({ row: row.map((ink) => ink / 16), label: given.labels[index] }));
  await load();
  setBusy(false);
  document.body.dataset.ready = 'yes';
} catch (error) {
  say(error.message, true);
  document.body.dataset.ready = 'failed';
}
Object.assign(window, { teachDigit: teach, training: () => training, pixelsOfPad: pixels }); // for whoever looks into it
