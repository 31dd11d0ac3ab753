// DATA, which stands before this, is megazero/plan/page.py's document(): shapes, clusters, and planes by case.
const HAND = "sizes by hand", $ = (id) => document.getElementById(id), first = (map) => Object.keys(map)[0];
const COLOURS = [4, 2, 0, 1, 7, 3, 6]; // of schemes

// -- the model: pure functions of DATA and a question {shape, sizes, cluster, nodes, batch, rate, delay} ------------

const perLayer = (s, experts) => 2 * s.hidden * s.channels * (s.heads + s.groups) + 3 * s.hidden * s.ffn * experts;
const parameters = (s) => s.layers * perLayer(s, s.experts) + 2 * s.hidden * s.vocabulary;
const work = (s) =>
  s.length * (s.layers * (perLayer(s, s.active) + s.heads * s.channels * s.length) + s.hidden * s.vocabulary);
const sizesOf = (q) => (q.shape === HAND ? q.sizes : DATA.shapes[q.shape]);
const same = (cell, q) => cell.cluster === q.cluster && cell.nodes === q.nodes && cell.batch === q.batch;

// The cell that answers, and what to multiply its computing, bytes and delays by.
function basis(q) {
  const own = sizesOf(q), cells = DATA.cells.filter((cell) => same(cell, q) && cell.shape !== q.without);
  const away = (cell) => {
    const of = DATA.shapes[cell.shape], mixtures = (own.experts > 1) !== (of.experts > 1);
    return Math.abs(Math.log(parameters(own) / parameters(of))) + 10 * mixtures;
  };
  const exact = cells.find((cell) => cell.shape === q.shape);
  const cell = exact || cells.sort((a, b) => away(a) - away(b))[0];
  if (!cell || exact) return cell && { cell, scale: { work: 1, size: 1, layers: 1 } };
  const of = DATA.shapes[cell.shape];
  const scale = { work: work(own) / work(of), size: parameters(own) / parameters(of), layers: own.layers / of.layers };
  return { cell, scale };
}

const height = (planes, scale, rate, delay) => Math.max(...planes.map(([seconds, gigabits, delays]) =>
  scale.work * seconds + (scale.size * gigabits) / rate + (scale.layers * delays * delay) / 1e3));

// The fastest layout of each scheme that has one: [{name, seconds, needed, worth, gb, gib, words, tokensADay}].
function answer(q) {
  const found = basis(q), rows = [];
  if (!found) return rows;
  for (const name of DATA.schemes) {
    const scheme = found.cell.schemes[name];
    if (!scheme) continue;
    const timed = scheme.layouts.map((layout) => ({ ...layout, seconds: height(layout.planes, found.scale, q.rate, q.delay) }));
    const best = timed.reduce((a, b) => (b.seconds < a.seconds ? b : a)), needed = scheme.tokens;
    const { seconds, words } = best, tokens = q.batch * sizesOf(q).length;
    rows.push({ name, seconds, needed, words, gb: best.gb * found.scale.size, gib: best.gib * found.scale.size,
      tokensADay: (tokens / seconds) * 86400 });
  }
  const exact = Math.min(...rows.filter((row) => row.needed === 1).map((row) => row.seconds));
  for (const row of rows) row.worth = row.needed === null ? null : exact / row.seconds / row.needed;
  return rows;
}

const between = (low, high, count) => Array.from({ length: count }, (_, i) => low * (high / low) ** (i / (count - 1)));
const worthOf = (q, rate) => answer({ ...q, rate }).find((row) => row.name === "zeropp")?.worth ?? 0;

// The ranges of rates in which zeropp is faster to the same loss than every exact scheme: [[from, to]].
function ahead(q) {
  const rates = between(...DATA.limits.slice(0, 2), 120), pays = rates.map((rate) => worthOf(q, rate) > 1), ranges = [];
  const edge = (a, b, left) => {
    for (let n = 0; n < 12; n++) {
      const middle = Math.sqrt(a * b);
      if (worthOf(q, middle) > 1 === left) a = middle; else b = middle;
    }
    return b;
  };
  pays.forEach((own, i) => {
    if (own && !pays[i - 1]) ranges.push([i ? edge(rates[i - 1], rates[i], false) : rates[0], rates[rates.length - 1]]);
    if (!own && pays[i - 1]) ranges[ranges.length - 1][1] = edge(rates[i - 1], rates[i], true);
  });
  return ranges;
}

