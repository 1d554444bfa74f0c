/* How a stretch of time is moved and zoomed by a pointer: mouse, pen, fingers, wheel.

What always holds: nothing is drawn here; what a gesture wants is said as `pan(pixels)` and `zoom(factor, at)`, and its end
as `rest()`; a press that doesn't move is a `click(x, y)`. One finger, and a wheel without a key, scroll the page up and
down: nobody gets caught here on his way. */

const CLICK_PX = 4; // a press that moves less is a click
const LINE_PX = 16; // of a wheel that counts lines
const WHEEL = 0.01; // e-fold of zoom a pixel: of a pinch on a touchpad, which browsers tell as a wheel with Ctrl
const WHEEL_MOST = 0.22; // of one event: a notch of a mouse's wheel has 50 to 120 pixels
const REST_MS = 180; // after the last turn of a wheel

/** Listens on element; to: {pan(dx), zoom(factor, x), rest(), click(x, y), hover(x, y), leave(), scrolled(x, y)}, x and y in
 * pixels of it. scrolled: the wheel was turned without a key, and it is the page that follows. Returns what ends it. */
export function listen(element, to) {
  const pointers = new Map();
  let pressed = null; // {x, y, moved} of the first pointer
  let timer = 0;
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [one, other] = [...pointers.values()];
    return { x: (one.x + other.x) / 2, wide: Math.max(20, Math.hypot(one.x - other.x, one.y - other.y)) };
  };

  const on = {
    pointerdown(event) {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, place(event));
      pressed = pointers.size === 1 ? { ...place(event), moved: false } : { ...pressed, moved: true };
    },
    pointermove(event) {
      const here = place(event);
      if (!pointers.has(event.pointerId)) return to.hover(here.x, here.y);
      const before = pointers.get(event.pointerId);
      if (pointers.size === 2) {
        const was = spread();
        pointers.set(event.pointerId, here);
        const now = spread();
        to.zoom(now.wide / was.wide, now.x);
        to.pan(now.x - was.x);
        return undefined;
      }
      if (pressed && !pressed.moved && Math.hypot(here.x - pressed.x, here.y - pressed.y) < CLICK_PX) return undefined;
      if (pressed && !pressed.moved) element.classList.add("moving");
      pressed = { ...pressed, moved: true };
      pointers.set(event.pointerId, here);
      to.pan(here.x - before.x);
      return undefined;
    },
    pointerup(event) {
      if (!pointers.delete(event.pointerId)) return;
      if (pointers.size > 0) return;
      element.classList.remove("moving");
      const here = place(event);
      if (pressed && !pressed.moved) to.click(here.x, here.y);
      else to.rest();
      pressed = null;
    },
    pointercancel(event) {
      pointers.delete(event.pointerId);
      element.classList.remove("moving");
      pressed = null;
      to.rest();
    },
    pointerleave() {
      if (pointers.size === 0) to.leave();
    },
    wheel(event) {
      const unit = event.deltaMode === 1 ? LINE_PX : event.deltaMode === 2 ? element.clientWidth : 1;
      const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
      const sideways = event.shiftKey && dx === 0 ? dy : Math.abs(dx) > Math.abs(dy) ? dx : 0;
      const here = place(event);
      if (event.ctrlKey || event.metaKey) to.zoom(Math.exp(Math.max(-WHEEL_MOST, Math.min(WHEEL_MOST, -dy * WHEEL))), here.x);
      else if (sideways !== 0) to.pan(-sideways);
      else return to.scrolled(here.x, here.y);
      event.preventDefault();
      clearTimeout(timer);
      timer = setTimeout(() => to.rest(), REST_MS);
      return undefined;
    },
  };
  for (const [name, does] of Object.entries(on)) element.addEventListener(name, does, name === "wheel" ? { passive: false } : undefined);
  return () => {
    clearTimeout(timer);
    for (const [name, does] of Object.entries(on)) element.removeEventListener(name, does);
  };
}
