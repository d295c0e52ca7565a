// Unchanged npm clients and agents against a server: the table of docs/use/clients.md, as check.py prints it.
//
// `tests/clients/run.sh PYTHON node tests/clients/check.mjs NODE_MODULES`

import { execFile } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { promisify } from "node:util";
import assert from "node:assert";

const url = process.env.URL;
const modules = resolve(process.argv[2]);
const require = createRequire(join(modules, "check.js"));
const load = async (name) => {
  const found = require(name);
  return found.default ?? found;
};
const run = promisify(execFile);
const MODEL = "org/tiny", KEY = "none", ASKED = "Weather in Paris?", ANSWER = "It is sunny.";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const server = url.replace(/\/v1$/, "");
const home = () => mkdtempSync(join(modules, "..", "home-"));
const path = process.env.PATH;

async function aiTools(model) {
  const { generateText, streamText, tool, jsonSchema, stepCountIs } = require("ai");
  const tools = {
    get_weather: tool({ description: "The weather", inputSchema: jsonSchema(parameters), execute: async () => "20 °C" }),
  };
  const whole = await generateText({ model, prompt: ASKED, tools, stopWhen: stepCountIs(4) });
  assert.equal(whole.text, ANSWER);
  const streamed = streamText({ model, prompt: ASKED, tools, stopWhen: stepCountIs(4) });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.ok(text.endsWith(ANSWER), text);
}

async function aiObject(model) {
  const { generateObject, generateText, jsonSchema, Output } = require("ai");
  const schema = jsonSchema({ ...parameters, additionalProperties: false });
  const asked = { model, prompt: "The city of the Louvre, as JSON" };
  assert.deepEqual((await generateObject({ ...asked, schema })).object, { city: "Paris" });
  assert.deepEqual((await generateText({ ...asked, output: Output.object({ schema }) })).output, { city: "Paris" });
}

const checks = [
  ["openai", "chat and responses as streams", async () => {
    const OpenAI = await load("openai");
    const client = new OpenAI({ baseURL: url, apiKey: KEY });
    const chat = await client.chat.completions.create({ model: MODEL, messages: [{ role: "user", content: ASKED }], stream: true });
    let text = "";
    for await (const chunk of chat) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, ANSWER);
    const stream = client.responses.stream({ model: MODEL, input: ASKED });
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
  }],
  ["@ai-sdk/openai", "generateText and streamText with a tool, over responses", async () => {
    await aiTools(require("@ai-sdk/openai").createOpenAI({ baseURL: url, apiKey: KEY })(MODEL));
  }],
  ["@ai-sdk/openai", "the same, over chat", async () => {
    await aiTools(require("@ai-sdk/openai").createOpenAI({ baseURL: url, apiKey: KEY }).chat(MODEL));
  }],
  ["@ai-sdk/openai", "generateObject, and generateText with an object as output, over responses and chat", async () => {
    const provider = require("@ai-sdk/openai").createOpenAI({ baseURL: url, apiKey: KEY });
    for (const model of [provider(MODEL), provider.chat(MODEL)]) await aiObject(model);
  }],
  ["@ai-sdk/anthropic", "generateText and streamText with a tool, over messages", async () => {
    await aiTools(require("@ai-sdk/anthropic").createAnthropic({ baseURL: url, apiKey: KEY })(MODEL));
  }],
  ["@openai/codex", "codex exec, with unknown tool calls", async () => {
    const directory = home();
    const provider = `name = "ATOM"\nbase_url = "${url}"\nwire_api = "responses"\n`;
    writeFileSync(
      join(directory, "config.toml"),
      `model = "${MODEL}"\nmodel_provider = "atom"\n[model_providers.atom]\n${provider}`
    );
    const options = { cwd: directory, env: { PATH: path, HOME: directory, CODEX_HOME: directory }, timeout: 120000 };
    const done = run(join(modules, ".bin", "codex"), ["exec", "--skip-git-repo-check", ASKED], options);
    done.child.stdin.end();
    assert.ok((await done).stdout.includes(ANSWER));
  }],
  ["@anthropic-ai/claude-code", "claude -p, with unknown tool calls", async () => {
    const directory = home();
    const env = {
      PATH: path,
      HOME: directory,
      ANTHROPIC_BASE_URL: server,
      ANTHROPIC_API_KEY: KEY,
      ANTHROPIC_MODEL: MODEL,
      ANTHROPIC_SMALL_FAST_MODEL: MODEL,
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    };
    const done = run(join(modules, ".bin", "claude"), ["-p", ASKED], { cwd: directory, env, timeout: 120000 });
    done.child.stdin.end();
    assert.ok((await done).stdout.includes(ANSWER));
  }],
];

let failed = 0;
console.log("| client | version | what | |\n|---|---|---|---|");
for (const [name, what, check] of checks) {
  let result = "works";
  try {
    await check();
  } catch (error) {
    failed += 1;
    result = "FAILS";
    console.error(error);
  }
  const { version } = JSON.parse(readFileSync(join(modules, name, "package.json")));
  console.log(`| ${name} | ${version} | ${what} | ${result} |`);
}
process.exit(failed);