function verdict(q) {
  const rows = answer(q), exact = rows.filter((row) => row.needed === 1).sort((a, b) => a.seconds - b.seconds)[0];
  const own = rows.find((row) => row.name === "zeropp"), known = rows.find((row) => row.name === "FSDP2");
  if (!exact) return "Nothing was planned for this question, or no exact scheme fits: take more nodes.";
  if (!own) return `zeropp does not fit: use ${exact.name}.`;
  if (own.worth === null) return `Nobody published what zeropp's messages cost here. The fastest exact scheme: ${exact.name}.`;
  const [low, high] = DATA.limits, words = ahead(q).map(([from, to]) =>
    from === low ? `up to ${digits(to)}` : to === high ? `from ${digits(from)}` : `from ${digits(from)} to ${digits(to)}`);
  return [
    `At ${digits(q.rate)} Gb/s a ${DATA.clusters[q.cluster].part} zeropp comes to the same loss ${own.worth.toFixed(2)} times as`,
    `fast as ${exact.name}: it ${own.worth > DATA.worth ? "pays" : "does not pay"}.`,
    known ? `FSDP2's step takes ${(known.seconds / own.seconds).toFixed(2)} times as long as zeropp's.` : "",
    words.length ? `zeropp is ahead of every exact scheme ${words.join(" and ")} Gb/s.` : "It is ahead at no rate.",
  ].filter(Boolean).join(" ");
}

// How far the page's own shapes are from what it would make of them by hand: [median, worst], relative.
function handErrors(q) {
  const off = Object.keys(DATA.shapes).flatMap((shape) => {
    const known = answer({ ...q, shape }), guessed = answer({ ...q, shape: HAND, sizes: DATA.shapes[shape], without: shape });
    return guessed.flatMap((row) => {
      const own = known.find((each) => each.name === row.name);
      return own ? [Math.abs(row.seconds / own.seconds - 1)] : [];
    });
  }).sort((a, b) => a - b);
  return off.length ? [off[off.length >> 1], off[off.length - 1]] : null;
}

// -- the document -------------------------------------------------------------------------------------------------

const safe = (words) => `${words}`.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const digits = (value, count = 3) => (value >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(count)}`);
const percent = (share) => `${digits(100 * share, 2)}%`;

function drawChart(q) {
  const rates = between(...DATA.limits.slice(0, 2), 160), lines = new Map();
  for (const rate of rates)
    for (const row of answer({ ...q, rate })) lines.set(row.name, [...(lines.get(row.name) || []), row.seconds]);
  const all = [...lines.values()].flat(), low = Math.min(...all) / 1.1, high = Math.max(...all) * 1.1;
  const place = (value, from, to) => Math.round((Math.log(value / from) / Math.log(to / from)) * 10000);
  const across = (rate) => place(rate, ...DATA.limits), up = (seconds) => 10000 - place(seconds, low, high);
  const colour = (name) => `--c:var(--c${COLOURS[DATA.schemes.indexOf(name)]})`;
  const ticks = (from, to) => Array.from({ length: 40 }, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 5))
    .filter((tick) => tick >= from && tick <= to);
  const ys = ticks(low, high), few = ys.length > 8 ? ys.filter((tick) => /^0?\.?0*1/.test(`${tick}`)) : ys, xs = ticks(...DATA.limits);
  const grid = few.map((y) => `M0,${up(y)}h10000`).join("") + xs.map((x) => `M${across(x)},0v10000`).join("");
  const paths = [...lines].map(([name, seconds]) =>
    `<path class="line" style="${colour(name)}" d="M${seconds.map((y, i) => `${across(rates[i])},${up(y)}`).join(" ")}"/>`);
  const marks = [["start", q.rate, "your link"], ...ahead(q).flat().filter((rate) => !DATA.limits.includes(rate))
    .map((rate) => ["alarm", rate, "crossing"])];
  $("chart").innerHTML = `<figure class="chart"><figcaption>Seconds of a step<small>dashed: your link; red: where
    zeropp and the fastest exact scheme come to the same loss at once</small></figcaption><div class="plot">
    <svg viewBox="0 0 10000 10000" preserveAspectRatio="none"><path class="grid" d="${grid}"/>${paths.join("")}</svg>
    ${few.map((y) => `<span class="y" style="bottom:${(10000 - up(y)) / 100}%">${digits(y)}</span>`).join("")}
    ${xs.map((x) => `<span class="x" style="left:${across(x) / 100}%">${digits(x)}</span>`).join("")}
    ${marks.map(([kind, x, words]) => `<i class="mark ${kind}" style="left:${across(x) / 100}%"
      title="${words}: ${digits(x)} Gb/s"></i>`).join("")}</div><small class="x">Gb/s</small>
    <div class="key">${[...lines.keys()].map((name) => `<span class="entry" style="${colour(name)}">${safe(name)}</span>`).join("")}
    </div></figure>`;
}

function drawTable(q) {
  const rows = answer(q), head = ["scheme", "step s", "tokens a day", "GB a node", "GiB a GPU", "tokens", "worth", "layout"];
  const numbers = (row) => [digits(row.seconds, 4), digits(row.tokensADay), digits(row.gb), digits(row.gib),
    row.needed === null ? "?" : row.needed.toFixed(2), row.worth === null ? "?" : row.worth.toFixed(2)];
  const lines = rows.map((row) => `<tr><td>${safe(row.name)}</td>${numbers(row).map((n) => `<td class="n">${n}</td>`).join("")}
    <td>${safe(row.words)}</td></tr>`);
  const missing = DATA.schemes.filter((name) => !rows.some((row) => row.name === name));
  $("table").innerHTML = `<div class="wide"><table><thead><tr>${head.map((h) => `<th>${h}</th>`).join("")}</tr></thead>
    <tbody>${lines.join("")}</tbody></table></div>`;
  const cluster = DATA.clusters[q.cluster], notes = [`Collectives reach ${percent(cluster.reached)} of the line's rate`, cluster.source];
  if (missing.length) notes.unshift(`Does not fit, or is not legal: ${missing.join(", ")}`);
  if (q.shape === HAND) {
    const found = basis(q), errors = handErrors(q);
    if (found) notes.unshift(`Scaled from ${found.cell.shape}; memory, too: what needs more than ${digits(cluster.room)} GiB does not fit`);
    if (errors) notes.unshift(`Made so, the page's shapes miss their seconds by ${percent(errors[0])} at the median, ${percent(errors[1])} at worst`);
  }
  $("notes").textContent = `${notes.join(". ")}.`;
}

