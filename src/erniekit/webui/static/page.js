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

// Logs follow their end. A log that a person has scrolled up stays where it is until it is scrolled to its end again.
(() => {
  const atEnd = log => log.scrollHeight - log.clientHeight - log.scrollTop < 24;
  // The <pre> is replaced with every new line; what is remembered belongs to the component around it.
  const places = new WeakMap();
  const placeOf = log => {
    const around = log.closest('[id]');
    if (!places.has(around)) places.set(around, { follows: true, top: 0 });
    return places.get(around);
  };
  document.addEventListener('scroll', event => {
    const log = event.target;
    if (!log.classList?.contains('ek-log')) return;
    const place = placeOf(log);
    if (atEnd(log)) place.follows = true;
    else if (log.scrollTop < place.top - 2) place.follows = false;
    place.top = log.scrollTop;
  }, true);
  const settle = () => document.querySelectorAll('.ek-log').forEach(log => {
    if (!log.clientHeight) return;
    const place = placeOf(log);
    const top = place.follows ? log.scrollHeight - log.clientHeight : place.top;
    if (Math.abs(log.scrollTop - top) > 1) log.scrollTop = top;
  });
  new MutationObserver(settle).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ['class', 'style'] });
})();
