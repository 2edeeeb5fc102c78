// What both halves of the page know of the server: how to ask it, and with which key.

const keyField = document.getElementById("key");
keyField.value = sessionStorage.getItem("mii-key") ?? "";
document.getElementById("key-form").addEventListener("submit", (event) => event.preventDefault());
keyField.addEventListener("input", () => sessionStorage.setItem("mii-key", keyField.value));

export const base = new URL(".", location.href).href;

export function key() {
  return keyField.value.trim();
}

export function headers() {
  return key() ? { Authorization: `Bearer ${key()}` } : {};
}

// Returns the response, or throws an Error with the server's own words.
export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(base + path, {
      ...options,
      headers: { ...headers(), ...options.headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
  if (response.status === 401) document.getElementById("key-box").open = true;
  if (!response.ok) throw new Error(await wordsOf(response));
  return response;
}

async function wordsOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.status ?? text;
  } catch {
    return text || `HTTP status ${response.status}`;
  }
}

// Yields the data of each server-sent event.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
