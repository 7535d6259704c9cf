// The chat playground: one conversation, streamed, stoppable, with the thinking folded away.
import { chat } from "./api.js";

const $ = (id) => document.getElementById(id);
const history = []; // messages as the API wants them
let running = null; // AbortController of the answer being streamed

function field(name) {
  return document.querySelector(`#parameters [name=${name}]`);
}

/** The API key that was entered. */
export function key() {
  return field("key").value;
}

function number(name) {
  const text = field(name).value;
  return text === "" ? undefined : Number(text);
}

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

/** Show a message; returns functions that add to it. */
function show(role) {
  $("empty")?.remove();
  const box = element("article", `message ${role}`);
  const thinking = element("details", "thinking");
  const thoughts = element("div", "text");
  const text = element("div", "text");
  thinking.append(element("summary", "", "Thinking"), thoughts);
  thinking.hidden = true;
  box.append(element("h3", "", role === "user" ? "You" : "Model"), thinking, text);
  $("messages").append(box);
  const scroll = () => ($("messages").scrollTop = $("messages").scrollHeight);
  scroll();
  return {
    think(piece) {
      thinking.hidden = false;
      thoughts.textContent += piece;
      scroll();
    },
    say(piece) {
      text.textContent += piece;
      scroll();
    },
    end(note) {
      if (note) box.append(element("p", "end quiet", note));
      scroll();
    },
  };
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function body() {
  const system = field("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  return {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    chat_template_kwargs: { enable_thinking: field("thinking").checked },
  };
}

function busy(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").disabled = controller === null;
}

/** Stream the answer to what history holds now. */
async function answer() {
  const controller = new AbortController();
  const view = show("assistant");
  let content = "";
  let note = "";
  const began = performance.now();
  busy(controller);
  try {
    for await (const chunk of chat(body(), key(), controller.signal)) {
      const choice = chunk.choices[0];
      if (choice?.delta.reasoning_content) view.think(choice.delta.reasoning_content);
      if (choice?.delta.content) {
        content += choice.delta.content;
        view.say(choice.delta.content);
      }
      if (choice?.finish_reason === "length") note = "Cut off: no more tokens were allowed.";
      if (chunk.usage) {
        const seconds = (performance.now() - began) / 1000;
        const tokens = chunk.usage.completion_tokens;
        $("speed").textContent = `${tokens} tokens, ${(tokens / seconds).toFixed(1)} a second`;
      }
    }
  } catch (error) {
    if (controller.signal.aborted) note = "Stopped.";
    else fail(error.message);
  } finally {
    view.end(note);
    history.push({ role: "assistant", content });
    busy(null);
    $("prompt").focus();
  }
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || running) return;
  fail("");
  history.push({ role: "user", content: text });
  show("user").say(text);
  $("prompt").value = "";
  answer();
}

function reset() {
  running?.abort();
  history.length = 0;
  $("messages").replaceChildren();
  $("speed").textContent = "";
  fail("");
  $("prompt").focus();
}

/** Connect the form's buttons and keys. */
export function startChat() {
  $("ask").addEventListener("submit", send);
  $("stop").addEventListener("click", () => running?.abort());
  $("reset").addEventListener("click", reset);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
}
