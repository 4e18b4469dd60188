"""Models and data that recipes name: those of the shipped recipes, Hugging Face's, and common formats of files.

    models/   a factory returns a `netfold_train.Model`: gpt, bert, edsr, resnet, dlrm, hf, ...
    data/     a factory returns a `netfold_train.Data`: source, photos, flights, documents, ...

A new one needs a file and a line below. Your own factory has the same form, and needs no line: a recipe names it as
"module:factory".
May use: torch, train. Only dry_run imports these tables; `train` finds them by name, and needs no model or data set.
Invariant: an example is a function of its number and its seed; nothing is downloaded, but by Hugging Face's libraries.
Tests: `pytest train/tests/train/test_loaders.py train/tests/train/test_hf.py train/tests/train/test_learning.py`.
"""

MODELS = {
    "bert": "netfold_train.zoo.models.transformer:bert",
    "bert-classes": "netfold_train.zoo.models.transformer:bert_classes",
    "dit": "netfold_train.zoo.models.dit:dit",
    "dlrm": "netfold_train.zoo.models.dlrm:dlrm",
    "edsr": "netfold_train.zoo.models.edsr:edsr",
    "edsr-baseline": "netfold_train.zoo.models.edsr:baseline",
    "edsr-large": "netfold_train.zoo.models.edsr:large",
    "edsr-paper": "netfold_train.zoo.models.edsr:paper",
    "edsr-paper-large": "netfold_train.zoo.models.edsr:paper_large",
    "gpt": "netfold_train.zoo.models.transformer:gpt",
    "gpt-moe": "netfold_train.zoo.models.moe:gpt_moe",
    "hf": "netfold_train.zoo.models.hf:hf",
    "linear-stack": "netfold_train.zoo.models.linear:linear_stack",
    "mask-rcnn": "netfold_train.zoo.models.mask_rcnn:mask_rcnn",
    "resnet18": "netfold_train.zoo.models.resnet:resnet18",
    "resnet50": "netfold_train.zoo.models.resnet:resnet50",
}

DATASETS = {
    "class-folders": "netfold_train.zoo.data.classes:class_folders",
    "coins": "netfold_train.zoo.data.instances:coins",
    "diffusion": "netfold_train.zoo.data.diffusion:diffusion",
    "div2k": "netfold_train.zoo.data.super_resolution:div2k",
    "documents": "netfold_train.zoo.data.documents:documents",
    "fashion-mnist": "netfold_train.zoo.data.classes:fashion_mnist",
    "flights": "netfold_train.zoo.data.table:flights",
    "labelled-documents": "netfold_train.zoo.data.documents:labelled_documents",
    "masked-documents": "netfold_train.zoo.data.documents:masked_documents",
    "masked-source": "netfold_train.zoo.data.text:masked_source",
    "photos": "netfold_train.zoo.data.super_resolution:photos",
    "shapes": "netfold_train.zoo.data.instances:shapes",
    "source": "netfold_train.zoo.data.text:source",
    "source-classes": "netfold_train.zoo.data.text:source_classes",
    "source-tokens": "netfold_train.zoo.data.text:source_tokens",
    "table": "netfold_train.zoo.data.table:table",
    "tokens": "netfold_train.zoo.data.text:tokens",
}
