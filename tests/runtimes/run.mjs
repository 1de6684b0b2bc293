// node run.mjs PACKAGE FOLDER
// Runs FOLDER/model.onnx on each entry of FOLDER/feeds.json and writes FOLDER/results.json.
import { readFileSync, writeFileSync } from "node:fs";

const [packageName, folder] = process.argv.slice(2);
const ort = await import(packageName);
const arrayTypes = { float32: Float32Array, int64: BigInt64Array };

function decode({ type, dims, data }) {
  const bytes = Uint8Array.from(Buffer.from(data, "base64"));
  return new ort.Tensor(type, new arrayTypes[type](bytes.buffer), dims);
}

function encode({ type, dims, data }) {
  const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  return { type, dims, data: bytes.toString("base64") };
}

function mapValues(object, change) {
  return Object.fromEntries(Object.entries(object).map(([key, value]) => [key, change(value)]));
}

try {
  const session = await ort.InferenceSession.create(`${folder}/model.onnx`);
  const results = [];
  for (const feed of JSON.parse(readFileSync(`${folder}/feeds.json`, "utf8"))) {
    results.push(mapValues(await session.run(mapValues(feed, decode)), encode));
  }
  writeFileSync(`${folder}/results.json`, JSON.stringify(results));
} catch (error) {
  console.error(error.message);
  process.exit(1);
}
