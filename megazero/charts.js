"use strict";
// Shows the values of a chart's lines where the pointer is. A path's numbers are x, y, x, y, ... on 0 .. 10000.
for (const plot of document.querySelectorAll(".plot[data-axes]")) {
  const [across, up] = JSON.parse(plot.dataset.axes), tip = plot.querySelector(".tip");
  const value = ([, low, high, log], place) => (log ? low * (high / low) ** place : low + (high - low) * place);
  const words = (v) => (Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en") : `${+v.toPrecision(4)}`);
  let lines;
  const read = () => [...plot.querySelectorAll("path[data-name]")].map((path) => {
    const all = (path.getAttribute("d").match(/-?\d+/g) || []).map(Number), band = path.classList.contains("band");
    const x = all.filter((_, i) => i % 2 === 0), y = all.filter((_, i) => i % 2), count = band ? x.length / 2 : x.length;
    return { name: path.dataset.name, band, x, y, count };
  });
  const nearest = ({ x, count }, at) => {
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - x[low - 1] < x[low] - at ? low - 1 : low;
  };
  plot.addEventListener("pointermove", (event) => {
    lines ??= read();
    const box = plot.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * 10000;
    const said = lines.filter((line) => line.count).map((line) => {
      const i = nearest(line, at), whole = value(up, 1 - line.y[i] / 10000);
      const below = line.band ? value(up, 1 - line.y[line.y.length - 1 - i] / 10000) : 0;
      return `${line.name}: ${words(whole - below)}`;
    });
    const x = value(across, at / 10000);
    tip.textContent = [`${across[0]} ${x >= 100 ? words(Math.round(x)) : words(x)}`, ...said].join("\n");
    tip.style.left = at < 5000 ? `${at / 100 + 2}%` : "auto";
    tip.style.right = at < 5000 ? "auto" : `${102 - at / 100}%`;
    tip.hidden = false;
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; });
}
