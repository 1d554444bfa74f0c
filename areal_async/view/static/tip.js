/* A few words beside the pointer.

What always holds: it lies inside of the window, beside what it is about and not on it; it takes no click. */

import { el, visible } from "./common.js";

const AWAY_PX = 16; // from the pointer
const EDGE_PX = 4;

export class Tip {
  constructor() {
    this.element = el("div", { class: "tl-tip", hidden: true });
    this.timer = 0;
  }

  /** x, y: of the pointer in the window. ms: how long; 0: until something else is told. */
  tell(text, x, y, ms = 0) {
    clearTimeout(this.timer);
    const { element } = this;
    element.replaceChildren(visible(text));
    element.hidden = false;
    const { clientWidth: wide, clientHeight: high } = document.documentElement;
    const left = Math.max(EDGE_PX, Math.min(x + AWAY_PX, wide - element.offsetWidth - EDGE_PX));
    const below = y + AWAY_PX;
    const top = below + element.offsetHeight + EDGE_PX > high ? Math.max(EDGE_PX, y - AWAY_PX - element.offsetHeight) : below;
    element.style.transform = `translate(${left}px, ${top}px)`;
    if (ms > 0) this.timer = setTimeout(() => this.hide(), ms);
  }

  hide() {
    clearTimeout(this.timer);
    this.element.hidden = true;
  }
}
