// The live view: numbers twice a second, their history, and the expert map.
import { live } from "./api.js";
import { ExpertMap } from "./experts.js";

const $ = (id) => document.getElementById(id);
const KEPT = 120; // points of history: a minute

/** A line over the last minute, scaled to its largest value or to `top`. */
class Line {
  constructor(canvas, top = null) {
    this.canvas = canvas;
    this.top = top;
    this.values = [];
  }

  add(value) {
    this.values = [...this.values, value].slice(-KEPT);
    this.draw();
  }

  draw() {
    const { canvas, values } = this;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const top = this.top ?? Math.max(1, ...values);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(0.5, 0.5, canvas.width - 1, canvas.height - 1);
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 2;
    context.beginPath();
    values.forEach((value, i) => {
      const x = ((i + KEPT - values.length) / (KEPT - 1)) * canvas.width;
      context.lineTo(x, canvas.height - 3 - (value / top) * (canvas.height - 6));
    });
    context.stroke();
    if (this.top === null) {
      context.fillStyle = style.getPropertyValue("--quiet");
      context.font = "12px system-ui";
      context.fillText(top.toFixed(0), 6, 14);
    }
  }
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

/** Follow the server's numbers for ever. key: function that gives the API key. */
export async function startLive(key) {
  const history = new Line($("history"));
  const hits = new Line($("hits"), 1);
  const map = new ExpertMap($("experts"), $("expert"));
  let before = null;
  for await (const now of live(key)) {
    if (now.error) {
      $("model").textContent = `No live numbers: ${now.error}`;
      before = null;
      continue;
    }
    const s = now.stats;
    $("model").textContent = `${now.model} · ${now.max_model_len} tokens of context · ${now.state}`;
    if (before && now.time > before.time) {
      const rate = (s.generated_tokens - before.stats.generated_tokens) / (now.time - before.time);
      $("rate").textContent = rate.toFixed(rate < 100 ? 1 : 0);
      history.add(Math.max(0, rate));
    }
    $("requests").textContent = `${s.num_running ?? 0} / ${s.num_waiting ?? 0}`;
    const used = (s.pages_total ?? 0) - (s.pages_free ?? 0) - (s.pages_evictable ?? 0);
    $("kv").textContent = percent(used, s.pages_total);
    $("kv-meter").value = s.pages_total ? used / s.pages_total : 0;
    $("prefix").textContent = percent(s.cached_tokens, s.prompt_tokens);
    showExperts(now, before, map, hits);
    before = now;
  }
}

/** [experts that were in GPU memory, experts that were needed] since the start. */
function lookups(stats) {
  const hits = stats.expert_hits ?? 0;
  return [hits, hits + (stats.expert_misses ?? 0)];
}

/** Share of needed experts that were in GPU memory since the numbers before; while nothing runs, the line stays where it was. */
function hitRate(now, before, line) {
  const [hits, needed] = lookups(now.stats);
  const [hitsBefore, neededBefore] = before ? lookups(before.stats) : [0, 0];
  return needed > neededBefore ? (hits - hitsBefore) / (needed - neededBefore) : (line.values.at(-1) ?? 0);
}

function showExperts(now, before, map, hits) {
  const { experts, stats } = now;
  $("experts-figure").hidden = !experts;
  $("hits-figure").hidden = !experts;
  if (!experts) return;
  map.update(experts);
  $("experts-note").textContent = `${experts.layers} layers × ${experts.experts}, ${map.numResident} resident`;
  const cached = lookups(stats)[1] > 0;
  const rate = cached ? hitRate(now, before, hits) : map.residentShare;
  $("hit-rate").textContent = percent(rate, 1);
  hits.add(rate);
}