const question = () => ({
  shape: $("shape").value, cluster: $("cluster").value, nodes: +$("nodes").value, batch: +$("batch").value,
  rate: Math.min(Math.max(+$("rate").value || 0, DATA.limits[0]), DATA.limits[1]),
  delay: Math.min(Math.max(+$("delay").value || 0, 0), DATA.limits[2]),
  sizes: Object.fromEntries([...$("sizes").querySelectorAll("input")].map((input) => [input.name, Math.max(1, +input.value)])),
});

function offer(id, values, words = (value) => value) {
  const before = $(id).value;
  $(id).innerHTML = values.map((value) => `<option value="${safe(value)}">${safe(words(value))}</option>`).join("");
  if (values.map(String).includes(before)) $(id).value = before;
}

// Offers what was planned for the model and cluster that are chosen, and draws the answer.
function draw() {
  const distinct = (cells, of) => [...new Set(cells.map(of))].sort((a, b) => a - b);
  const shape = $("shape").value, planned = DATA.cells.filter((cell) => shape === HAND || cell.shape === shape);
  offer("cluster", [...new Set(planned.map((cell) => cell.cluster))]);
  const there = planned.filter((cell) => cell.cluster === $("cluster").value);
  offer("nodes", distinct(there, (cell) => cell.nodes));
  const length = sizesOf(question()).length, nodes = +$("nodes").value;
  offer("batch", distinct(there.filter((cell) => cell.nodes === nodes), (cell) => cell.batch), (batch) =>
    `${Math.round((batch * length) / nodes).toLocaleString("en")} (${batch} samples a step)`);
  $("sizes").style.display = shape === HAND ? "" : "none";
  const q = question();
  $("verdict").textContent = verdict(q);
  drawChart(q);
  drawTable(q);
}

// Takes a question as the page's own: {shape, cluster, nodes, batch, rate, delay}, of which some may be missing.
function take(q) {
  for (const id of ["shape", "cluster", "nodes", "batch", "rate", "delay"])
    if (q[id] !== undefined && q[id] !== null) {
      $(id).value = q[id];
      if (id !== "rate" && id !== "delay") draw();
    }
  draw();
}

function start() {
  const shapes = Object.keys(DATA.shapes), asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  offer("shape", [...shapes, HAND]);
  offer("named", ["", ...DATA.named.map((each) => each.name)]);
  $("sizes").innerHTML = Object.entries(DATA.shapes[shapes[0]]).map(([name, value]) =>
    `<label>${name}<input name="${name}" type="number" min="1" value="${value}"></label>`).join("");
  take({ rate: DATA.clusters[first(DATA.clusters)].rate, delay: 0, ...DATA.named[0], ...asked });
  $("named").value = DATA.named.length && !location.hash ? DATA.named[0].name : "";
  document.addEventListener("input", (event) => {
    const named = DATA.named.find((each) => event.target.id === "named" && each.name === event.target.value);
    if (named) take(named);
    else if (event.target.id !== "named") draw();
  });
}
start();
