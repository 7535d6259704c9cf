// The expert map: a row a layer, a column an expert; colour is use, a full cell is resident, a small one is fetched when needed.

function bytes(base64) {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

function rgb(text) {
  const hex = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export class ExpertMap {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
    this.data = null;
    this.at = null; // [layer, expert] under the pointer or chosen by keys
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    addEventListener("resize", () => this.draw());
  }

  update({ layers, experts, heat, resident }) {
    this.data = { layers, experts, heat: bytes(heat), resident: bytes(resident) };
    this.draw();
    this.tell();
  }

  get numResident() {
    return this.data.resident.reduce((sum, value) => sum + value, 0);
  }

  /** Share of the use that falls on resident experts. */
  get residentShare() {
    const { heat, resident } = this.data;
    let all = 0;
    let here = 0;
    heat.forEach((value, i) => {
      all += value;
      here += value * resident[i];
    });
    return all ? here / all : 1;
  }

  draw() {
    if (!this.data) return;
    const { layers, experts, heat, resident } = this.data;
    const ratio = devicePixelRatio || 1;
    const cell = Math.max(2, Math.floor((this.canvas.clientWidth * ratio) / experts));
    this.cell = cell;
    this.canvas.width = cell * experts;
    this.canvas.height = cell * layers;
    const style = getComputedStyle(document.documentElement);
    const cold = rgb(style.getPropertyValue("--cold"));
    const hot = rgb(style.getPropertyValue("--hot"));
    const context = this.canvas.getContext("2d");
    const gap = cell > 5 ? 1 : 0;
    for (let i = 0; i < heat.length; i++) {
      const share = Math.sqrt(heat[i] / 255); // the square root keeps rarely used experts visible
      const mixed = cold.map((value, c) => Math.round(value + share * (hot[c] - value)));
      const inset = resident[i] ? 0 : Math.floor(cell / 4);
      const [x, y] = [(i % experts) * cell, Math.floor(i / experts) * cell];
      context.fillStyle = `rgb(${mixed})`;
      context.fillRect(x + inset, y + inset, cell - gap - 2 * inset, cell - gap - 2 * inset);
    }
    if (this.at) {
      context.strokeStyle = style.getPropertyValue("--ink");
      context.lineWidth = 2;
      context.strokeRect(this.at[1] * cell, this.at[0] * cell, cell, cell);
    }
  }

  point(event) {
    if (!this.data) return;
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) / box.width) * this.data.experts);
    const layer = Math.floor(((event.clientY - box.top) / box.height) * this.data.layers);
    this.choose(layer, expert);
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.data) return;
    event.preventDefault();
    const [layer, expert] = this.at ?? [0, -step[1]];
    this.choose(layer + step[0], expert + step[1]);
  }

  choose(layer, expert) {
    const { layers, experts } = this.data;
    this.at = [Math.min(layers - 1, Math.max(0, layer)), Math.min(experts - 1, Math.max(0, expert))];
    this.draw();
    this.tell();
  }

  tell() {
    if (!this.at) return;
    const [layer, expert] = this.at;
    const i = layer * this.data.experts + expert;
    const use = ((100 * this.data.heat[i]) / 255).toFixed(0);
    const place = this.data.resident[i] ? "resident" : "fetched when needed";
    this.note.textContent = `Layer ${layer}, expert ${expert}: ${use} % of the hottest, ${place}.`;
  }
}
