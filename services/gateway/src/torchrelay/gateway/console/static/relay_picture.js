// A relay as a picture: hosts in columns by their distance from the first source, and what flows between them.
import { html } from "/console/vendor/preact-htm.js";
import { bytes, percent, seconds } from "/console/format.js";

const [WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN] = [150, 50, 56, 14, 12];
const MAX_LETTERS = 17;
const PLATFORM = "the platform"; // a tenant is not told the hosts
const short = (name) => (name.length > MAX_LETTERS ? `${name.slice(0, MAX_LETTERS - 1)}…` : name);
const sourcesOf = ({ sources }) => (sources.length ? sources : [PLATFORM]);
const keyOf = ({ target }, index) => target || `host ${index}`;

// Hosts by name: a target has its relay, and may send on what it has; a source that has all stands before its targets.
function hostsOf(relays) {
  const targets = new Map(relays.map((relay, index) => [keyOf(relay, index), relay]));
  // By the first source alone, the one that is read: hosts name each other for repairs, in any number of circles.
  const depthOf = (name, below = []) =>
    targets.has(name) && !below.includes(name) ? 1 + depthOf(sourcesOf(targets.get(name))[0], [...below, name]) : 0;
  const sends =
    (name) =>
    ([, relay]) =>
      sourcesOf(relay).includes(name);
  const columnOf = (name) =>
    targets.has(name)
      ? depthOf(name)
      : Math.min(...[...targets].filter(sends(name)).map(([target]) => depthOf(target))) - 1;
  const numIn = []; // hosts of each column
  return new Map(
    [...new Set([...relays.flatMap(sourcesOf), ...targets.keys()])].map((name) => {
      const column = columnOf(name);
      const row = numIn[column] ?? 0;
      numIn[column] = row + 1;
      const [x, y] = [MARGIN + column * (WIDTH + GAP_X), MARGIN + row * (HEIGHT + GAP_Y)];
      return [name, { name, relay: targets.get(name), x, y }];
    }),
  );
}

const Host = ({ host: { name, relay, x, y } }) =>
  html`<g class="host" transform=${`translate(${x} ${y})`}>
  <rect class="box" width=${WIDTH} height=${HEIGHT} rx="6" />
  <text x="10" y="20">${short(relay && !relay.target ? "a host" : name)}</text>
  <text class="share" x="10" y="37">${relay ? percent(relay.verified) : "has all"}</text>
  <rect class="track" y=${HEIGHT - 6} width=${WIDTH} height="6" rx="3" />
  <rect class="bar" y=${HEIGHT - 6} width=${WIDTH * (relay ? relay.verified : 1)} height="6" rx="3" /></g>`;

const Edge = ({ from, to }) => {
  const [x0, y0, x1, y1] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x - 2, to.y + HEIGHT / 2];
  const middle = (x0 + x1) / 2;
  const curve = `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
  return html`<path class=${`arrow ${to.relay.state}`} d=${curve} />
    <path class="head" d=${`M${x1 - 7} ${y1 - 5}L${x1} ${y1}L${x1 - 7} ${y1 + 5}z`} />`;
};

// `relays`: those under way of one pack.
export function RelayPicture({ relays, models }) {
  const hosts = hostsOf(relays);
  const edgesTo = (relay, index) => sourcesOf(relay).map((source) => [source, keyOf(relay, index)]);
  const edges = relays.flatMap(edgesTo).map((names) => names.map((name) => hosts.get(name)));
  const [width, height] = ["x", "y"].map((axis) => Math.max(...[...hosts.values()].map((host) => host[axis])) + MARGIN);
  const leftS = Math.max(...relays.map(({ left_s }) => left_s));
  const size = `${bytes(relays[0].pack_bytes)}${leftS > 0 ? `, ${seconds(leftS)} left` : ""}`;
  const told = edges.map(([from, to]) => `${from.name} to ${to.name}, ${percent(to.relay.verified)}`).join("; ");
  return html`<figure>
    <figcaption><strong>${models}</strong> <span class="dim">${size}</span></figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label="Picture of a relay">
      <svg class="relay" role="img" aria-label=${told} width=${width + WIDTH} height=${height + HEIGHT}>
        ${edges.map(([from, to]) => html`<${Edge} from=${from} to=${to} />`)}
        ${[...hosts.values()].map((host) => html`<${Host} key=${host.name} host=${host} />`)}</svg></div></figure>`;
}
