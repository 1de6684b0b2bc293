// node decode.mjs RUNTIME FOLDER CACHE STEPS TOKEN...
// Prints STEPS greedy tokens behind a prompt, of a folder from examples/onnx_decoder.py.
import { readFileSync } from "node:fs";

const [runtime, folder, cache, steps, ...words] = process.argv.slice(2);
const prompt = words.map(BigInt);

async function transformers() {
  const { AutoModelForCausalLM, Tensor, env } = await import("@huggingface/transformers");
  env.allowRemoteModels = false;
  const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype: "fp32" });
  const inputs = new Tensor("int64", BigInt64Array.from(prompt), [1, prompt.length]);
  const options = { max_new_tokens: Number(steps), do_sample: false, eos_token_id: -1 };
  const tokens = await model.generate({ inputs, ...options });
  return Array.from(tokens.data).slice(prompt.length);
}

async function onnxruntime() {
  const ort = await import(runtime);
  const session = await ort.InferenceSession.create(`${folder}/onnx/model.onnx`);
  const config = JSON.parse(readFileSync(`${folder}/config.json`));
  const length = cache === "shared" ? prompt.length + Number(steps) : 0;
  const shape = [1, config.num_key_value_heads, length, config.head_dim];
  const size = shape.reduce((a, b) => a * b);
  const names = session.inputNames.filter((name) => name.startsWith("past"));
  let past = names.map(() => new ort.Tensor("float32", new Float32Array(size), shape));
  const tokens = [...prompt];
  let ids = tokens;
  while (tokens.length < prompt.length + Number(steps)) {
    const mask = new BigInt64Array(tokens.length).fill(1n);
    const feeds = Object.fromEntries(names.map((name, index) => [name, past[index]]));
    feeds.input_ids = new ort.Tensor("int64", BigInt64Array.from(ids), [1, ids.length]);
    feeds.attention_mask = new ort.Tensor("int64", mask, [1, mask.length]);
    const outputs = await session.run(feeds);
    const logits = outputs.logits.data.subarray(-outputs.logits.dims[2]);
    ids = [BigInt(logits.indexOf(Math.max(...logits)))];
    tokens.push(...ids);
    past = names.map((name) => outputs[name.replace("past_key_values", "present")]);
  }
  return tokens.slice(prompt.length);
}

const tokens = await (runtime === "transformers.js" ? transformers() : onnxruntime());
console.log(JSON.stringify(tokens.map(Number)));
