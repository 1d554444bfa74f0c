/* What a run does now, and how it has gone. */

import { Board } from "./board.js";
import { el, get, isLive, plotly, register } from "./common.js";
import { drawNow } from "./now.js";
import { runData } from "./store.js";

let page = null;

/** What is open in the page stays as it was. */
function draw() {
  const { data, now, board } = page;
  const { run, reading, rows, ...others } = data.latest;
  const told = JSON.stringify([{ ...run, seconds: isLive(run.state) ? 0 : run.seconds }, reading.problem, others, board?.eta]);
  if (told === page.told) return; // nothing is new: whoever marks or reads something isn't disturbed
  page.told = told;
  drawNow(now, data, board?.eta ?? null);
}

/** η stands above the figures; it comes with the lags, whose figure may be far below. */
function askEta() {
  const { board } = page;
  if (board?.eta === undefined && board?.data[0].kept.length) board.lags(board.data[0]);
}

register("overview", "Overview", {
  async show(container, run, params) {
    plotly().catch(() => {}); // so that it is there when the first figure wants it, and its error is told then
    const asked = get("/api/figures");
    const data = runData(run); // it is known by now: the header has it, too
    const now = el("div", { class: "now" });
    const figures = el("div");
    page = { data, now, board: null, told: "", drawn: "", events: 0 };
    now.addEventListener("again", () => {
      page.told = "";
      draw();
    });
    container.append(now, figures);
    draw();
    const mine = page;
    const list = await asked;
    if (page !== mine) return;
    page.board = new Board(figures, list, [data], params);
    page.board.onEta = draw;
    askEta();
  },

  refresh() {
    if (!page) return;
    draw();
    const { data, board } = page;
    if (!board) return;
    const told = `${data.next} ${data.latest.branch} ${data.latest.evaluations.length}`;
    if (told !== page.drawn) board.update();
    else if (data.latest.reading.events !== page.events) board.updateLags();
    page.drawn = told;
    page.events = data.latest.reading.events;
    askEta();
  },

  hide() {
    page?.board?.close();
    page = null;
  },
});
