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
