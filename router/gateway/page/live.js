// The live view: /metrics, every two seconds, as tiles with small plots.

import { ask } from "./api.js";

const SECONDS = 2;
const KEPT = 60; // samples of a plot: two minutes
const WINDOW = 15; // samples that latencies and hits are taken over: half a minute

const $ = (id) => document.getElementById(id);
const errors = [];
const tiles = new Map();
const history = []; // the latest samples, oldest first
let before = null; // the latest of them

// Returns {name: [{labels, value}, ...]} of Prometheus' text format.
export function parse(text) {
  const families = {};
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const [, name, inside, number] = found;
    const labels = {};
    for (const [, label, value] of (inside ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[label] = value;
    }
    (families[name] ??= []).push({ labels, value: Number(number.replace("+Inf", "Infinity")) });
  }
  return families;
}

function total(families, name) {
  return (families[name] ?? []).reduce((sum, each) => sum + each.value, 0);
}

function change(now, name, since = before) {
  return since ? Math.max(0, total(now, name) - total(since.families, name)) : 0;
}

// Returns the quantile of what a histogram has counted in the last half minute; null: nothing.
function quantile(now, name, part) {
  const buckets = new Map();
  for (const [sign, families] of [[1, now], [-1, history[0]?.families ?? {}]]) {
    for (const { labels, value } of families[`${name}_bucket`] ?? []) {
      const bound = Number(labels.le.replace("+Inf", "Infinity"));
      buckets.set(bound, (buckets.get(bound) ?? 0) + sign * value);
    }
  }
  const bounds = [...buckets.keys()].sort((a, b) => a - b);
  const count = buckets.get(Infinity) ?? 0;
  if (!history.length || count <= 0) return null;
  let low = 0;
  let under = 0;
  for (const bound of bounds) {
    const upTo = buckets.get(bound);
    if (upTo >= part * count) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (part * count - under)) / Math.max(1, upTo - under);
    }
    low = bound;
    under = upTo;
  }
  return low;
}

function milliseconds(seconds) {
  if (seconds === null) return "\u2013";
  return seconds < 10 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

function percent(ratio) {
  return ratio === null ? "\u2013" : `${(100 * ratio).toFixed(0)} %`;
}

function figures(now, seconds) {
  const blocks = total(now, "mii:kv_cache_blocks");
  const prompts = change(now, "mii:prompt_tokens_total", history[0]);
  const cached = change(now, "mii:cached_prompt_tokens_total", history[0]);
  return [
    ["Requests running", total(now, "mii:num_requests_running"), String],
    ["Requests waiting", total(now, "mii:num_requests_waiting"), String],
    ["Tokens per second", change(now, "mii:generation_tokens_total") / seconds, (x) => x.toFixed(1)],
    ["KV cache used", blocks ? 1 - total(now, "mii:kv_cache_free_blocks") / blocks : null, percent],
    ["Prefix cache hits", prompts ? cached / prompts : null, percent],
    ["First token, median", quantile(now, "mii:time_to_first_token_seconds", 0.5), milliseconds],
    ["First token, p95", quantile(now, "mii:time_to_first_token_seconds", 0.95), milliseconds],
    ["Between tokens, median", quantile(now, "mii:inter_token_latency_seconds", 0.5), milliseconds],
    ["Between tokens, p95", quantile(now, "mii:inter_token_latency_seconds", 0.95), milliseconds],
  ];
}

function showTile(name, value, format) {
  let tile = tiles.get(name);
  if (!tile) {
    const element = document.createElement("dl");
    element.className = "tile";
    element.innerHTML = '<dt></dt><dd></dd><svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img"><polyline></polyline></svg>';
    element.querySelector("dt").textContent = name;
    $("tiles").append(element);
    tiles.set(name, (tile = { element, samples: [] }));
  }
  tile.samples.push(value ?? NaN);
  if (tile.samples.length > KEPT) tile.samples.shift();
  const words = value === null ? "\u2013" : format(value);
  tile.element.querySelector("dd").textContent = words;
  tile.element.querySelector("svg").setAttribute("aria-label", `${name}: ${words}`);
  const top = Math.max(...tile.samples.filter(Number.isFinite), 1e-9);
  const points = tile.samples
    .map((sample, index) => [(100 * (index + KEPT - tile.samples.length)) / (KEPT - 1), sample])
    .filter(([, sample]) => Number.isFinite(sample))
    .map(([x, sample]) => `${x.toFixed(1)},${(28 - (26 * sample) / top).toFixed(1)}`);
  tile.element.querySelector("polyline").setAttribute("points", points.join(" "));
}

function showReplicas(now) {
  const of = (name, replica) =>
    now[name]?.find((each) => each.labels.replica === replica)?.value ?? null;
  const rows = (now["mii:replica_up"] ?? []).map(({ labels: { replica }, value }) => {
    const used = of("mii:kv_cache_usage_ratio", replica);
    const cells = [
      replica,
      value ? "serving" : "down",
      of("mii:num_requests_running", replica) ?? "\u2013",
      of("mii:num_requests_waiting", replica) ?? "\u2013",
      percent(used),
      of("mii:replica_deaths_total", replica) ?? 0,
    ];
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = cell;
    row.cells[1].className = value ? "up" : "down";
    return row;
  });
  $("replicas").replaceChildren(...rows);
}

function noteErrors(now) {
  const fine = ["ok", "cancelled"];
  for (const { labels, value } of now["mii:requests_total"] ?? []) {
    if (fine.includes(labels.outcome) || !before) continue;
    const earlier = (before.families["mii:requests_total"] ?? []).find(
      (each) => each.labels.outcome === labels.outcome && each.labels.surface === labels.surface,
    );
    const more = value - (earlier?.value ?? 0);
    if (more > 0) {
      errors.unshift(`${new Date().toLocaleTimeString()}: ${more} x ${labels.outcome} (${labels.surface})`);
    }
  }
  errors.length = Math.min(errors.length, 12);
  if (errors.length) {
    $("errors").replaceChildren(
      ...errors.map((words) => Object.assign(document.createElement("li"), { textContent: words })),
    );
  }
}

function tell(state, words) {
  $("state").className = state;
  if ($("state-words").textContent !== words) $("state-words").textContent = words;
}

async function look() {
  try {
    const families = parse(await (await ask("metrics")).text());
    const at = performance.now();
    const seconds = before ? (at - before.at) / 1000 : SECONDS;
    for (const [name, value, format] of figures(families, seconds)) showTile(name, value, format);
    showReplicas(families);
    noteErrors(families);
    before = { families, at };
    history.push(before);
    if (history.length > WINDOW) history.shift();
    const up = (families["mii:replica_up"] ?? []).filter((each) => each.value).length;
    const all = (families["mii:replica_up"] ?? []).length;
    tell(up ? "up" : "down", up ? `serving, ${up} of ${all} replicas` : "no replica can answer");
    $("age").textContent = "";
  } catch (error) {
    tell("down", error.message);
    $("age").textContent = "not up to date";
  }
  setTimeout(look, 1000 * SECONDS);
}
look();
