// Blocks of code in the language `mermaid` become diagrams.
for (const code of document.querySelectorAll('code.language-mermaid')) {
  const diagram = document.createElement('pre');
  diagram.className = 'mermaid';
  diagram.textContent = code.textContent;
  code.parentElement.replaceWith(diagram);
}
const isDark = ['coal', 'navy', 'ayu'].some((theme) => document.documentElement.classList.contains(theme));
mermaid.initialize({ startOnLoad: true, theme: isDark ? 'dark' : 'default' });
