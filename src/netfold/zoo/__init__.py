"""Models and data that recipes name: those of the shipped recipes, Hugging Face's, and common formats of files.

    models/   a factory returns a `netfold.train.Model`: gpt, bert, edsr, resnet, dlrm, hf, ...
    data/     a factory returns a `netfold.train.Data`: source, photos, flights, documents, ...

A new one needs a file and a line below. Your own factory has the same form, and needs no line: a recipe names it as
"module:factory".
May use: torch, train. Only dry_run imports these tables; `train` finds them by name, and needs no model or data set.
Invariant: an example is a function of its number and its seed; nothing is downloaded, but by Hugging Face's libraries.
Tests: `pytest tests/train/test_loaders.py tests/train/test_hf.py tests/train/test_learning.py`.
"""

MODELS = {
    "bert": "netfold.zoo.models.transformer:bert",
    "bert-classes": "netfold.zoo.models.transformer:bert_classes",
    "dit": "netfold.zoo.models.dit:dit",
    "dlrm": "netfold.zoo.models.dlrm:dlrm",
    "edsr": "netfold.zoo.models.edsr:edsr",
    "edsr-baseline": "netfold.zoo.models.edsr:baseline",
    "edsr-large": "netfold.zoo.models.edsr:large",
    "edsr-paper": "netfold.zoo.models.edsr:paper",
    "edsr-paper-large": "netfold.zoo.models.edsr:paper_large",
    "gpt": "netfold.zoo.models.transformer:gpt",
    "gpt-moe": "netfold.zoo.models.moe:gpt_moe",
    "hf": "netfold.zoo.models.hf:hf",
    "linear-stack": "netfold.zoo.models.linear:linear_stack",
    "mask-rcnn": "netfold.zoo.models.mask_rcnn:mask_rcnn",
    "resnet18": "netfold.zoo.models.resnet:resnet18",
    "resnet50": "netfold.zoo.models.resnet:resnet50",
}

DATASETS = {
    "class-folders": "netfold.zoo.data.classes:class_folders",
    "coins": "netfold.zoo.data.instances:coins",
    "diffusion": "netfold.zoo.data.diffusion:diffusion",
    "div2k": "netfold.zoo.data.super_resolution:div2k",
    "documents": "netfold.zoo.data.documents:documents",
    "fashion-mnist": "netfold.zoo.data.classes:fashion_mnist",
    "flights": "netfold.zoo.data.table:flights",
    "labelled-documents": "netfold.zoo.data.documents:labelled_documents",
    "masked-documents": "netfold.zoo.data.documents:masked_documents",
    "masked-source": "netfold.zoo.data.text:masked_source",
    "photos": "netfold.zoo.data.super_resolution:photos",
    "shapes": "netfold.zoo.data.instances:shapes",
    "source": "netfold.zoo.data.text:source",
    "source-classes": "netfold.zoo.data.text:source_classes",
    "source-tokens": "netfold.zoo.data.text:source_tokens",
    "table": "netfold.zoo.data.table:table",
    "tokens": "netfold.zoo.data.text:tokens",
}
