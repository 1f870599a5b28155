import { html, useEffect, useRef } from "/console/vendor/preact-htm.js";
import uPlot from "/console/vendor/uplot.js";

const DAY_S = 86_400;
const DAYS = [1, 2, 7, 14, 28, 91, 182, 364].map((days) => days * DAY_S);
const figure = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
const day = (at) => new Date(at * 1000).toLocaleDateString("en", { month: "short", day: "numeric", timeZone: "UTC" });
const clock = (at) => new Date(at * 1000).toISOString().slice(11, 16);

// A plot of `data`, [places, values], over `range` of places: a line over time, over other figures, or bars. Bars have
// `labels` for their places, or are days. Times are UTC.
export function Plot({ title, data, range, labels, isBars = false, isOfFigures = false, height = 160 }) {
  const place = useRef(null);
  const plot = useRef(null);
  const shown = useRef(null);
  shown.current = { range, labels };
  useEffect(() => {
    const style = getComputedStyle(document.body);
    const line = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.color, grid: line, ticks: line };
    const accent = style.getPropertyValue("--accent");
    const timesOf = (_, splits) => splits.map((at) => (at % DAY_S ? clock(at) : day(at)));
    const times = { ...axis, size: 30, values: timesOf, ...(isBars && { incrs: DAYS }) };
    const named = {
      ...axis,
      splits: () => shown.current.labels.map((_, index) => index),
      values: () => shown.current.labels,
      rotate: -60,
      size: 110,
      grid: { show: false },
    };
    const figures = { ...axis, size: 64, values: (_, splits) => splits.map(figure) };
    const others = { ...axis, size: 30, values: figures.values };
    const size = () => ({ width: place.current.clientWidth, height });
    const scales = {
      x: { time: !labels && !isOfFigures, range: () => shown.current.range },
      y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] },
    };
    const bars = { fill: accent, paths: uPlot.paths.bars({ size: [0.7, 48] }), points: { show: false } };
    const series = [{}, { stroke: accent, width: 2, ...(isBars && bars) }];
    const tzDate = (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC");
    const axes = [labels ? named : isOfFigures ? others : times, figures];
    const options = { ...size(), scales, series, axes, legend: { show: false }, tzDate };
    plot.current = new uPlot(options, [[], []], place.current);
    const watcher = new ResizeObserver(() => plot.current.setSize(size()));
    watcher.observe(place.current);
    return () => {
      watcher.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data), [data]);
  return html`<section class="plot"><h2>${title}</h2><div ref=${place}></div></section>`;
}
