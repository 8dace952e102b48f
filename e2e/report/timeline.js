"use strict";
// The timeline of a step: slices of tracks on a canvas, at any scale. Slices narrower than a pixel are drawn as one
// column for all that fall into it, found by bisection, so that drawing costs pixels and not slices.
const timelineOf = (data) => {
  const tracks = data.tracks.map((track) => {
    const count = track.starts.length;
    const starts = new Float64Array(count);
    const ends = new Float64Array(count);
    let at = 0;
    for (let i = 0; i < count; i++) {
      at += track.starts[i];
      starts[i] = at;
      ends[i] = at + track.lengths[i];
    }
    return { ...track, begin: starts, end: ends, count };
  });
  return { ...data, tracks };
};
// The first slice of a track that ends after `time`.
const firstAfter = (track, time) => {
  let low = 0;
  let high = track.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
};
// The longest of a few slices, which gives a column its colour.
const longest = (track, first, next) => {
  let best = first;
  for (let i = first + 1; i < Math.min(next, first + 32); i++) {
    if (track.end[i] - track.begin[i] > track.end[best] - track.begin[best]) best = i;
  }
  return best;
};
// Rectangles of a track between two times, `scale` pixels per nanosecond: [left, width, slice, how many it stands for].
const columns = (track, from, to, scale) => {
  const found = [];
  let i = firstAfter(track, from);
  let last = -1;
  while (i < track.count && track.begin[i] < to) {
    const left = (track.begin[i] - from) * scale;
    const width = (track.end[i] - track.begin[i]) * scale;
    if (width >= 1) {
      found.push([left, width, i, 1]);
      i += 1;
      continue;
    }
    last = Math.max(Math.floor(left), last + 1);
    const next = Math.max(firstAfter(track, from + (last + 1) / scale), i + 1);
    found.push([last, 1, longest(track, i, next), next - i]);
    i = next;
  }
  return found;
};
// Round steps for a ruler: at most one tick for every 90 pixels.
const rulerStep = (span, width) => {
  const raw = (span * 90) / width;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
};
const timeText = (nanoseconds) => {
  const size = Math.abs(nanoseconds);
  if (size >= 1e9) return `${+(nanoseconds / 1e9).toPrecision(7)} s`;
  if (size >= 1e6) return `${+(nanoseconds / 1e6).toPrecision(7)} ms`;
  return `${+(nanoseconds / 1e3).toPrecision(6)} µs`;
};
const RULER = 22;
const HEAD = 18;
const ROW = 22;
const THIN = 12;
const showTimeline = (root, raw) => {
  const data = timelineOf(raw);
  const canvas = root.querySelector("canvas");
  const told = root.querySelector(".told");
  const search = root.querySelector("input");
  const pen = canvas.getContext("2d");
  const least = 100;
  let from = 0;
  let to = data.length;
  let chosen = null;
  let onlyPath = false;
  let wanted = "";
  let drag = null;
  const touches = new Map();
  // Where each track lies; a group has a line with its name before it.
  const rows = [];
  let bottom = RULER;
  data.tracks.forEach((track, index) => {
    if (index === 0 || data.tracks[index - 1].group !== track.group) bottom += HEAD;
    const height = track.thin ? THIN : ROW;
    rows.push({ top: bottom, height });
    bottom += height + 4;
  });
  const height = bottom + 2;
  const width = () => canvas.clientWidth || 760;
  const scale = () => width() / (to - from);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888";
  const matches = data.names.map(() => false);
  const draw = () => {
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    const wide = width();
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, height);
    pen.font = "11px system-ui,sans-serif";
    pen.textBaseline = "middle";
    const ink = style("--ink");
    const soft = style("--soft");
    const grid = style("--line");
    const step = rulerStep(to - from, wide);
    pen.fillStyle = soft;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = (time - from) * scale();
      pen.fillStyle = grid;
      pen.fillRect(x, RULER - 6, 1, height);
      pen.fillStyle = soft;
      pen.fillText(timeText(time), x + 3, 9);
    }
    data.tracks.forEach((track, index) => {
      const { top, height: tall } = rows[index];
      if (index === 0 || data.tracks[index - 1].group !== track.group) {
        pen.globalAlpha = 1;
        pen.fillStyle = ink;
        pen.fillText(track.group, 4, top - HEAD / 2);
      }
      for (const [left, long, i, many] of columns(track, from, to, scale())) {
        const dim = (wanted && many === 1 && !matches[track.names[i]]) || (onlyPath && track.critical && many === 1 && !track.critical[i]);
        pen.globalAlpha = dim ? 0.18 : 1;
        pen.fillStyle = data.kinds[track.kinds[i]][1];
        const x = Math.max(left, 0);
        const visible = Math.min(left + long, wide) - x;
        pen.fillRect(x, top, Math.max(visible - (long > 3 ? 0.6 : 0), 0.6), tall);
        if (track.critical && track.critical[i]) {
          pen.fillStyle = ink;
          pen.fillRect(x, top + tall - 2.5, Math.max(visible, 1), 2.5);
        }
        if (visible > 34 && tall >= ROW) {
          pen.fillStyle = "#fff";
          pen.save();
          pen.beginPath();
          pen.rect(x + 2, top, visible - 5, tall);
          pen.clip();
          pen.fillText(data.names[track.names[i]], x + 4, top + tall / 2);
          pen.restore();
        }
      }
      pen.globalAlpha = 1;
      pen.font = "10px system-ui,sans-serif";
      const long = pen.measureText(track.name).width;
      pen.fillStyle = style("--back");
      pen.globalAlpha = 0.75;
      pen.fillRect(wide - long - 8, top, long + 8, Math.min(tall, 13));
      pen.globalAlpha = 1;
      pen.fillStyle = soft;
      pen.fillText(track.name, wide - long - 4, top + Math.min(tall, 13) / 2);
      pen.font = "11px system-ui,sans-serif";
    });
    if (chosen !== null) drawChosen(ink);
  };
  const boxOf = (track, i) => {
    const x = (data.tracks[track].begin[i] - from) * scale();
    return [x, rows[track].top, Math.max((data.tracks[track].end[i] - data.tracks[track].begin[i]) * scale(), 2), rows[track].height];
  };
  const drawChosen = (ink) => {
    const [track, i] = chosen;
    const box = boxOf(track, i);
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(...box);
    const launch = launchOf(track, i);
    if (launch !== null) {
      const other = boxOf(...launch);
      pen.lineWidth = 1;
      pen.strokeRect(...other);
      pen.beginPath();
      pen.moveTo(other[0] + other[2], other[1] + other[3]);
      pen.lineTo(box[0], box[1]);
      pen.stroke();
    }
  };
  // The slice of the host that launched a slice of a stream.
  const launchOf = (track, i) => {
    const source = data.tracks[track];
    if (!source.launchTrack || source.launchTrack[i] < 0) return null;
    return [source.launchTrack[i], source.launchSlice[i]];
  };
  const tell = () => {
    if (chosen === null) {
      told.textContent = "Drag to move, pinch or use the buttons to zoom (keys: + − ← → 0; wheel with Ctrl). Tap a slice for its figures.";
      return;
    }
    const [index, i] = chosen;
    const track = data.tracks[index];
    const parts = [
      `${data.names[track.names[i]]} — ${track.group}, ${track.name}: ${data.kinds[track.kinds[i]][0]}`,
      `starts at ${timeText(track.begin[i])}, takes ${timeText(track.end[i] - track.begin[i])}`,
    ];
    if (track.notes && track.notes[i] >= 0) parts.push(data.names[track.notes[i]]);
    if (track.critical && track.critical[i]) parts.push("on the critical path");
    const launch = launchOf(index, i);
    if (launch !== null) {
      const host = data.tracks[launch[0]];
      parts.push(`launched by ${data.names[host.names[launch[1]]]} ${timeText(track.begin[i] - host.end[launch[1]])} before it starts`);
    }
    told.textContent = parts.join(". ") + ".";
  };
  const show = (low, high) => {
    const span = Math.min(Math.max(high - low, least), data.length);
    from = Math.min(Math.max((low + high - span) / 2, 0), data.length - span);
    to = from + span;
    canvas.dataset.from = String(Math.round(from));
    canvas.dataset.to = String(Math.round(to));
    draw();
  };
  const zoom = (factor, share = 0.5) => {
    const centre = from + (to - from) * share;
    show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  };
  const move = (share) => show(from + (to - from) * share, to + (to - from) * share);
  const sliceAt = (x, y) => {
    const index = rows.findIndex((row) => y >= row.top && y <= row.top + row.height);
    if (index < 0) return null;
    const track = data.tracks[index];
    const near = 4 / scale();
    const time = from + x / scale();
    let best = null;
    for (let i = firstAfter(track, time - near); i < track.count && track.begin[i] <= time + near; i++) {
      const away = Math.max(track.begin[i] - time, time - track.end[i], 0);
      if (best === null || away < best[0]) best = [away, i];
      if (away === 0) break;
    }
    return best === null ? null : [index, best[1]];
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, place(event));
    if (canvas.setPointerCapture) canvas.setPointerCapture(event.pointerId);
    drag = { x: place(event)[0], from, to, moved: false, pinch: null };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!touches.has(event.pointerId) || drag === null) return;
    touches.set(event.pointerId, place(event));
    const all = [...touches.values()];
    if (all.length === 2) {
      const apart = Math.max(Math.abs(all[0][0] - all[1][0]), 8);
      if (drag.pinch !== null) zoom(drag.pinch / apart, (all[0][0] + all[1][0]) / 2 / width());
      drag.pinch = apart;
      drag.moved = true;
      return;
    }
    if (drag.pinch !== null) return;
    const shift = ((drag.x - all[0][0]) / width()) * (drag.to - drag.from);
    if (Math.abs(drag.x - all[0][0]) > 4) drag.moved = true;
    if (drag.moved) show(drag.from + shift, drag.to + shift);
  });
  const up = (event) => {
    const moved = drag === null || drag.moved;
    touches.delete(event.pointerId);
    if (touches.size === 0) drag = null;
    if (moved || event.type === "pointercancel") return;
    chosen = sliceAt(...place(event));
    tell();
    draw();
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("dblclick", (event) => {
    const found = sliceAt(...place(event));
    if (found === null) return;
    const track = data.tracks[found[0]];
    const room = (track.end[found[1]] - track.begin[found[1]]) * 0.2 + least;
    show(track.begin[found[1]] - room, track.end[found[1]] + room);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)[0] / width());
  }, { passive: false });
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25),
    all: () => show(0, data.length),
    path: (button) => { onlyPath = !onlyPath; button.setAttribute("aria-pressed", String(onlyPath)); draw(); },
  };
  for (const button of root.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", () => actions[button.dataset.do](button));
  }
  const keys = { "+": "in", "=": "in", "-": "out", "ArrowLeft": "left", "ArrowRight": "right", "0": "all" };
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key] === undefined) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  search.addEventListener("input", () => {
    wanted = search.value.toLowerCase();
    data.names.forEach((name, index) => { matches[index] = wanted !== "" && name.toLowerCase().includes(wanted); });
    draw();
  });
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  if (window.matchMedia) window.matchMedia("(prefers-color-scheme:dark)").addEventListener("change", draw);
  tell();
  show(0, data.length);
};
{
  const root = document.getElementById("timeline-view");
  const data = document.getElementById("timeline-data");
  if (root !== null && data !== null) showTimeline(root, JSON.parse(data.textContent));
}
