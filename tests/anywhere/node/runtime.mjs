// The runtimes of the tests: onnxruntime-web, in WebAssembly on one thread, and onnxruntime-node.
export async function runtime(name) {
  if (name === 'node') return { ort: await import('onnxruntime-node'), sessionOptions: { intraOpNumThreads: 1 } };
  const ort = await import('onnxruntime-web');
  ort.env.wasm.numThreads = 1;
  return { ort, sessionOptions: { executionProviders: ['wasm'] } };
}
