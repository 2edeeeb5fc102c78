// The playground: a conversation, its parameters, and the same request as code.

import { ask, base, eventsOf, key } from "./api.js";

const $ = (id) => document.getElementById(id);
const conversation = [];
let controller = null;
let model = "default";
let language = "curl";

function numberIn(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function requestBody(messages) {
  const system = $("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: numberIn("temperature"),
    top_p: numberIn("top_p"),
    max_tokens: numberIn("max_tokens"),
    seed: numberIn("seed"),
  };
  const schema = $("schema").value.trim();
  if (schema) {
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: JSON.parse(schema) },
    };
  }
  return body;
}

function show(message) {
  const item = document.createElement("li");
  item.className = message.role;
  item.textContent = message.content;
  $("conversation").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

function fail(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || controller) return;
  $("error").hidden = true;
  const question = { role: "user", content: text };
  let body;
  try {
    body = requestBody([...conversation, question]);
  } catch (error) {
    fail(new Error(`The JSON schema is not JSON: ${error.message}`));
    return;
  }
  controller = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const asked = show(question);
  const item = show({ role: "assistant", content: "" });
  item.classList.add("busy");
  try {
    const answer = await stream(body, item, controller.signal);
    conversation.push(question, { role: "assistant", content: answer });
    $("prompt").value = "";
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    if (item.textContent) {
      conversation.push(question, { role: "assistant", content: item.textContent });
      $("prompt").value = "";
    } else {
      asked.remove();
      item.remove();
    }
  } finally {
    item.classList.remove("busy");
    controller = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("prompt").focus();
    showCode();
  }
}

async function stream(body, item, signal) {
  const began = performance.now();
  let first = null;
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let answer = "";
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const piece = chunk.choices[0]?.delta?.content;
    if (piece) {
      first ??= performance.now();
      answer += piece;
      item.textContent = answer;
      item.scrollIntoView({ block: "nearest" });
    }
    if (chunk.usage) tellSpeed(chunk.usage.completion_tokens, began, first ?? began);
  }
  return answer;
}

function tellSpeed(tokens, began, first) {
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  $("speed").textContent = `first token after ${Math.round(first - began)} ms${rate}`;
}

function asCurl(body) {
  const auth = key() ? ` \\\n  -H "Authorization: Bearer $MII_API_KEY"` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${base}v1/chat/completions \\\n  -H "Content-Type: application/json"${auth} \\\n  -d '${json}'`;
}

function asPython(body) {
  const { model: name, messages, response_format: format, ...rest } = body;
  const parameters = Object.entries(rest)
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => `    ${name}=${value},`);
  if (format) parameters.push(`    response_format=json.loads(${JSON.stringify(JSON.stringify(format))}),`);
  const lines = messages.map((message) => `        ${JSON.stringify(message)},`);
  return [
    ...(format ? ["import json"] : []),
    key() ? "import os\n\nfrom openai import OpenAI\n" : "from openai import OpenAI\n",
    `client = OpenAI(base_url="${base}v1", api_key=${key() ? 'os.environ["MII_API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(",
    `    model=${JSON.stringify(name)},`,
    "    messages=[",
    ...lines,
    "    ],",
    ...parameters,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

function showCode() {
  const text = $("prompt").value.trim() || "Hello";
  try {
    const body = requestBody([...conversation, { role: "user", content: text }]);
    $("code").textContent = language === "curl" ? asCurl(body) : asPython(body);
  } catch (error) {
    $("code").textContent = `The JSON schema is not JSON: ${error.message}`;
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => controller?.abort());
$("clear").addEventListener("click", () => {
  controller?.abort();
  conversation.length = 0;
  $("conversation").replaceChildren();
  $("error").hidden = true;
  $("speed").textContent = "";
  $("prompt").focus();
  showCode();
});
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("code").textContent);
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
});
for (const button of document.querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => {
    language = button.dataset.language;
    for (const each of document.querySelectorAll("[data-language]")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
    showCode();
  });
}
$("ask").addEventListener("input", showCode);

async function nameModel() {
  try {
    const answer = await (await ask("v1/models")).json();
    model = answer.data[0].id;
    const { dtype, max_model_len: length } = answer.data[0];
    $("model").textContent = `${model}, ${dtype}, ${length} tokens of context`;
    document.title = `${model} on mii`;
  } catch (error) {
    $("model").textContent = "";
    setTimeout(nameModel, 3000);
  }
  showCode();
}
nameModel();
