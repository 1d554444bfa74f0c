/* Figures by Plotly in the page's colours. Take it from common.js.

What always holds: Plotly is loaded when the first figure is wanted; a figure is drawn in the colours of the present
theme, and anew when that changes; an update keeps the zoom (layout.uirevision). */

import { thinned } from "./thin.js";

let loading = null;

/** Plotly, once; an exported file has it inside. */
export function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("static/plotly.min.js", document.baseURI);
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("plotly.min.js can't be loaded: pip install plotly"));
    document.head.append(script);
  });
  return loading;
}

/** A colour of style.css: colour("text"), colour("series-1"). */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Colours and dashes that tell lines apart, also without colours. */
export const SERIES_COLOURS = 7;
export const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
export const series = (at) => colour(`series-${(at % SERIES_COLOURS) + 1}`);

/** "--series-1" and the like in traces become colours of the theme. */
function coloured(value) {
  if (typeof value === "string") return value.startsWith("--") ? colour(value.slice(2)) : value;
  if (Array.isArray(value)) return typeof value[0] === "object" || value[0]?.startsWith?.("--") ? value.map(coloured) : value;
  if (value && typeof value === "object" && !ArrayBuffer.isView(value)) {
    return Object.fromEntries(Object.entries(value).map(([name, of]) => [name, coloured(of)]));
  }
  return value;
}

function axis(own) {
  const line = colour("line");
  return {
    gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, ticks: "outside", ticklen: 3,
    spikecolor: colour("dim"), spikethickness: 1, spikedash: "solid",
    ...coloured(own ?? {}),
    title: { standoff: 6, font: { size: 11, color: colour("dim") }, ...(typeof own?.title === "string" ? { text: own.title } : own?.title) },
  };
}

function dressed(layout) {
  const { xaxis, yaxis, ...rest } = layout;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("font-plain") || "system-ui, sans-serif", size: 11, color: colour("text") },
    margin: { l: 48, r: 10, t: 8, b: 36 }, hovermode: "x unified", uirevision: "keep", dragmode: "zoom", autosize: true,
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("text"), size: 11 } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
    ...coloured(rest),
    xaxis: axis(xaxis),
    yaxis: axis(yaxis),
  };
}

const drawn = new Map();
const CONFIG = { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset", scrollZoom: false, showTips: false };

/** Draws, or updates, a figure in element. Colours in traces and layout may be names of style.css: "--series-1". */
export async function plot(element, traces, layout = {}, config = {}) {
  const Plotly = await plotly();
  if (!element.isConnected) return;
  drawn.set(element, { traces, layout, config });
  await Plotly.react(element, coloured(thinned(traces, layout.xaxis?.range)), dressed(layout), { ...CONFIG, ...config });
}

/** The figure's element is left: what Plotly holds for it goes. */
export function unplot(element) {
  drawn.delete(element);
  window.Plotly?.purge(element);
}

function again() {
  for (const [element, { traces, layout, config }] of [...drawn]) {
    if (element.isConnected) plot(element, traces, layout, config);
    else unplot(element);
  }
}
window.addEventListener("theme", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
