"""Recipe source: where a form's values come from - a shipped recipe, an uploaded one - and the upload of data files.

The head of the Train tab. Uploads are kept in folders of the page (uploads.py) and offered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.forms import from_file, from_yaml
from erniekit.webui.pages.page_context import PageContext, folders, notice
from erniekit.webui.recipe_files import read_recipe, recipe_files
from erniekit.webui.translations import translate
from erniekit.webui.uploads import DATA, RECIPES, SUFFIXES, keep

Filled = Callable[[dict[str, Any]], list[Any]]  # the form's updates for a recipe's values


class RecipeSource:
    def __init__(self, context: PageContext) -> None:
        self.context, labels = context, context.labels
        with gr.Row(equal_height=True, elem_id="train-source"):
            self.pick = labels.make(
                gr.Dropdown,
                {"label": "recipe.pick", "info": "recipe.pick.info"},
                choices=self._names(),
                value=None,
                elem_id="train-recipe",
                scale=3,
                min_width=260,
            )
            with gr.Column(scale=1, min_width=170, elem_classes="ek-uploads"):
                self.load = labels.make(
                    gr.UploadButton,
                    {"label": "recipe.load"},
                    file_types=list(SUFFIXES[RECIPES]),
                    size="sm",
                    elem_id="train-load",
                )
                self.data = labels.make(
                    gr.UploadButton,
                    {"label": "data.upload"},
                    file_types=list(SUFFIXES[DATA]),
                    file_count="multiple",
                    size="sm",
                    elem_id="train-upload",
                )

    def wire(self, filled: Filled, outputs: list[Any], files: Any) -> None:
        """`files`: the field that names the training files."""
        lang = self.context.lang
        event_options: dict[str, Any] = dict(show_progress="minimal")

        def picked(lang: str, name: str | None) -> list[Any]:
            recipes = self._files()
            if not name or name not in recipes:
                return [gr.skip()] * len(outputs)
            return self._filled(lang, filled, recipes[name])

        def loaded(lang: str, file: str) -> list[Any]:
            path = self._stored(lang, file, RECIPES)
            return [gr.update(choices=self._names(), value=path.name), *self._filled(lang, filled, path)]

        def uploaded(lang: str, uploads: list[str], given: list[str]) -> Any:
            paths = [self.context.shown(self._stored(lang, file, DATA)) for file in uploads or []]
            gr.Info(translate("data.uploaded", lang, files=", ".join(paths)), duration=6)
            choices = folders(self.context)["train_dataset_path"]
            return gr.update(choices=choices, value=[*(given or []), *paths])

        self.pick.input(picked, [lang, self.pick], outputs, **event_options)
        self.load.upload(loaded, [lang, self.load], [self.pick, *outputs], **event_options)
        self.data.upload(uploaded, [lang, self.data, files], files, **event_options)

    def files(self) -> tuple[Any, list[Any]]:
        """A handler and its output: the recipes there are now."""
        return (lambda: gr.update(choices=self._names())), [self.pick]

    def _files(self) -> Any:
        return recipe_files(self.context.roots.folders[0], self.context.jobs.root)

    def _names(self) -> list[str]:
        return list(self._files())

    def _stored(self, lang: str, file: str, kind: str) -> Any:
        try:
            return keep(file, kind, self.context.jobs.root)
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _filled(self, lang: str, filled: Filled, path: Any) -> list[Any]:
        try:
            shipped = not path.is_relative_to(self.context.jobs.root)
            return filled(from_file(path) if shipped else from_yaml(read_recipe(path), path.name))
        except ErnieKitError as error:
            raise notice(error, lang) from None
