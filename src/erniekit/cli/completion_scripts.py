"""The scripts that `erniekit completion SHELL` prints: each asks the program for the candidates of the last word.

A candidate is a line `word<TAB>description`. One that ends in = or / is followed by no space: the word goes on.
"""

from __future__ import annotations

BASH = r"""# erniekit: tab completion for bash. In ~/.bashrc: eval "$(erniekit completion bash)"
_erniekit() {
  local line="${COMP_LINE:0:COMP_POINT}" word head
  local -a typed
  read -ra typed <<<"$line"
  [[ $line == *[[:space:]] ]] && typed+=("")
  word="${typed[${#typed[@]}-1]}"
  # bash begins a new word after = and :, so what stands before them must not be repeated.
  head="${word%"${word##*[=:]}"}"
  COMPREPLY=()
  while IFS=$'\t' read -r word _; do
    COMPREPLY+=("$(printf '%q' "${word#"$head"}")")
  done < <(command "${typed[0]}" completion --words "${typed[@]:1}" 2>/dev/null)
  [[ ${COMPREPLY[0]-} == *[=/] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -F _erniekit erniekit
"""

ZSH = r"""#compdef erniekit
# erniekit: tab completion for zsh. In ~/.zshrc: eval "$(erniekit completion zsh)"
_erniekit() {
  local -a closed open closed_text open_text
  local line word
  for line in "${(@f)$(command ${(Q)words[1]} completion --words "${(@Q)words[2,CURRENT]}" 2>/dev/null)}"; do
    word="${line%%$'\t'*}"
    [[ -z $word ]] && continue
    if [[ $word == *[=/] ]]; then
      open+=("$word"); open_text+=("${line/$'\t'/  }")
    else
      closed+=("$word"); closed_text+=("${line/$'\t'/  }")
    fi
  done
  (( ${#closed} )) && compadd -l -d closed_text -a closed
  (( ${#open} )) && compadd -l -S '' -d open_text -a open
}
if ! whence compdef >/dev/null; then
  autoload -Uz compinit && compinit
fi
compdef _erniekit erniekit
"""

FISH = r"""# erniekit: tab completion for fish. erniekit completion fish > ~/.config/fish/completions/erniekit.fish
function __erniekit_complete
    set -l typed (commandline -opc)
    set -l last (commandline -ct)
    command $typed[1] completion --words $typed[2..-1] "$last" 2>/dev/null
end
complete -c erniekit -f -a '(__erniekit_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
