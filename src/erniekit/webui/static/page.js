// Charts are replaced while a run goes on, so one listener on the document serves those there are now: it shows the
// nearest logged step of each series under the pointer.
(() => {
  'use strict';
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (steps[mid] <= step) low = mid; else high = mid;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };
  const row = (parts, strong) => {
    const line = document.createElement('div'), value = document.createElement('b');
    value.textContent = strong;
    line.append(...parts, value);
    return line;
  };
  const leave = except => {
    for (const figure of document.querySelectorAll('.ek-charts .chart')) {
      if (figure === except) continue;
      figure.querySelector('.tip').hidden = true;
      figure.querySelector('.cross').setAttribute('hidden', '');
    }
  };
  document.addEventListener('pointermove', event => {
    const svg = event.target.closest?.('.ek-charts .chart svg');
    const figure = svg?.closest('.chart');
    leave(figure);
    if (!figure) return;
    const data = JSON.parse(figure.querySelector('script').textContent);
    const cross = svg.querySelector('.cross'), tip = figure.querySelector('.tip');
    const inner = data.width - data.left - data.right;
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    const share = ((event.clientX - box.left) * scale - data.left) / inner;
    const wanted = data.low + Math.min(1, Math.max(0, share)) * (data.high - data.low);
    const main = data.series[0], step = main.steps[nearest(main.steps, wanted)];
    const at = data.left + (step - data.low) / (data.high - data.low) * inner;
    cross.setAttribute('x1', at);
    cross.setAttribute('x2', at);
    cross.removeAttribute('hidden');
    tip.replaceChildren(row(['step '], step));
    for (const one of data.series) {
      const index = nearest(one.steps, wanted), key = document.createElement('i');
      key.className = 'key ' + one.look;
      const where = one.steps[index] === step ? '' : ' (step ' + one.steps[index] + ')';
      tip.append(row([key, one.name + where + '  '], one.values[index]));
    }
    tip.hidden = false;
    const frame = figure.getBoundingClientRect(), x = at / scale + box.left - frame.left;
    const room = figure.clientWidth - tip.offsetWidth - 8;
    const side = x > figure.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12;
    tip.style.left = Math.max(8, Math.min(room, side)) + 'px';
    tip.style.top = box.top - frame.top + 8 + 'px';
  });
  // Asked for by the download buttons: the text is in the page, so that no file is written on the server.
  window.erniekitSave = (text, name) => {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([text ?? ''], { type: 'text/yaml' }));
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
})();
